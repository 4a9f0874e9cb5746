"""Groups of unequal speed: a replica counts as what it is worth, from placement to a whole tick."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.controller import Controller
from autoscale.decide.gate import admissible
from autoscale.decide.placement import place
from autoscale.headcount import standard_replicas
from autoscale.ratio import PdRatio
from autoscale.types import (
    ControllerState,
    Latency,
    Plan,
    PoolKey,
    PoolLimits,
    PoolStats,
    ReplicaStats,
    Snapshot,
    Traffic,
)
from kvtransfer.topology import Role

P, D = Role.PREFILL, Role.DECODE


def pools(
    capacities: Sequence[tuple[float, float]],
    *,
    costs: Sequence[float] = (1.0,) * 3,
    highest: Sequence[int] = (9,) * 3,
    lowest: Sequence[int] = (1,) * 3,
) -> list[PoolStats]:
    """A group for each pair of capacities, of prefill and of decode."""
    return [
        PoolStats(
            key=PoolKey(f"g{number}", role),
            replicas=(),
            target_replicas=0,
            limits=PoolLimits(
                lowest_replicas=lowest[number],
                highest_replicas=highest[number],
                capacity=capacity,
                cost=costs[number],
                gpus_per_replica=1.0,
            ),
        )
        for number, pair in enumerate(capacities)
        for role, capacity in zip(Role, pair, strict=True)
    ]


def aggregated(name: str, own: float, prompts: float, highest: int = 9) -> PoolStats:
    limits = PoolLimits(lowest_replicas=1, highest_replicas=highest, capacity=own, prompt_capacity=prompts, cost=1.0)
    return PoolStats(key=PoolKey(name, D), replicas=(), target_replicas=0, limits=limits)


def spread(placed: Mapping[PoolKey, int]) -> dict[str, tuple[int, int]]:
    """Prefill and decode replicas of each group."""
    return {key.group: (placed.get(PoolKey(key.group, P), 0), placed[PoolKey(key.group, D)]) for key in placed}


def test_half_as_fast_replicas_are_needed_twice() -> None:
    slow = pools([(1.0, 1.0), (0.5, 0.5)], highest=(1, 9))
    current = {pool.key: 1 for pool in slow}
    placed = place({P: 3.0, D: 3.0}, current, slow, PdRatio(1, 1))
    assert spread(placed.counts) == {"g0": (1, 1), "g1": (4, 4)}
    assert not any(placed.pending.values())


def test_a_group_keeps_the_ratio_by_capacity() -> None:
    # At 1:1 a decode replica worth a quarter needs half of a prefill replica that is worth one half.
    slow = pools([(1.0, 1.0), (0.5, 0.25)], highest=(1, 9))
    placed = place({P: 2.0, D: 2.0}, {pool.key: 1 for pool in slow}, slow, PdRatio(1, 1))
    assert spread(placed.counts) == {"g0": (1, 1), "g1": (2, 4)}


def test_cost_is_compared_by_capacity() -> None:
    # A slow replica costs 1 for a third of the work, a fast one 2: the fast one is cheaper though its price is higher.
    priced = pools([(1.0, 1.0), (1 / 3, 1 / 3)], costs=(2.0, 1.0))
    current = {pool.key: 1 for pool in priced}
    assert spread(place({P: 4.0, D: 4.0}, current, priced, PdRatio(1, 1)).counts) == {"g0": (4, 4), "g1": (1, 1)}
    # So is it for the last third: a load that rises in thirds would else fill the dearer group.
    assert spread(place({P: 2.6, D: 2.6}, current, priced, PdRatio(1, 1)).counts) == {"g0": (3, 3), "g1": (1, 1)}


def test_no_replica_leaves_that_is_needed() -> None:
    mixed = pools([(1.0, 1.0), (0.5, 0.5)])
    current = {pool.key: 2 for pool in mixed}
    assert spread(place({P: 2.6, D: 2.6}, current, mixed, PdRatio(1, 1)).counts) == {"g0": (2, 2), "g1": (2, 2)}
    assert spread(place({P: 2.5, D: 2.5}, current, mixed, PdRatio(1, 1)).counts) == {"g0": (2, 2), "g1": (1, 1)}


def test_aggregated_replicas_do_the_work_of_both_roles() -> None:
    # At 1:1 an aggregated replica does half of both: four of them and one pair are worth 3P3D.
    both = [*pools([(1.0, 1.0)], highest=(1,)), aggregated("g1", 0.5, 0.5)]
    placed = place({P: 3.0, D: 3.0}, {pool.key: 1 for pool in both}, both, PdRatio(1, 1))
    assert spread(placed.counts) == {"g0": (1, 1), "g1": (0, 4)}
    assert not any(placed.pending.values())


def test_aggregated_replicas_lead_where_prefill_leads() -> None:
    both = [*pools([(1.0, 1.0)], highest=(2,)), aggregated("g1", 0.25, 0.5)]
    placed = place({P: 4.0, D: 2.0}, {pool.key: 1 for pool in both}, both, PdRatio(2, 1))
    # Prefill: 2 + 4 x 0.5; decode: 1 + 4 x 0.25.
    assert spread(placed.counts) == {"g0": (2, 1), "g1": (0, 4)}


def test_the_gate_admits_by_capacity() -> None:
    ready = {P: ["p0"], D: ["d0", "d1", "d2", "d3", "d4", "d5"]}
    alike = admissible(ready, frozenset(), PdRatio(1, 1), 1.0, 1.0)
    assert alike == ["p0", "d0", "d1"]
    slow_decode = admissible(ready, frozenset(), PdRatio(1, 1), 0.25, 0.5)  # four of them need one prefill replica
    assert slow_decode == ["p0", *ready[D]]


def test_beside_aggregated_groups_the_gate_keeps_the_ratio_that_placement_gave() -> None:
    # The policy wants 3P5D. The pair has 1P4D by placement, since the aggregated replicas do prompts of two.
    (prefill, decode), both = pools([(1.0, 1.0)]), aggregated("both", 0.25, 0.5)
    desired = {prefill.key: 1, decode.key: 4, both.key: 4}
    of = []
    for pool in (prefill, decode, both):
        names = [f"{pool.key}-{number}" for number in range(desired[pool.key])]
        replicas = tuple(ReplicaStats(replica_id=name, observed_s=1000.0) for name in names)
        of.append(replace(pool, replicas=replicas, target_replicas=desired[pool.key]))
    policy = {"kind": "static", "prefill": 3, "decode": 5}
    config = AutoscaleConfig.model_validate({"policy": policy})
    plan = Controller(config).tick(Snapshot(now_s=1000.0, pools=tuple(of), state=ControllerState(desired=desired)))
    assert dict(plan.state.desired) == desired
    assert len(plan.admitted) == 9  # at 3P5D one of the four decode replicas would wait for a second prefill replica


capacities = st.sampled_from([0.2, 0.47, 0.5, 1.0, 1.3, 2.0])
groups = st.lists(st.tuples(capacities, capacities), min_size=1, max_size=3)
wishes = st.tuples(st.floats(0.5, 14.0), st.sampled_from(["1:5", "1:3", "1:1", "3:2", "4:1"]).map(PdRatio.parse))


@given(worth=groups, wish=wishes, current=st.integers(1, 9), costs=st.permutations([1.0, 2.0, 0.0]))
def test_placed_replicas_are_worth_what_is_wanted_and_stay(
    worth: list[tuple[float, float]], wish: tuple[float, PdRatio], current: int, costs: list[float]
) -> None:
    leaders, ratio = wish
    wanted = {ratio.leader: leaders, ratio.follower: leaders * ratio.follower_share}
    of = pools(worth, costs=costs)
    placed = place(wanted, {pool.key: current for pool in of}, of, ratio, spare_followers=len(worth))
    for _ in range(3):  # a group that lacks followers may give a leader away in each cycle
        placed = place(wanted, placed.counts, of, ratio, spare_followers=len(worth))
    standard = standard_replicas(placed.counts, of)
    for role in Role:
        assert standard[role] >= wanted[role] - placed.pending[role] - 1e-6
    for pool in of:
        assert pool.limits.lowest_replicas <= placed.counts[pool.key] <= pool.limits.highest_replicas
        # A leader that is not needed leaves, as far as the lowest counts allow.
        is_spare_leader = pool.key.role is ratio.leader and placed.counts[pool.key] > pool.limits.lowest_replicas
        if is_spare_leader and not placed.pending[ratio.leader]:
            assert standard[ratio.leader] - pool.limits.capacity < wanted[ratio.leader] - 1e-9
    again = place(wanted, placed.counts, of, ratio, spare_followers=len(worth))
    assert again.counts == placed.counts


class Service:
    """A service whose replicas start within one tick."""

    def __init__(self, of: Sequence[PoolStats], counts: Mapping[PoolKey, int] | None = None) -> None:
        """``counts``: replicas of each pool at first; ``None``: the lowest counts."""
        self._pools = of
        self._counts = dict(counts or {pool.key: pool.limits.lowest_replicas for pool in of})
        self._state, self._now_s = ControllerState(), 1000.0

    def run(self, config: AutoscaleConfig, ticks: int) -> list[Plan]:
        controller = Controller(config)
        return [self._tick(controller) for _ in range(ticks)]

    def _tick(self, controller: Controller) -> Plan:
        self._now_s += 5.0
        observed = []
        for pool in self._pools:
            count = self._counts[pool.key]
            names = (f"{pool.key}-{number}" for number in range(count))
            replicas = tuple(ReplicaStats(replica_id=name, observed_s=self._now_s) for name in names)
            observed.append(replace(pool, target_replicas=count, replicas=replicas))
        plan = controller.tick(Snapshot(now_s=self._now_s, pools=tuple(observed), state=self._state))
        self._counts, self._state = dict(plan.counts), plan.state
        return plan


def test_fewer_replicas_that_are_worth_more_are_a_growth() -> None:
    # The slow group may have no more replicas; two fast ones take the place of three slow ones, which were worth 1.5.
    fast, slow = pools([(1.0, 1.0), (0.5, 0.5)], lowest=(0, 0), highest=(9, 0))[:2], pools([(1.0, 1.0), (0.5, 0.5)])[2:]
    gone = [replace(pool, limits=replace(pool.limits, lowest_replicas=0, highest_replicas=0)) for pool in slow]
    before = {**{pool.key: 0 for pool in fast}, **{pool.key: 3 for pool in gone}}
    config = AutoscaleConfig.model_validate({"policy": {"kind": "static", "prefill": 2, "decode": 2}})
    state = ControllerState(desired=before, ticked_s=995.0)
    plan = Controller(config).tick(Snapshot(now_s=1000.0, pools=(*fast, *gone), state=state))
    assert spread(plan.state.desired) == {"g0": (2, 2), "g1": (0, 0)}
    assert (plan.state.scaled_out_s, plan.state.scaled_in_s) == (1000.0, None)


def test_an_aggregated_replica_is_not_added_for_a_role_that_has_enough() -> None:
    # Decode is one short and prefill has enough: the pair grows, though the aggregated group would cost less.
    (prefill, decode), both = pools([(1.0, 1.0)], costs=(5.0,)), aggregated("both", 0.5, 0.5)
    both = replace(both, limits=replace(both.limits, lowest_replicas=0))
    current = {prefill.key: 2, decode.key: 2, both.key: 0}
    placed = place({P: 2.0, D: 3.0}, current, [prefill, decode, both], PdRatio(2, 3))
    assert spread(placed.counts) == {"g0": (2, 3), "both": (0, 0)}


def wva_settles(
    bounds: Mapping[str, Any], kv: Mapping[Role, float], *, lowest: int, slow: tuple[int, int]
) -> dict[str, tuple[int, int]]:
    """Where ``wva`` settles, from three fast replicas of each role and expensive slow ones; ``kv``: KV in use."""
    of = pools([(1.0, 1.0), (0.5, 0.5)], costs=(1.0, 5.0), lowest=(1, lowest))
    counts = {PoolKey("g0", P): 3, PoolKey("g0", D): 3, PoolKey("g1", P): slow[0], PoolKey("g1", D): slow[1]}
    config = AutoscaleConfig.model_validate(
        {
            "policy": {"kind": "wva"},
            "bounds": bounds,
            "guard": {"cooldown_out_s": 0.0, "cooldown_in_s": 0.0},
            "gate": {"observation_s": 0.0},
        }
    )
    state, now_s = ControllerState(desired=counts), 1000.0
    for _ in range(40):
        now_s += 5.0
        used = {role: kv[role] / standard_replicas(counts, of)[role] for role in Role}
        seen = []
        for pool in of:
            load = {"kv_usage_frac": min(1.0, used[pool.key.role]), "waiting_requests": 0.0}
            names = [f"{pool.key}-{number}" for number in range(counts[pool.key])]
            replicas = tuple(ReplicaStats(replica_id=name, observed_s=now_s, **load) for name in names)
            seen.append(replace(pool, replicas=replicas, target_replicas=len(names)))
        traffic = Traffic(requests_per_s=1.0, served_per_s=1.0)
        latency = Latency(ttft_s=0.1, tpot_s=0.01)
        snapshot = Snapshot(now_s=now_s, pools=tuple(seen), state=state, latency=latency, traffic=traffic)
        plan = Controller(config).tick(snapshot)
        state, counts = plan.state, dict(plan.counts)
    return spread(state.desired)


def test_wva_frees_only_what_bounds_and_pairs_let_leave() -> None:
    # Prefill needs 2.9 and decode 2.9 of 4: a fast replica of each role may leave where no slow one can.
    kv = {P: 1.45, D: 1.45}
    bounds = {"prefill": {"lowest_replicas": 2}, "decode": {"lowest_replicas": 2}}
    assert wva_settles(bounds, kv, lowest=1, slow=(2, 2)) == {"g0": (2, 2), "g1": (2, 2)}
    # The slow prefill replica must stay, since the decode replica of its group is needed: a fast one leaves.
    assert wva_settles({}, {P: 0.7, D: 1.7}, lowest=0, slow=(1, 1)) == {"g0": (1, 3), "g1": (1, 1)}
    # Neither is needed, so both leave.
    assert wva_settles({}, {P: 0.7, D: 1.3}, lowest=0, slow=(1, 1)) == {"g0": (2, 3), "g1": (0, 0)}


def test_a_damped_scale_in_removes_a_large_replica_if_no_small_one_is_left() -> None:
    of = pools([(1.0, 1.0), (0.5, 0.5)], lowest=(1, 0))
    service = Service(of)
    for count, expected in ((2, {"g0": (2, 2), "g1": (0, 0)}), (1, {"g0": (1, 1), "g1": (0, 0)})):
        config = AutoscaleConfig.model_validate(
            {
                "policy": {"kind": "static", "prefill": count, "decode": count},
                "guard": {"cooldown_out_s": 0.0, "cooldown_in_s": 10.0, "damping_in_frac": 0.5},
                "gate": {"observation_s": 10.0},
            }
        )
        assert spread(service.run(config, ticks=60)[-1].state.desired) == expected


def test_a_replica_that_is_worth_more_than_a_step_may_leave() -> None:
    """Two standard replicas may leave at once (``step_in_replicas``); a replica of the second group is worth 3.1."""
    of = pools([(1.0, 1.0), (3.1, 3.1)], costs=(2.0, 1.0), lowest=(1, 0))
    service = Service(of)
    for count in (13, 1):
        policy = {"policy": {"kind": "static", "prefill": count, "decode": count}, "gate": {"observation_s": 10.0}}
        config = AutoscaleConfig.model_validate({**policy, "guard": {"cooldown_out_s": 0.0, "cooldown_in_s": 10.0}})
        settled = service.run(config, ticks=80)[-1].state.desired
        assert spread(settled) == ({"g0": (1, 1), "g1": (4, 4)} if count == 13 else {"g0": (1, 1), "g1": (0, 0)})


@given(
    worth=groups,
    first=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    second=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    budget=st.one_of(st.none(), st.integers(6, 40)),
    is_mixed=st.booleans(),
    may_sleep=st.booleans(),
)
def test_counts_settle_at_what_is_wanted_or_at_the_limits(
    worth: list[tuple[float, float]],
    first: tuple[int, int],
    second: tuple[int, int],
    budget: int | None,
    is_mixed: bool,
    may_sleep: bool,
) -> None:
    of = [
        *pools(worth, lowest=(1, 0, 0) if may_sleep else (1, 1, 1)),
        *([aggregated("both", 0.4, 0.3)] if is_mixed else []),
    ]
    wishes = [{P: float(prefill), D: float(decode)} for prefill, decode in (first, second)]
    assume(all(PdRatio.of(wish).is_supported for wish in wishes))
    service = Service(of)
    for wish in wishes:
        config = AutoscaleConfig.model_validate(
            {
                "policy": {"kind": "static", "prefill": int(wish[P]), "decode": int(wish[D])},
                "guard": {"cooldown_out_s": 0.0, "cooldown_in_s": 10.0, "budget_gpus": budget},
                "gate": {"observation_s": 10.0},
            }
        )
        plans = service.run(config, ticks=120)
        settled = plans[-1].state.desired
        # At a budget that cannot hold both roles' wishes, one replica may change roles once in a long cooldown.
        assert budget is not None or all(plan.state.desired == settled for plan in plans[-40:])
        gpus = sum(settled[pool.key] * pool.limits.gpus_per_replica for pool in of)
        assert budget is None or gpus <= max(budget, len(of))  # one replica of each pool always stays
        if not plans[-1].held_back and not plans[-1].pending:  # neither bounds nor budget bind
            standard = standard_replicas(settled, of)
            assert all(standard[role] >= wish[role] - 1e-6 for role in Role)


shares = st.sampled_from([0.2, 0.33, 0.5, 0.67])


@given(
    own=shares,
    prompts=shares,
    ratios=st.tuples(*[st.sampled_from(["1:3", "1:2", "1:1", "2:1", "3:1"]).map(PdRatio.parse)] * 2),
    leaders=st.tuples(st.integers(1, 10), st.integers(1, 10)),
    cost=st.sampled_from([0.1, 1.0, 10.0]),
    pairs=st.integers(1, 2),
    most=st.sampled_from([2, 8, 40]),
)
def test_groups_with_and_without_prefill_do_the_work_of_both_roles_at_any_ratio(
    own: float,
    prompts: float,
    ratios: tuple[PdRatio, PdRatio],
    leaders: tuple[int, int],
    cost: float,
    pairs: int,
    most: int,
) -> None:
    """The ratio of an aggregated replica is its own, and the policy's ratio changes: nothing stays pending."""
    pair = pools([(1.0, 1.0)] * pairs, highest=(40,) * pairs)
    both = aggregated("both", own, prompts, highest=most)
    of = [*pair, replace(both, limits=replace(both.limits, cost=cost))]
    placed = {pool.key: 1 for pool in of}
    for ratio, count in zip(ratios, leaders, strict=True):
        wanted = {ratio.leader: float(count), ratio.follower: max(1.0, count * ratio.follower_share)}
        for _ in range(6):
            result = place(wanted, placed, of, ratio, spare_followers=pairs)
            placed = dict(result.counts)
        assert not any(result.pending.values())
        standard = standard_replicas(placed, of)
        assert all(standard[role] >= wanted[role] - 1e-6 for role in Role)
        assert place(wanted, placed, of, ratio, spare_followers=pairs).counts == placed


