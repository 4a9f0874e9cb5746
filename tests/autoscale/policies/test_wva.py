"""The paper's saturation model by hand."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from autoscale.policies.saturation import Limit, Load, leaving_replicas
from autoscale.policies.saturation import replicas_for_load as needed
from autoscale.policies.wva import Wva, WvaConfig
from autoscale.ratio import PdRatio, whole
from autoscale.slo import SloConfig
from autoscale.types import ControllerState, Decision, PoolKey, PoolLimits, PoolStats, ReplicaStats, Snapshot
from kvtransfer.topology import Role

P, D = Role.PREFILL, Role.DECODE
KEYS = {role: PoolKey("g0", role) for role in Role}
LIMITS = WvaConfig().limits(D)
# KV usage and waiting requests of a replica.
Metrics = tuple[float, float]
IDLE: Metrics = (0.0, 0.0)
# Mean spare KV of 0.35: the role neither grows nor shrinks.
CALM: list[Metrics] = [(0.45, 0.0)] * 2

loads = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 50)), min_size=1, max_size=12)


def freed(*arguments: Any) -> float:
    return sum(load.weight for load in leaving_replicas(*arguments))


def decide(snapshot: Snapshot, **config: Any) -> Decision:
    return Wva(WvaConfig.model_validate(config), ratio=PdRatio(1, 1), slo=SloConfig()).decide(snapshot)


@pytest.fixture(scope="session")
def fleet(make_snapshot: Callable[..., Snapshot]) -> Callable[..., Snapshot]:
    """Prefill and decode replicas with these loads; by default their number is the desired one."""

    def make(prefill: Sequence[Metrics], decode: Sequence[Metrics], desired: tuple[int, int] | None = None) -> Snapshot:
        counts = desired or (len(prefill), len(decode))
        state = ControllerState(desired=dict(zip(KEYS.values(), counts, strict=True)))
        snapshot = make_snapshot(len(prefill), len(decode), state=state)
        pools = [
            replace(
                pool,
                replicas=tuple(
                    replace(replica, kv_usage_frac=kv, waiting_requests=queue)
                    for replica, (kv, queue) in zip(pool.replicas, role_loads, strict=True)
                ),
            )
            for pool, role_loads in zip(snapshot.pools, (prefill, decode), strict=True)
        ]
        return replace(snapshot, pools=tuple(pools))

    return make


Fleet = Callable[..., Snapshot]


def test_the_papers_numbers(fleet: Fleet) -> None:
    # Experiment 1: three requests of 5120 tokens in a cache of 16384 are 93.75 %, and 0.9375 / (0.8 - 0.3) = 1.875.
    decision = decide(fleet(CALM, [(0.9375, 0.0)]))
    assert decision.wanted == {P: 2.0, D: 2.0}
    assert decision.is_step
    # Four that hold 2.4 together: a mean spare of 0.2 is below 0.3, and (2.4 + 5 x 0.3) / 0.8 = 4.875.
    more = decide(fleet([(0.45, 0.0)] * 2, [(0.6, 0.0)] * 4))
    assert more.wanted == {P: 2.0, D: 5.0}
    assert more.ratio == PdRatio(2, 5)


@pytest.mark.parametrize(
    ("decode", "expected"),
    [
        ([(0.5, 0.0)] * 4, 4.0),  # a mean spare of 0.3 is just enough
        ([(0.1, 3.0)] * 4, 6.0),  # the spare queue is 2, below 3: 12 / (5 - 3)
        ([(0.1, 5.0)] * 2, 5.0),  # all saturated: 10 / 2
        ([(0.8, 0.0)], 2.0),
        # Mean spare queue of the two unsaturated replicas: (5 + 0.1)/2. 6.9 / 2 = 3.45.
        ([(0.1, 0.0), (0.1, 4.9), (0.8, 2.0)], 4.0),
        ([(0.1, 5.0), (0.75, 0.0)], 3.0),  # 0.85 / 0.5 and 5 / 2: three, which is also one more than now
        ([(0.0, 0.0), (0.9, 0.0)], 2.0),  # only one is unsaturated: no replica leaves
        ([(0.1, 0.0), (0.1, 0.0), (0.9, 0.0)], 2.0),  # one leaves: 0.2 on the other unsaturated one
        ([(0.4, 0.0), (0.4, 0.0), (0.9, 0.0)], 3.0),  # 0.8 would saturate the other unsaturated one
        ([(0.0, 0.0)] * 5, 1.0),
    ],
)
def test_a_role_by_hand(fleet: Fleet, decode: list[Metrics], expected: float) -> None:
    decision = decide(fleet(CALM, decode))
    assert decision.wanted == {P: 2.0, D: expected}


def test_whole_replicas_must_be_freed_though_the_mean_would_allow_more() -> None:
    # 1.0 over three of 0.8 - 0.3 each: by the mean, one of four could leave, but the one at 0.79 takes no more load.
    fragmented = [(0.79, 0.0), (0.07, 0.0), (0.07, 0.0), (0.07, 0.0)]
    assert freed([Load((0.25, 0.0))] * 4, LIMITS, 2) == 2
    assert freed([Load(metrics) for metrics in fragmented], LIMITS, 2) == 0


def test_the_most_expensive_replica_leaves_first_if_the_others_have_room_for_it() -> None:
    cheap, dear = Load((0.0, 0.0), 0.7, "cheap", 1.0), Load((0.3, 0.0), 1.0, "dear", 2.0)
    assert freed([cheap, cheap, dear], LIMITS, 2) == pytest.approx(1.7)  # then one of the cheap ones
    # The expensive one holds 0.6, and the mean spare of the others would be 0.8 - 0.6 / 1.4.
    full = dear._replace(metrics=(0.75, 0.0))
    assert freed([cheap, cheap, full], LIMITS, 2) == pytest.approx(0.7)
    # A group at its lowest count gives nothing, however idle its replicas are.
    assert freed([cheap, dear], LIMITS, 2, {"cheap": 0, "dear": 1}) == 1.0
    assert freed([cheap, full], LIMITS, 2, {"cheap": 0, "dear": 1}) == 0.0


def test_one_replica_more_is_wanted_even_if_the_total_load_is_low(fleet: Fleet) -> None:
    # Mean spare queue of the unsaturated (0.2) is low, but 4.8 + 0 x 3 over 2 a replica is less than the four there.
    crowded = [(0.9, 0.0), (0.9, 0.0), (0.1, 4.8), (0.9, 0.0)]
    assert decide(fleet(CALM, crowded), spare_kv_frac=0.0).wanted == {P: 2.0, D: 5.0}


def test_replicas_that_do_not_serve_yet_are_neither_asked_for_twice_nor_taken_away(fleet: Fleet) -> None:
    assert decide(fleet(CALM, [(0.6, 0.0)] * 4, desired=(2, 5))).wanted == {P: 2.0, D: 5.0}
    assert decide(fleet(CALM, [IDLE] * 4, desired=(2, 5))).wanted == {P: 2.0, D: 5.0}


def test_a_withdrawn_replica_is_no_headroom(fleet: Fleet) -> None:
    snapshot = fleet(CALM, [(0.6, 0.0), (0.6, 0.0), IDLE], desired=(2, 2))
    serving = replace(snapshot, state=replace(snapshot.state, admitted=("p0", "p1", "d0", "d1"), withdrawn={"d2": 1.0}))
    assert decide(serving).wanted == {P: 2.0, D: 3.0}  # 1.2 / 0.5


def test_a_role_may_keep_more_spare_than_the_other(fleet: Fleet) -> None:
    snapshot = fleet([(0.4, 0.0)] * 2, [(0.4, 0.0)] * 2)
    assert decide(snapshot).wanted == {P: 2.0, D: 2.0}
    assert decide(snapshot, prefill_aggression_frac=1.5).wanted == {P: 3.0, D: 2.0}  # 0.8 / (0.8 - 0.45)


def test_without_observations_there_is_no_decision(fleet: Fleet, make_snapshot: Callable[..., Snapshot]) -> None:
    assert decide(make_snapshot(1, 2)).wanted is None
    snapshot = fleet(CALM, CALM)
    new = ReplicaStats(replica_id="new", observed_s=0.0, kv_usage_frac=0.1)
    decode = replace(snapshot.pools[1], replicas=(*snapshot.pools[1].replicas, new))
    blind = decide(replace(snapshot, pools=(snapshot.pools[0], decode)))
    assert blind.wanted is None
    assert blind.reason == "no decode replica serves, or one does not report its KV usage and its queue"
    assert decide(replace(snapshot, pools=(snapshot.pools[0], replace(decode, replicas=())))).wanted is None


def test_a_service_of_which_only_an_aggregated_group_serves_is_sized_by_that_group(
    make_snapshot: Callable[..., Snapshot],
) -> None:
    both = PoolStats(
        key=PoolKey("both", D),
        replicas=(ReplicaStats(replica_id="both0", observed_s=1000.0, kv_usage_frac=0.9375, waiting_requests=0.0),),
        target_replicas=1,
        limits=PoolLimits(lowest_replicas=1, highest_replicas=8, capacity=0.5, prompt_capacity=0.5),
    )
    pair = make_snapshot(0, 0, bounds=(0, 8))
    state = ControllerState(desired={**dict.fromkeys(KEYS.values(), 0), both.key: 1}, admitted=("both0",))
    decision = decide(replace(pair, pools=(*pair.pools, both), state=state))
    # Its replica is worth half of each role: 0.5 x 0.9375 / (0.8 - 0.3) = 0.94, which are two replicas.
    assert decision.wanted == {P: 1.0, D: 1.0}
    assert decision.ratio == PdRatio(1, 1)


@pytest.mark.parametrize(
    "config", [{"spare_kv_frac": 0.8}, {"spare_waiting_requests": 5}, {"decode_aggression_frac": 3.0}]
)
def test_a_spare_that_leaves_nothing_to_use_is_refused(config: dict[str, float]) -> None:
    with pytest.raises(ValidationError, match="lower the spare or the aggression"):
        WvaConfig.model_validate(config)


@given(loads, loads)
def test_wanted_counts_are_bounded_and_depend_on_the_snapshot_alone(
    fleet: Fleet, prefill: list[Metrics], decode: list[Metrics]
) -> None:
    snapshot = fleet(prefill, decode)
    decision = decide(snapshot)
    assert decision == decide(snapshot)
    assert decision.wanted is not None
    assert decision.memory is None
    for role, role_loads in ((P, prefill), (D, decode)):
        by_load = max(needed(sum(of), limit) for of, limit in zip(zip(*role_loads, strict=True), LIMITS, strict=True))
        assert 1.0 <= decision.wanted[role] <= max(len(role_loads) + 1, whole(by_load))


@given(st.integers(1, 12), st.floats(0, 1), st.floats(0, 50), st.floats(0, 0.5), st.floats(0, 20))
def test_more_load_on_every_replica_never_wants_fewer_replicas(
    fleet: Fleet, count: int, kv: float, queue: float, more_kv: float, more_queue: float
) -> None:
    less, more = (
        decide(fleet(CALM, [load] * count)).wanted for load in ((kv, queue), (kv + more_kv, queue + more_queue))
    )
    assert less is not None
    assert more is not None
    assert more[D] >= less[D]


@given(st.floats(0, 100), st.floats(0.1, 1.0), st.floats(0.0, 0.9))
def test_the_count_for_a_load_restores_the_headroom(load: float, saturated: float, share: float) -> None:
    limit = Limit(saturated=saturated, spare=saturated * share)
    # Of n (tau - gamma) nothing is left, and nothing is missing.
    assert needed(load, limit) * (limit.saturated - limit.spare) == pytest.approx(load)


@given(loads)
def test_no_replica_is_freed_into_saturation(drawn: list[Metrics]) -> None:
    unsaturated = [load for load in drawn if load[0] < 0.8 and load[1] < 5.0]
    count = freed([Load(metrics) for metrics in unsaturated], LIMITS, 2)
    assert 0 <= count <= max(0, len(unsaturated) - 1)
    if count:
        staying = len(unsaturated) - count
        assert sum(kv for kv, _ in unsaturated) <= staying * 0.5 + 1e-6
        assert sum(queue for _, queue in unsaturated) <= staying * 2.0 + 1e-6
