"""A virtual cluster by hand and at random."""

import random
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscale.engines.profile import EngineProfile
from autoscale.observe.histogram import TTFT_EDGES_S
from autoscale.report import RequestRecord
from autoscale.sim.cluster import VirtualCluster
from autoscale.sim.replica import VirtualReplica
from autoscale.slo import SloConfig
from autoscale.traces.trace import TraceRequest
from autoscale.types import PoolKey
from kvtransfer.topology import Role
from router.config import RouterConfig

MakeProfile = Callable[..., EngineProfile]
P, D = Role.PREFILL, Role.DECODE


def request(at_s: float, input_tokens: int, output_tokens: int) -> TraceRequest:
    return TraceRequest(at_s=at_s, input_tokens=input_tokens, output_tokens=output_tokens)


def replay(
    trace: Sequence[TraceRequest],
    counts: Mapping[Role, int],
    profiles: Mapping[Role, EngineProfile],
    router: RouterConfig,
    rng: random.Random | None = None,
    **link: float,
) -> list[RequestRecord]:
    keys = {PoolKey("g0", role): count for role, count in counts.items()}
    cluster = VirtualCluster({key: profiles[key.role] for key in keys}, router, rng or random.Random(0), **link)  # type: ignore[arg-type]
    return cluster.replay(trace, keys)


def test_a_long_prompt_by_hand(make_profile: MakeProfile) -> None:
    profile = make_profile()
    (record,) = replay([request(5.0, 200, 3)], {P: 1, D: 1}, {P: profile, D: profile}, RouterConfig())
    # Two chunks of 100 tokens at 0.11 s, a handoff of 0.21 s, the last prompt token again in a step, two steps more.
    assert record.ttft_s == pytest.approx(0.11 + 0.11 + 0.21 + 0.021)
    assert record.tpot_s == pytest.approx(0.021)
    assert record.output_tokens == 3
    assert record.error is None


def test_a_short_prompt_is_prefilled_where_it_decodes(make_profile: MakeProfile) -> None:
    profile = make_profile()
    (record,) = replay([request(0.0, 100, 2)], {P: 1, D: 1}, {P: profile, D: profile}, RouterConfig())
    assert record.ttft_s == pytest.approx(0.11)


def test_a_prompts_last_block_is_cached_only_if_it_is_full(make_profile: MakeProfile) -> None:
    key = PoolKey("g0", D)
    cluster = VirtualCluster({key: make_profile()}, RouterConfig(), random.Random(0), prefix_block_tokens=100)
    replica = cluster.add(key, "d")
    cluster.route(key, ["d"])
    cluster.submit([replace(request(at_s, 250, 1), hash_ids=(1, 2, 3)) for at_s in (0.0, 60.0)])
    cluster.run()
    assert replica.engine.counters.cached_tokens == 200


def test_prefill_waits_if_its_kv_is_full_of_prompts_that_the_link_has_not_moved_yet(make_profile: MakeProfile) -> None:
    """Each prompt takes half of prefill's KV. The link is slow: the third starts once the first has been moved."""
    profile = make_profile()
    tokens = profile.kv_tokens // 2 - profile.block_tokens
    slow = tokens * profile.handoff.kv_bytes_per_token / 50.0
    config = RouterConfig.model_validate({"length": {"local_max_tokens": 0, "local_cap_tokens": 0}})
    first, second, third = replay(
        [request(0.0, tokens, 1)] * 3, {P: 1, D: 3}, {P: profile, D: profile}, config, uplink_bytes_per_s=slow
    )
    assert first.prefilled_s is not None and second.prefilled_s is not None and third.prefilled_s is not None
    assert second.prefilled_s < 50.0
    assert third.prefilled_s > first.prefilled_s + 50.0


def test_requests_go_to_the_replica_with_the_least_to_do(make_profile: MakeProfile) -> None:
    profile = make_profile(max_running=1)
    trace = [request(0.0, 100, 5), request(0.01, 100, 5)]
    alone, beside = replay(trace, {P: 1, D: 2}, {P: profile, D: profile}, RouterConfig())
    assert beside.ttft_s == alone.ttft_s
    first, second = replay(trace, {P: 1, D: 1}, {P: profile, D: profile}, RouterConfig())
    assert second.ttft_s is not None
    assert first.ttft_s is not None
    assert second.ttft_s > first.ttft_s + 4 * 0.021