def tight(
    worth: float, first: Sequence[int], wish: tuple[int, int], budget_gpus: int, *, ticks: int
) -> list[dict[PoolKey, int]]:
    """The counts of each plan for a static wish; ``first``: the counts before, of prefill and decode of each group."""
    of = pools([(1.0, 1.0), (worth, worth)], highest=(8, 8), costs=(0.0, 0.0))
    policy = {"kind": "static", "prefill": wish[0], "decode": wish[1]}
    config = AutoscaleConfig.model_validate({"policy": policy, "guard": {"budget_gpus": budget_gpus}})
    service = Service(of, {pool.key: count for pool, count in zip(of, first, strict=True)})
    return [dict(plan.state.desired) for plan in service.run(config, ticks)]


@given(
    worth=st.sampled_from([0.7, 0.5, 0.45, 0.4, 0.33, 0.25]),
    first=st.tuples(*[st.integers(1, 3)] * 4),
    wish=st.tuples(st.integers(4, 6), st.integers(4, 6)),
    more_gpus=st.sampled_from([-2, 0, 1, 2, 4, 6, 8]),
)
def test_whole_replicas_of_a_smaller_variant_stay_inside_the_budget(
    worth: float, first: tuple[int, ...], wish: tuple[int, int], more_gpus: int
) -> None:
    """Each group has whole replicas, so groups of unequal capacity may need more followers than the guard counts."""
    budget_gpus, before = max(4, sum(first) + more_gpus), sum(first)
    for counts in tight(worth, first, wish, budget_gpus, ticks=50):
        assert sum(counts.values()) <= max(budget_gpus, before)
        before = sum(counts.values())


@pytest.mark.parametrize(
    ("worth", "first", "budget_gpus"), [(0.25, (2, 2, 2, 2), 14), (0.25, (1, 1, 1, 1), 14), (0.45, (3, 3, 1, 3), 14)]
)
def test_a_static_wish_beyond_the_budget_leads_to_counts_that_stay(
    worth: float, first: tuple[int, ...], budget_gpus: int
) -> None:
    path = tight(worth, first, (6, 6), budget_gpus, ticks=120)
    assert all(counts == path[-1] for counts in path[-50:])  # 50 ticks are two cooldowns of a scale-in
    assert sum(path[-1].values()) == budget_gpus