@pytest.mark.parametrize(("pace", "expected_s"), [(0.0, 0.44), (2e-3, 0.11)])
def test_replicas_count_a_long_prompt_by_its_own_objective(
    make_profile: MakeProfile, pace: float, expected_s: float
) -> None:
    """200 tokens at 2 ms each have 0.4 s instead of 0.1 s, so their TTFT of 0.44 s counts as 0.11 s."""
    keys = {role: PoolKey("g0", role) for role in Role}
    slo = SloConfig(ttft_s=0.1, ttft_s_per_input_token=pace)
    cluster = VirtualCluster(dict.fromkeys(keys.values(), make_profile()), RouterConfig(), random.Random(0), slo=slo)
    replicas = {role: cluster.add(key, str(role)) for role, key in keys.items()}
    for role, key in keys.items():
        cluster.route(key, [str(role)])
    cluster.submit([request(0.0, 200, 1)])
    cluster.run()
    seen = [name for name in cluster.report(replicas[D]) if name.startswith("ttft_")]
    assert seen == [f"ttft_{bisect_left(TTFT_EDGES_S, expected_s)}"]


def test_groups_get_requests_in_proportion_to_their_decode_replicas(make_profile: MakeProfile) -> None:
    keys = {name: PoolKey(name, D) for name in ("one", "three", "none")}
    cluster = VirtualCluster(dict.fromkeys(keys.values(), make_profile()), RouterConfig(), random.Random(0))
    replicas = {
        name: [cluster.add(keys[name], f"{name}{i}") for i in range(n)] for name, n in (("one", 1), ("three", 3))
    }
    for name, each in replicas.items():
        cluster.route(keys[name], [replica.replica_id for replica in each])
    cluster.submit([request(0.0, 50, 5) for _ in range(40)])
    cluster.run(0.0)
    assert {name: sum(r.ongoing_requests for r in each) for name, each in replicas.items()} == {"one": 10, "three": 30}


def test_routers_that_ask_find_the_prefill_replica_that_is_free(make_profile: MakeProfile) -> None:
    profiles = dict.fromkeys(Role, make_profile())
    # Prompts come in pairs; the decode replica of the second knows nothing of the first.
    trace = [request(2.0 * (number // 2), 200, 2) for number in range(60)]

    def waits(asked_replicas: int) -> int:
        records = replay(trace, {P: 2, D: 2}, profiles, RouterConfig(asked_replicas=asked_replicas))
        return sum((r.ttft_s or 0.0) > 0.6 for r in records)  # a prompt alone takes 0.451 s

    assert waits(2) == 0
    assert waits(0) > 5


def test_short_prompts_do_not_wait_behind_a_long_one_of_another_decode_replica(make_profile: MakeProfile) -> None:
    profiles = dict.fromkeys(Role, make_profile(kv_tokens=10_000))
    # A long prompt takes 2.2 s, three short ones 0.22 s each; each comes from another decode replica.
    trace = [
        request(10.0 * turn + 0.001 * number, 200 if number else 2000, 2) for turn in range(20) for number in range(4)
    ]
    records = replay(trace, {P: 2, D: 4}, profiles, RouterConfig())
    assert [r.ttft_s for r in records if r.input_tokens == 200 and (r.ttft_s or 9.0) > 1.5] == []


def test_kv_that_does_not_fit_waits_on_the_decode_side(make_profile: MakeProfile) -> None:
    small = make_profile(kv_tokens=250)
    trace = [request(0.0, 200, 20), request(0.0, 200, 20)]
    first, second = sorted(
        replay(trace, {P: 2, D: 1}, {P: make_profile(), D: small}, RouterConfig()), key=lambda r: r.ttft_s or 0.0
    )
    assert second.first_token_s is not None
    assert first.last_token_s is not None
    assert second.first_token_s > first.last_token_s


@settings(max_examples=30)
@given(st.lists(st.tuples(st.floats(0, 20), st.integers(1, 400), st.integers(1, 60)), min_size=1, max_size=40))
def test_every_request_ends_with_its_tokens_and_a_second_run_is_the_same(
    make_profile: MakeProfile, entries: list[tuple[float, int, int]]
) -> None:
    trace = [request(*entry) for entry in sorted(entries)]
    profiles = dict.fromkeys(Role, make_profile())
    records = replay(trace, {P: 2, D: 2}, profiles, RouterConfig(), random.Random(3))
    assert [r.output_tokens for r in records] == [r.output_tokens for r in trace]
    assert all(r.first_token_s is not None and r.first_token_s > r.sent_s for r in records)
    assert records == replay(trace, {P: 2, D: 2}, profiles, RouterConfig(), random.Random(3))


@pytest.fixture(name="make_cluster")
def _make_cluster(make_profile: MakeProfile) -> Callable[..., VirtualCluster]:
    """One group with this number of replicas of each role."""

    def make(prefill: int, decode: int, **router: Any) -> VirtualCluster:
        keys = {role: PoolKey("g0", role) for role in Role}
        cluster = VirtualCluster(dict.fromkeys(keys.values(), make_profile()), RouterConfig(**router), random.Random(1))
        for role, count in ((P, prefill), (D, decode)):
            names = [f"{role}-{index}" for index in range(count)]
            for name in names:
                cluster.add(keys[role], name)
            cluster.route(keys[role], names)
        return cluster

    return make


def replicas(cluster: VirtualCluster) -> dict[str, VirtualReplica]:
    return cluster._groups["g0"].replicas


def test_replicas_are_empty_after_the_last_request(make_cluster: Callable[..., VirtualCluster]) -> None:
    cluster = make_cluster(1, 1)
    cluster.submit([request(number * 0.1, 50 + 7 * number, 5) for number in range(50)])
    cluster.run()
    assert cluster.is_done
    assert len(cluster.records()) == 50
    for replica in replicas(cluster).values():
        assert replica.is_empty
        assert replica.local_prefill_tokens == 0
        assert replica.engine.kv_usage_frac == 0.0
        assert replica.step is None


def test_without_prefill_replicas_every_prompt_is_prefilled_where_it_decodes(
    make_cluster: Callable[..., VirtualCluster],
) -> None:
    cluster = make_cluster(0, 1)
    cluster.submit([request(0.0, 200, 3)])
    cluster.run()
    (record,) = cluster.records()
    assert record.ttft_s == pytest.approx(0.22)


def test_a_report_in_the_middle_of_steps_shows_what_has_passed_and_changes_nothing(
    make_cluster: Callable[..., VirtualCluster],
) -> None:
    quiet, watched = make_cluster(1, 1), make_cluster(1, 1)
    seen: list[dict[str, float]] = []

    def look() -> None:
        seen.append(watched.report(replicas(watched)["decode-0"]))
        if not watched.is_done:
            watched.at(watched.now_s + 0.1, look)

    watched.at(0.0, look)
    for cluster in (quiet, watched):
        cluster.submit([request(0.05, 100, 100), request(0.7, 150, 40), request(1.0, 90, 40)])
        cluster.run()
    for record, other in zip(quiet.records(), watched.records(), strict=True):
        assert record.ttft_s == pytest.approx(other.ttft_s)
        assert record.tpot_s == pytest.approx(other.tpot_s)
    tokens = [report["decode_tokens"] for report in seen]
    assert tokens == sorted(tokens)
    assert tokens[-1] == 180.0
    # The first request has its first token 0.16 s after the start and one each 21 ms from there on.
    assert tokens[5] == 1 + (0.5 - 0.16) // 0.021
    assert seen[5]["gpu_utilization_frac"] == pytest.approx(1.0, abs=0.22)
    assert seen[-1]["requests_ended"] == 3.0


def test_a_run_up_to_a_time_shows_the_work_until_then(make_cluster: Callable[..., VirtualCluster]) -> None:
    cluster = make_cluster(0, 1)
    cluster.submit([request(0.0, 100, 40)])
    cluster.run(0.5)  # in the middle of steps: the next event is the end of the answer
    assert replicas(cluster)["decode-0"].work().output_tokens == 1 + (0.5 - 0.11) // 0.021


def test_utilisation_in_a_report_is_that_of_the_time_since_the_last_report(
    make_cluster: Callable[..., VirtualCluster],
) -> None:
    cluster = make_cluster(0, 1)
    seen: list[dict[str, float]] = []
    for at_s in (0.5, 1.0, 2.0):
        cluster.at(at_s, lambda: seen.append(cluster.report(replicas(cluster)["decode-0"])))
    cluster.submit([request(0.0, 100, 40)])  # 0.11 s for the prompt, and 39 steps of 0.021 s: idle from 0.929 s on
    cluster.run()
    assert [report["gpu_utilization_frac"] for report in seen] == pytest.approx([1.0, 0.858, 0.0], abs=0.06)
    active = [report["sm_activity_frac"] for report in seen]
    assert active[0] > active[1] > active[2] == 0.0


def test_a_draining_replica_finishes_its_requests_and_reports_when_it_has_gone(
    make_cluster: Callable[..., VirtualCluster],
) -> None:
    cluster = make_cluster(2, 2)
    gone: list[tuple[str, float]] = []
    cluster.submit([request(0.1 * number, 200, 20) for number in range(20)])

    def leave(name: str) -> None:
        replica = replicas(cluster)[name]
        left = [other for other, r in replicas(cluster).items() if r.key == replica.key and other != name]
        cluster.route(replica.key, left)
        cluster.drain(replica, lambda: gone.append((name, cluster.now_s)))

    cluster.at(0.55, leave, "prefill-0")
    cluster.at(0.55, leave, "decode-0")
    cluster.run()
    assert len(cluster.records()) == 20
    assert {name for name, _ in gone} == {"prefill-0", "decode-0"}
    assert all(0.55 < at_s < 5.0 for _, at_s in gone)
    assert set(replicas(cluster)) == {"prefill-1", "decode-1"}


def test_pulled_kv_joins_a_busy_engine_after_the_step_that_has_begun(
    make_cluster: Callable[..., VirtualCluster],
) -> None:
    cluster = make_cluster(1, 1)
    cluster.submit([request(0.0, 100, 500), request(1.0, 200, 2)])  # the first decodes for ten seconds
    cluster.run()
    _, late = cluster.records()
    assert late.ttft_s == pytest.approx(0.22 + 0.21 + 0.022, abs=0.03)


def test_prefill_stays_until_its_kv_has_been_read(make_cluster: Callable[..., VirtualCluster]) -> None:
    cluster = make_cluster(1, 1)
    gone: list[float] = []
    prefill = replicas(cluster)["prefill-0"]
    cluster.submit([request(0.0, 200, 2)])
    cluster.at(0.3, cluster.drain, prefill, lambda: gone.append(cluster.now_s))  # answered at 0.22 s, read at 0.43 s
    cluster.run()
    assert gone == [pytest.approx(0.43)]


def test_a_path_is_chosen_by_kv_as_it_is_and_not_as_when_the_batch_began(
    make_cluster: Callable[..., VirtualCluster],
) -> None:
    def late_ttft_s(*, is_watched: bool) -> float | None:
        cluster = make_cluster(1, 1)
        if is_watched:
            cluster.at(17.99, cluster.report, replicas(cluster)["decode-0"])
        cluster.submit([request(0.0, 100, 890), request(18.0, 120, 2)])  # by then nine tenths of KV are taken
        cluster.run()
        return cluster.records()[1].ttft_s

    assert late_ttft_s(is_watched=False) == pytest.approx(late_ttft_s(is_watched=True))


@pytest.mark.parametrize(("answer_tokens", "handoffs"), [(50, 1), (30, 2)])
def test_a_long_queue_on_prefill_keeps_prompts_on_decode_if_answers_are_long(
    answer_tokens: int, handoffs: int, make_cluster: Callable[..., VirtualCluster]
) -> None:
    """With answers of 50 tokens, 8 prompt tokens for each are 400: the last prompt, of 300, stays on decode."""
    cluster = make_cluster(1, 1, length={"local_cap_tokens": 400, "local_max_tokens": 128})
    cluster.submit([request(0.0, 100, answer_tokens), request(30.0, 900, 2), request(30.1, 300, 2)])
    cluster.run()
    assert replicas(cluster)["decode-0"].handoffs == handoffs
