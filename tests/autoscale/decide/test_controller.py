"""The controller's whole tick, in a loop with a virtual Serve that carries out its plans."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.controller import Controller
from autoscale.ratio import PdRatio
from autoscale.types import ControllerState, Latency, Plan, PoolKey, Snapshot
from kvtransfer.topology import Role
from tests.autoscale.virtual_serve import VirtualServe

P, D = Role.PREFILL, Role.DECODE
LATE = Latency(ttft_s=5.0, tpot_s=0.01)
WELL = Latency(ttft_s=0.6, tpot_s=0.03)
MakeConfig = Callable[..., AutoscaleConfig]


def serve(config: AutoscaleConfig, *, prefill_s: float = 10.0, decode_s: float = 10.0, **fields: Any) -> VirtualServe:
    return VirtualServe(Controller(config), {P: prefill_s, D: decode_s}, **fields)


def run(cluster: VirtualServe, ticks: int, decode_tps: float | None, **fields: Any) -> None:
    for _ in range(ticks):
        cluster.tick(decode_tps, **fields)


def test_both_roles_follow_decode_tokens_at_the_ratio_and_back(make_autoscale: MakeConfig) -> None:
    cluster = serve(make_autoscale(pd_ratio="1:3", gate={"observation_s": 4.0}))
    run(cluster, 10, 850.0)
    assert cluster.counts == (3, 9)
    assert len(cluster.plan.admitted) == 12
    run(cluster, 10, 250.0)
    assert cluster.counts == (1, 3)
    assert [len(cluster.running[role]) for role in Role] == [1, 3]


@pytest.mark.parametrize(("prefill_s", "decode_s"), [(4.0, 40.0), (40.0, 4.0)])
@pytest.mark.parametrize("ratio", ["1:3", "3:1"])
def test_serving_replicas_keep_the_ratio_whichever_role_is_ready_first(
    make_autoscale: MakeConfig, prefill_s: float, decode_s: float, ratio: str
) -> None:
    config = make_autoscale(pd_ratio=ratio)
    worst = {True: 0.0, False: 0.0}
    for is_enabled in worst:
        changed = config.model_copy(update={"gate": config.gate.model_copy(update={"is_enabled": is_enabled})})
        cluster = serve(changed, prefill_s=prefill_s, decode_s=decode_s)
        for _ in range(30):
            cluster.tick(880.0 if ratio == "1:3" else 280.0)
            deviation = config.pd_ratio.deviation(len(cluster.serving(P)), len(cluster.serving(D)))
            worst[is_enabled] = max(worst[is_enabled], deviation)
        assert cluster.counts == ((3, 9) if ratio == "1:3" else (9, 3))
        assert len(cluster.plan.admitted) == 12
    assert worst[True] <= 1.0
    assert worst[False] > 1.0


def test_an_overload_of_prefill_never_scales_in_though_decode_tokens_fall(make_autoscale: MakeConfig) -> None:
    cluster = serve(make_autoscale(pd_ratio="1:2", gate={"observation_s": 0.0}))
    run(cluster, 10, 380.0)
    assert cluster.counts == (2, 4)
    # Prompts wait at prefill, decode has less and less to do, and no request is late yet.
    for tick in range(10):
        cluster.tick(max(0.0, 300.0 - 40.0 * tick), backlog_tokens=3000.0 * (tick + 1))
        assert cluster.counts == (2, 4)
    # Now requests are late: both roles grow, though decode has almost nothing to do.
    run(cluster, 10, 20.0, backlog_tokens=40_000.0, latency=LATE)
    assert cluster.counts[0] > 2
    assert cluster.counts[1] > 4
    assert cluster.controller.config.pd_ratio.deviation(*cluster.counts) <= 1.0


def test_scale_in_is_observed_first_and_then_done_in_both_roles_at_once(make_autoscale: MakeConfig) -> None:
    cluster = serve(make_autoscale(pd_ratio="1:1", gate={"observation_s": 9.0}))
    run(cluster, 10, 380.0)
    plan = cluster.tick(180.0, latency=WELL)
    assert cluster.counts == (4, 4)  # no replica has stopped
    assert len(plan.withdrawn) == 4
    assert [len(cluster.serving(role)) for role in Role] == [2, 2]
    waits = 0
    while cluster.counts == (4, 4):
        plan = cluster.tick(180.0, latency=WELL)
        waits += 1
    assert waits * cluster.interval_s >= 9.0
    assert cluster.counts == (2, 2)
    assert len(plan.victims) == 4
    assert cluster.tick(180.0, latency=WELL).victims == ()


def test_withdrawn_replicas_come_back_at_once_if_latency_suffers(make_autoscale: MakeConfig) -> None:
    cluster = serve(make_autoscale(gate={"observation_s": 60.0}))
    run(cluster, 10, 380.0)
    away = cluster.tick(180.0, latency=WELL).withdrawn
    plan = cluster.tick(180.0, latency=LATE)
    assert plan.reinstated == away
    assert set(away) <= set(plan.admitted)
    assert cluster.counts == (4, 4)
    assert not any(cluster.starting.values())


def test_more_load_brings_back_withdrawn_replicas_before_it_starts_others(make_autoscale: MakeConfig) -> None:
    cluster = serve(make_autoscale(gate={"observation_s": 60.0}))
    run(cluster, 10, 380.0)
    cluster.tick(180.0)
    plan = cluster.tick(280.0)
    assert len(plan.reinstated) == 2
    assert len(plan.withdrawn) == 2
    assert not any(cluster.starting.values())


def test_load_brings_withdrawn_replicas_back_though_they_fill_the_budget(make_autoscale: MakeConfig) -> None:
    cluster = serve(make_autoscale(gate={"observation_s": 60.0}, guard={"budget_gpus": 8}))
    run(cluster, 10, 380.0)
    assert cluster.counts == (4, 4)
    assert len(cluster.tick(180.0).withdrawn) == 4
    for _ in range(3):
        plan = cluster.tick(380.0)
    assert plan.withdrawn == plan.victims == ()
    assert not any(cluster.starting.values())


def test_counts_set_by_hand_end_replicas_though_users_wait(make_autoscale: MakeConfig) -> None:
    by_hand = {"override": {"prefill": 2, "decode": 2}}
    cluster = serve(make_autoscale(gate={"observation_s": 6.0}))
    run(cluster, 10, 380.0)
    cluster.controller = Controller(make_autoscale(gate={"observation_s": 6.0}, **by_hand))
    for _ in range(10):
        plan = cluster.tick(380.0, latency=LATE)
    assert plan.withdrawn == plan.victims == ()
    assert cluster.counts == (2, 2)


def test_a_lost_node_that_does_not_come_back_leaves_fewer_replicas_of_both_roles(make_autoscale: MakeConfig) -> None:
    config = make_autoscale(pd_ratio="1:1", no_room_s=20.0, no_room_retry_s=400.0, gate={"observation_s": 4.0})
    cluster = serve(config)
    run(cluster, 10, 380.0)
    assert cluster.counts == (4, 4)
    cluster.room[P] = 2
    cluster.lose(P)
    cluster.lose(P)
    run(cluster, 40, 380.0)
    assert cluster.counts == (2, 3)
    assert len(cluster.plan.admitted) == 5


def test_a_loss_while_there_is_no_room_takes_no_other_replica_away(make_autoscale: MakeConfig) -> None:
    config = make_autoscale(pd_ratio="1:1", no_room_s=20.0, no_room_retry_s=400.0, gate={"observation_s": 4.0})
    cluster = serve(config, room={P: 3, D: 64})
    run(cluster, 30, 580.0)
    assert cluster.counts == (3, 4)
    cluster.lose(P)
    for _ in range(10):
        cluster.tick(580.0)
        assert cluster.counts == (3, 4)
    assert len(cluster.serving(P)) == 3


def test_without_the_hook_serve_chooses_victims_and_the_plan_admits_the_rest(make_autoscale: MakeConfig) -> None:
    cluster = serve(make_autoscale(gate={"observation_s": 0.0}), has_hook=False)
    run(cluster, 10, 380.0)
    run(cluster, 10, 180.0)
    assert cluster.counts == (2, 2)
    assert cluster.plan.victims == ()
    assert set(cluster.plan.admitted) == {*cluster.running[P], *cluster.running[D]}


def test_serve_replaces_a_dead_replica_and_no_count_changes(make_autoscale: MakeConfig) -> None:
    cluster = serve(make_autoscale(pd_ratio="1:3"))
    run(cluster, 10, 880.0)
    cluster.lose(D)
    for _ in range(8):
        cluster.tick(880.0)
        assert cluster.counts == (3, 9)
    assert len(cluster.plan.admitted) == 12


def test_a_withdrawn_replica_that_dies_is_not_replaced(make_autoscale: MakeConfig) -> None:
    cluster = serve(make_autoscale(gate={"observation_s": 60.0}))
    run(cluster, 10, 380.0)
    name = next(name for name in cluster.tick(180.0).withdrawn if name in cluster.running[D])
    cluster.running[D].remove(name)
    cluster.starting[D].append(cluster.now_s + 10.0)
    cluster.tick(180.0)
    assert cluster.counts == (4, 3)
    assert not any(cluster.starting.values())


def test_a_cluster_without_room_keeps_the_ratio_and_grows_once_there_is_room(make_autoscale: MakeConfig) -> None:
    config = make_autoscale(pd_ratio="1:1", no_room_s=20.0, no_room_retry_s=40.0, gate={"observation_s": 4.0})
    cluster = serve(config, room={P: 2, D: 64})
    for _ in range(18):
        plan = cluster.tick(580.0)
        assert abs(len(cluster.serving(P)) - len(cluster.serving(D))) <= 1
    assert {key: found for key, (_, found) in plan.state.capped.items()} == {PoolKey("g0", P): 2}
    run(cluster, 4, 580.0)
    assert cluster.counts == (2, 3)
    cluster.room[P] = 64
    run(cluster, 40, 580.0)
    assert cluster.counts == (6, 6)
    assert len(cluster.plan.admitted) == 12


def test_counts_set_by_hand_may_leave_the_ratio_and_resuming_returns_to_it(make_autoscale: MakeConfig) -> None:
    config = make_autoscale(pd_ratio="1:3", gate={"observation_s": 0.0}, guard={"step_out_replicas": 1})
    cluster = serve(config)
    cluster.controller = changed(config, override={"prefill": 1, "decode": 9})
    run(cluster, 10, 880.0)
    assert cluster.counts == (1, 9)
    assert cluster.plan.decision.reason == "set by hand"
    assert [s.name for s in cluster.plan.decision.shown] == ["decode_tps"]
    assert len(cluster.plan.admitted) == 10
    cluster.controller = Controller(config)
    cluster.tick(880.0)
    assert cluster.counts == (2, 9)
    cluster.tick(880.0)
    assert cluster.counts == (3, 9)


def changed(config: AutoscaleConfig, **fields: Any) -> Controller:
    return Controller(AutoscaleConfig.model_validate({**config.model_dump(), **fields}))


def test_counts_set_by_hand_over_the_budget_change_nothing(make_autoscale: MakeConfig) -> None:
    config = make_autoscale(guard={"budget_gpus": 6})
    cluster = serve(config)
    cluster.controller = changed(config, override={"prefill": 4, "decode": 4})
    plan = cluster.tick(100.0)
    assert cluster.counts == (1, 1)
    assert "over the GPU budget" in plan.held_back[0].text


def test_a_paused_controller_decides_nothing_but_admits_new_replicas(make_autoscale: MakeConfig) -> None:
    config = make_autoscale()
    cluster = serve(config)
    cluster.tick(280.0)
    cluster.controller = changed(config, is_paused=True)
    run(cluster, 10, 10.0)
    assert cluster.counts == (3, 3)
    assert len(cluster.plan.admitted) == 6
    assert cluster.plan.decision.reason == "paused by hand"
    assert [(s.name, s.value, s.target) for s in cluster.plan.decision.shown] == [("decode_tps", 10.0 / 3, 100.0)]


def test_an_observing_controller_reports_its_plan_and_changes_nothing(make_autoscale: MakeConfig) -> None:
    cluster = serve(make_autoscale(is_observing=True))
    run(cluster, 5, 280.0)
    assert cluster.counts == (1, 1)
    assert [note.text for note in cluster.plan.held_back] == ["only observing: would be 3P3D"]
    assert set(cluster.plan.admitted) == {"p0", "d0"}


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (lambda s: replace(s, is_recovering=True), "recovering"),
        (lambda s: replace(s, now_s=s.now_s - 500.0), "clock jumped"),
        (lambda s: replace(s, now_s=s.now_s + 500.0), "clock jumped"),
        (lambda s: without(s, P), "no prefill replica of group g0 is running"),
        (lambda s: without(s, D), "no decode replica of group g0 is running"),
        (lambda s: aged(s, 60.0), "has been silent for 60.0 s"),
        (lambda s: shown(s, None), "no replica reports decode_tps"),
        (lambda s: shown(s, float("nan")), "a count must be finite"),
        (lambda s: shown(s, float("inf")), "a count must be finite"),
        (lambda s: shown(s, -5.0), "a count must be finite"),
    ],
)
def test_a_snapshot_that_cannot_be_trusted_changes_no_count(
    make_autoscale: MakeConfig, fault: Callable[[Snapshot], Snapshot], said: str
) -> None:
    cluster = serve(make_autoscale(gate={"observation_s": 0.0}))
    run(cluster, 10, 280.0)
    cluster.now_s += 2.0
    seen = cluster.snapshot({P: {"queued_prefill_tokens": 0.0}, D: {"decode_tokens_per_s": 2000.0}})
    plan = cluster.controller.tick(fault(seen))
    assert said in plan.decision.reason
    assert plan.decision.wanted is None
    assert {plan.counts[pool.key] for pool in seen.pools} == {3}
    assert plan.withdrawn == plan.victims == ()


def without(snapshot: Snapshot, role: Role) -> Snapshot:
    pools = tuple(replace(pool, replicas=() if pool.key.role is role else pool.replicas) for pool in snapshot.pools)
    return replace(snapshot, pools=pools)


def aged(snapshot: Snapshot, age_s: float) -> Snapshot:
    seen_s = snapshot.now_s - age_s
    pools = tuple(
        replace(pool, replicas=tuple(replace(replica, observed_s=seen_s) for replica in pool.replicas))
        for pool in snapshot.pools
    )
    return replace(snapshot, pools=pools)


def shown(snapshot: Snapshot, tps: float | None) -> Snapshot:
    pools = tuple(
        replace(pool, replicas=tuple(replace(replica, decode_tokens_per_s=tps) for replica in pool.replicas))
        for pool in snapshot.pools
    )
    return replace(snapshot, pools=pools)


def test_time_without_a_controller_counts_neither_as_observation_nor_as_wait_for_room(
    make_autoscale: MakeConfig,
) -> None:
    cluster = serve(make_autoscale(gate={"observation_s": 30.0}), prefill_s=400.0, decode_s=400.0)
    cluster.running = {role: [f"{role[0]}{index}" for index in range(6)] for role in Role}
    run(cluster, 10, 580.0, latency=WELL)
    run(cluster, 3, 280.0, latency=WELL)
    away = set(cluster.plan.withdrawn)
    assert away
    cluster.now_s += 600.0  # Serve's controller did not run
    stats = {P: {"queued_prefill_tokens": 0.0}, D: {"decode_tokens_per_s": 90.0}}
    seen = cluster.snapshot(stats, latency=WELL)
    idle = replace(seen.state, idle_since_s=seen.now_s - 600.0)
    plan = cluster.controller.tick(replace(seen, is_recovering=True, state=idle))
    assert set(plan.withdrawn) == away
    assert plan.state.idle_since_s is None
    after = replace(seen, now_s=seen.now_s + 2.0, state=plan.state)
    assert cluster.controller.tick(after).victims == ()
    assert plan.state.missing_since_s == {}


def test_a_latency_from_before_new_replicas_served_adds_no_second_step(make_autoscale: MakeConfig) -> None:
    late = Latency(ttft_s=1.5, tpot_s=0.03)
    cluster = serve(make_autoscale(window_s=20.0), prefill_s=10.0, decode_s=10.0)
    run(cluster, 15, 480.0, latency=WELL)
    assert cluster.counts == (5, 5)
    sizes = []
    for _ in range(12):  # the replica that it asks for enters after 10 s; its effect shows 20 s later
        cluster.tick(480.0, latency=late)
        sizes.append(cluster.counts)
    assert max(sizes) == (6, 6)
    run(cluster, 6, 480.0, latency=late)  # still late after that: more replicas
    assert cluster.counts > (6, 6)


def test_a_clock_that_was_set_back_only_delays_growth(make_autoscale: MakeConfig) -> None:
    cluster = serve(make_autoscale(guard={"cooldown_out_s": 10.0}))
    run(cluster, 10, 280.0)
    cluster.now_s -= 3600.0
    run(cluster, 10, 580.0)
    assert cluster.counts == (6, 6)


def test_a_controller_that_was_killed_goes_on_from_the_state_alone(make_autoscale: MakeConfig) -> None:
    config = make_autoscale(gate={"observation_s": 20.0})
    clusters = [serve(config), serve(config)]
    for tick in range(40):
        clusters[1].controller = Controller(config)
        for cluster in clusters:
            cluster.tick([380.0, 180.0, 580.0][tick // 14])
        assert clusters[0].plan == clusters[1].plan


def test_several_groups_are_sized_as_one_and_each_keeps_the_ratio(
    make_autoscale: MakeConfig, make_snapshot: Callable[..., Snapshot]
) -> None:
    groups = [make_snapshot(1, 2, group=f"g{i}", stats={D: {"decode_tokens_per_s": 200.0}}) for i in range(3)]
    pools = tuple(
        replace(pool, replicas=tuple(replace(r, replica_id=f"{i}{r.replica_id}") for r in pool.replicas))
        for i, group in enumerate(groups)
        for pool in group.pools
    )
    plan = Controller(make_autoscale(pd_ratio="1:2")).tick(replace(groups[0], pools=pools))
    assert sum(count for key, count in plan.counts.items() if key.role is D) == 12
    for group in ("g0", "g1", "g2"):
        assert (plan.counts[PoolKey(group, P)], plan.counts[PoolKey(group, D)]) == (2, 4)


events = st.tuples(
    st.sampled_from(["load", "load", "load", "quiet", "dead_p", "dead_d", "late", "backlog", "blind", "crash"]),
    st.floats(0.0, 2000.0),
)


@settings(max_examples=4 * settings().max_examples)
@given(
    story=st.lists(events, min_size=1, max_size=60),
    ratio=st.sampled_from(["1:5", "1:3", "1:1", "3:1", "9:1"]),
    starts=st.tuples(st.floats(1.0, 30.0), st.floats(1.0, 30.0)),
    budget=st.none() | st.integers(12, 40),
    has_hook=st.booleans(),
    drain_s=st.floats(0.0, 30.0),
)
def test_whatever_happens_counts_stay_in_bounds_budget_and_ratio(
    make_autoscale: MakeConfig,
    story: list[tuple[str, float]],
    ratio: str,
    starts: tuple[float, float],
    budget: int | None,
    has_hook: bool,
    drain_s: float,
) -> None:
    config = make_autoscale(
        pd_ratio=ratio, gate={"observation_s": 6.0}, guard={"budget_gpus": budget, "step_out_replicas": 8}
    )
    cluster = serve(config, prefill_s=starts[0], decode_s=starts[1], has_hook=has_hook, drain_s=drain_s)
    deaths = 0
    for event, size in story:
        if event == "dead_p" and len(cluster.running[P]) > 1:
            cluster.lose(P)
            deaths += 1
        elif event == "dead_d" and len(cluster.running[D]) > 1:
            cluster.lose(D)
            deaths += 1
        elif event == "crash":
            cluster.controller = Controller(config)
        plan = cluster.tick(
            None if event == "blind" else 0.0 if event == "quiet" else size,
            latency=LATE if event == "late" else Latency(),
            backlog_tokens=size * 100 if event == "backlog" else 0.0,
        )
        assert all(1 <= count <= 32 for count in cluster.counts)
        assert budget is None or sum(cluster.counts) <= budget
        # Without the hook the plan does not know which replicas drain.
        assert budget is None or deaths or not has_hook or cluster.gpus <= budget
        desired = [plan.state.desired[PoolKey("g0", role)] for role in Role]
        assert config.pd_ratio.deviation(*desired) <= 1.0 + 1e-9
        for role in Role:
            assert cluster.serving(role) or not cluster.running[role]
        if not deaths and has_hook:
            assert config.pd_ratio.deviation(len(cluster.serving(P)), len(cluster.serving(D))) <= 1.0 + 1e-9
        assert not set(plan.withdrawn) & set(plan.admitted)
        assert not set(plan.victims) & set(plan.admitted)
    run(cluster, 60, 300.0)
    assert config.pd_ratio.deviation(len(cluster.serving(P)), len(cluster.serving(D))) <= 1.0 + 1e-9
    assert [len(cluster.running[role]) for role in Role] == list(cluster.counts)
    assert cluster.plan.withdrawn == cluster.plan.victims == ()


hands = st.tuples(
    st.sampled_from(["load", "load", "pause", "by hand", "resume", "ratio", "restart", "off gate", "late"]),
    st.floats(0.0, 1500.0),
)


@settings(max_examples=4 * settings().max_examples)
@given(
    story=st.lists(hands, min_size=1, max_size=40),
    starts=st.tuples(st.floats(1.0, 30.0), st.floats(1.0, 30.0)),
    drain_s=st.floats(0.0, 30.0),
)
def test_whatever_people_do_both_roles_serve_and_the_ratio_returns(
    make_autoscale: MakeConfig, story: list[tuple[str, float]], starts: tuple[float, float], drain_s: float
) -> None:
    config = make_autoscale(gate={"observation_s": 6.0}, guard={"budget_gpus": 16})
    cluster = serve(config, prefill_s=starts[0], decode_s=starts[1], drain_s=drain_s)
    for event, size in story:
        if event == "pause":
            config = config.model_copy(update={"is_paused": True})
        elif event == "by hand":
            counts = {"prefill": 1 + int(size) % 7, "decode": 1 + int(size) // 7 % 7}
            config = AutoscaleConfig.model_validate({**config.model_dump(mode="json"), "override": counts})
        elif event == "resume":
            config = config.model_copy(update={"is_paused": False, "override": None})
        elif event == "ratio":
            config = config.model_copy(update={"pd_ratio": PdRatio.parse(["1:5", "1:1", "2:3", "9:1"][int(size) % 4])})
        elif event == "off gate":
            config = config.model_copy(update={"gate": config.gate.model_copy(update={"is_enabled": size < 700.0})})
        elif event == "restart":
            cluster.restart()
        cluster.controller = Controller(config)
        stays = set(cluster.plan.victims) if cluster.plan is not None else set()
        plan = cluster.tick(size, latency=LATE if event == "late" else WELL)
        assert all(1 <= count <= 32 for count in cluster.counts)
        assert cluster.gpus <= 16
        for role in Role:
            assert cluster.serving(role)
        assert not set(plan.withdrawn) & set(plan.admitted)
        assert not set(plan.victims) & set(plan.admitted)
        # A victim stays a victim until it has gone, or until Serve needs it to reach its target.
        for role in Role:
            forgotten = stays.intersection([*cluster.running[role], *cluster.draining[role]]) - set(plan.victims)
            assert not forgotten or len(cluster.running[role]) <= cluster.targets[role]
    cluster.controller = Controller(config.model_copy(update={"is_paused": False, "override": None}))
    run(cluster, 80, 300.0)
    serving = [len(cluster.serving(role)) for role in Role]
    assert config.pd_ratio.deviation(*serving) <= 1.0 + 1e-9
    assert [len(cluster.running[role]) for role in Role] == list(cluster.counts)
    assert cluster.plan.withdrawn == cluster.plan.victims == ()


def test_a_steady_load_never_flaps(make_autoscale: MakeConfig) -> None:
    cluster = serve(make_autoscale(pd_ratio="1:3", gate={"observation_s": 4.0}))
    for tick in range(100):
        cluster.tick(850.0 + (30.0 if tick % 2 else -30.0), latency=WELL)
    settled = [tuple(plan.counts.values()) for plan in cluster.plans[10:]]
    assert len(set(settled)) == 1


def test_an_empty_state_starts_from_serves_target_counts(
    make_autoscale: MakeConfig, make_snapshot: Callable[..., Snapshot]
) -> None:
    plan = Controller(make_autoscale()).tick(
        make_snapshot(2, 2, targets=(3, 3), stats={D: {"decode_tokens_per_s": 140.0}})
    )
    assert plan.state.desired == {PoolKey("g0", P): 3, PoolKey("g0", D): 3}
    assert ControllerState().desired == {}


@pytest.mark.parametrize("seconds", [0.0, 7.0])
def test_narrower_bounds_are_reached_with_the_guards_own_defaults(seconds: float) -> None:
    config = AutoscaleConfig.model_validate({"pd_ratio": "1:1", "policy": {"kind": "heteroscale", "target": 100.0}})
    cluster = serve(config, prefill_s=seconds, decode_s=seconds)
    run(cluster, 60, 780.0)
    assert cluster.counts == (8, 8)
    bounds = {role: {"lowest_replicas": 1, "highest_replicas": 3} for role in ("prefill", "decode")}
    cluster.controller = changed(config, bounds=bounds)
    run(cluster, 60, 780.0)
    assert cluster.counts == (3, 3)


def test_without_room_the_guards_own_defaults_end_at_counts_that_fit() -> None:
    config = AutoscaleConfig.model_validate(
        {"pd_ratio": "1:1", "policy": {"kind": "heteroscale", "target": 100.0}, "no_room_s": 20.0}
    )
    cluster = serve(config, room={P: 2, D: 64})
    run(cluster, 150, 780.0)
    assert cluster.counts[0] == 2
    assert cluster.counts[1] <= 3


def test_an_overload_after_a_change_of_the_ratio_still_adds_replicas(make_autoscale: MakeConfig) -> None:
    config = make_autoscale(gate={"observation_s": 30.0})
    cluster = serve(config)
    run(cluster, 10, 380.0)
    cluster.controller = changed(config, pd_ratio="1:3")
    cluster.tick(380.0, latency=WELL)
    run(cluster, 60, 380.0, latency=LATE)
    assert cluster.plan.withdrawn == ()
    assert cluster.counts[1] > 6


def test_no_replica_leaves_while_users_wait_too_long(make_autoscale: MakeConfig) -> None:
    config = make_autoscale(gate={"observation_s": 4.0})
    cluster = serve(config)
    run(cluster, 10, 580.0)
    fewer = {"kind": "periodic", "periods": [{"begins": "* * * * *", "prefill": 4, "decode": 4}]}
    cluster.controller = Controller(make_autoscale(gate={"observation_s": 4.0}, policy=fewer))
    serving = set()
    for _ in range(20):
        cluster.tick(580.0, latency=LATE)
        serving.add(len(cluster.plan.admitted))
    assert serving == {12}
    run(cluster, 20, 580.0, latency=WELL)
    assert cluster.counts == (4, 4)


@pytest.mark.parametrize("limit", ["budget", "bounds"])
def test_limits_that_people_lower_are_obeyed_though_users_wait(make_autoscale: MakeConfig, limit: str) -> None:
    config = make_autoscale(guard={"budget_gpus": 16}, gate={"observation_s": 4.0})
    cluster = serve(config)
    run(cluster, 10, 580.0)
    assert cluster.counts == (6, 6)
    lower = {
        "budget": {"guard": {**config.guard.model_dump(), "budget_gpus": 8}},
        "bounds": {"bounds": {"prefill": {"highest_replicas": 4}, "decode": {"highest_replicas": 4}}},
    }
    cluster.controller = changed(config, **lower[limit])
    serving = []
    for _ in range(20):
        cluster.tick(580.0, latency=LATE)
        serving.append(len(cluster.plan.admitted))
    assert serving == sorted(serving, reverse=True)  # no replica comes back in between
    assert cluster.counts == (4, 4)
    assert len(cluster.plan.admitted) == 8


def test_a_jump_of_the_clock_cuts_no_observation_short(make_autoscale: MakeConfig) -> None:
    cluster = serve(make_autoscale(gate={"observation_s": 60.0}))
    run(cluster, 10, 380.0)
    away = cluster.tick(180.0).withdrawn
    cluster.now_s += 3600.0
    run(cluster, 10, 180.0)
    assert cluster.plan.withdrawn == away
    assert cluster.plan.victims == ()


def test_a_latency_just_inside_its_objective_does_not_make_counts_go_up_and_down(make_autoscale: MakeConfig) -> None:
    near = Latency(ttft_s=0.5, tpot_s=0.046)
    cluster = serve(make_autoscale(guard={"cooldown_in_s": 10.0}, gate={"observation_s": 4.0}))
    run(cluster, 10, 380.0, latency=WELL)
    sizes = []
    for _ in range(200):
        # TPOT is near its objective with four replicas or fewer, and far below it with more.
        cluster.tick(280.0, latency=near if len(cluster.serving(D)) <= 4 else WELL)
        sizes.append(cluster.counts)
    assert len(set(sizes[100:])) <= 2


def test_a_replica_that_drains_while_serves_controller_restarts_takes_no_other_with_it(
    make_autoscale: MakeConfig,
) -> None:
    cluster = serve(make_autoscale(gate={"observation_s": 4.0}), drain_s=60.0)
    run(cluster, 10, 380.0)
    run(cluster, 5, 180.0)
    away = {*cluster.draining[D]}
    assert cluster.counts == (2, 2)
    assert len(away) == 2
    stays = set(cluster.plan.admitted)
    cluster.restart()
    run(cluster, 5, 180.0)
    assert set(cluster.plan.admitted) == stays
    assert away <= set(cluster.draining[D])
    assert {*cluster.running[P], *cluster.running[D]} == stays


def test_a_victim_is_remembered_until_it_has_gone(make_autoscale: MakeConfig) -> None:
    cluster = serve(make_autoscale(gate={"observation_s": 4.0}), drain_s=20.0)
    run(cluster, 10, 380.0)
    run(cluster, 5, 180.0)
    assert len(cluster.plan.victims) == 4
    run(cluster, 15, 180.0)
    assert cluster.plan.victims == ()


@pytest.mark.parametrize("by_hand", [False, True])
def test_draining_replicas_hold_their_gpus_against_the_budget(make_autoscale: MakeConfig, by_hand: bool) -> None:
    config = make_autoscale(guard={"budget_gpus": 8}, gate={"observation_s": 4.0})
    cluster = serve(config, drain_s=60.0)
    run(cluster, 10, 380.0)
    run(cluster, 5, 180.0)
    assert cluster.counts == (2, 2)
    if by_hand:
        cluster.controller = changed(config, override={"prefill": 4, "decode": 4})
    for _ in range(40):
        cluster.tick(380.0)
        assert cluster.gpus <= 8
    assert cluster.counts == (4, 4)


def test_a_lost_replica_takes_no_other_with_it(make_autoscale: MakeConfig) -> None:
    cluster = serve(make_autoscale(gate={"observation_s": 4.0}, window_s=20.0))
    run(cluster, 10, 280.0)
    assert cluster.counts == (3, 3)
    cluster.lose(D)
    # Its share of the tokens is missing until other replicas have taken over its requests.
    run(cluster, 5, 187.0)
    assert cluster.counts == (3, 3)
    run(cluster, 20, 280.0)
    assert cluster.counts == (3, 3)


def test_withdrawn_replicas_come_back_though_draining_ones_fill_the_budget(make_autoscale: MakeConfig) -> None:
    config = make_autoscale(
        gate={"observation_s": 10.0}, guard={"budget_gpus": 16, "cooldown_out_s": 6.0, "step_in_replicas": 2}
    )
    cluster = serve(config, drain_s=600.0)
    run(cluster, 20, 780.0)
    assert cluster.counts == (8, 8)
    cluster.controller = changed(config, pd_ratio="1:2")
    while not cluster.plan.victims:
        cluster.tick(780.0, latency=WELL)
    assert cluster.counts == (6, 8)  # two drain, two more are under observation
    assert len(cluster.plan.withdrawn) == 2
    plan = cluster.tick(780.0, latency=LATE)
    assert plan.withdrawn == ()
    assert cluster.gpus == 16


def gaps_between_misses(cluster: VirtualServe, ticks: int, decode_tps: float, role: Role, enough: int) -> list[float]:
    """Seconds between returns of withdrawn replicas, if users wait while fewer than ``enough`` replicas serve."""
    missed_s = []
    for _ in range(ticks):
        plan = cluster.tick(decode_tps, latency=LATE if len(cluster.serving(role)) < enough else WELL)
        missed_s += [cluster.now_s] if plan.reinstated else []
    return [after - before for before, after in pairwise(missed_s)]


def test_a_scale_in_that_always_makes_users_wait_is_tried_less_and_less_often(make_autoscale: MakeConfig) -> None:
    cluster = serve(make_autoscale(guard={"cooldown_in_s": 10.0}, gate={"observation_s": 6.0}))
    run(cluster, 10, 380.0, latency=WELL)
    # Users wait with three replicas and not with four, but decode tokens/s ask for three.
    gaps = gaps_between_misses(cluster, 300, 280.0, D, 4)
    assert gaps[0] < gaps[1] < gaps[2]
    assert max(gaps) < 200.0  # it is still tried
    run(cluster, 30, 80.0, latency=WELL)
    assert cluster.counts == (1, 1)
    assert cluster.state.missed is None


def test_a_return_to_a_ratio_with_which_users_wait_is_tried_less_and_less_often(make_autoscale: MakeConfig) -> None:
    config = make_autoscale(guard={"cooldown_out_s": 6.0, "cooldown_in_s": 6.0}, gate={"observation_s": 6.0})
    cluster = serve(config)
    run(cluster, 20, 780.0, latency=WELL)
    cluster.controller = changed(config, pd_ratio="1:2")
    gaps = gaps_between_misses(cluster, 200, 780.0, P, 8)
    assert gaps[0] < gaps[1] < gaps[2]
    assert len(gaps) < 9


def test_the_gate_of_a_paused_controller_keeps_the_ratio_of_the_period(make_autoscale: MakeConfig) -> None:
    policy = {"kind": "periodic", "periods": [{"begins": "* * * * *", "prefill": 4, "decode": 2, "pd_ratio": "2:1"}]}
    config = make_autoscale(pd_ratio="1:3", policy=policy)
    cluster = serve(config)
    run(cluster, 10, None)
    assert (len(cluster.serving(P)), len(cluster.serving(D))) == (4, 2)
    cluster.controller = changed(config, is_paused=True)
    cluster.lose(P)
    run(cluster, 20, None)
    assert (len(cluster.serving(P)), len(cluster.serving(D))) == (4, 2)


def test_a_pause_keeps_the_counts_and_the_admitted_replicas_when_another_period_begins(
    make_autoscale: MakeConfig,
) -> None:
    morning = {"begins": "0 * * * *", "prefill": 4, "decode": 2, "pd_ratio": "2:1"}
    evening = {"begins": "20 * * * *", "prefill": 1, "decode": 4, "pd_ratio": "1:4"}
    config = make_autoscale(pd_ratio="1:3", policy={"kind": "periodic", "periods": [morning, evening]})
    cluster = serve(config)
    boundary_s = (cluster.now_s // 3600.0 + 1.0) * 3600.0 + 20 * 60.0
    while cluster.now_s < boundary_s - 60.0:
        cluster.tick(None)
    assert (len(cluster.serving(P)), len(cluster.serving(D))) == (4, 2)
    cluster.controller = changed(config, is_paused=True)
    while cluster.now_s < boundary_s + 600.0:
        cluster.tick(None)
        assert cluster.counts == (4, 2)
        assert (len(cluster.serving(P)), len(cluster.serving(D))) == (4, 2)
    cluster.lose(P)  # a replica that is replaced serves too
    run(cluster, 20, None)
    assert (len(cluster.serving(P)), len(cluster.serving(D))) == (4, 2)
    cluster.controller = Controller(config)
    run(cluster, 60, None)
    assert cluster.counts == (1, 4)


def test_late_requests_from_before_the_last_replica_entered_prevent_no_scale_in(make_autoscale: MakeConfig) -> None:
    policy = {"kind": "periodic", "periods": [{"begins": "* * * * *", "decode": 8}]}
    config = make_autoscale(policy=policy, guard={"step_in_replicas": 2})
    cluster = serve(config)
    run(cluster, 10, None, latency=WELL)
    cluster.controller = changed(config, policy={"kind": "periodic", "periods": [{"begins": "* * * * *", "decode": 4}]})
    entered_s = (cluster.state.settled_s or 0.0) - config.window_s
    serving_s = cluster.now_s - entered_s
    plan = cluster.tick(None, latency=Latency(ttft_s=serving_s - 0.5))
    assert plan.held_back[-1].text == "no replica leaves while a latency is outside its objective"
    from_before = Latency(ttft_s=2 * serving_s + 60.0)
    while cluster.now_s + cluster.interval_s < entered_s + config.window_s:  # whether the overload is over is not known
        assert min(cluster.tick(None, latency=from_before).state.desired.values()) == 8
    assert min(cluster.tick(None, latency=from_before, backlog_tokens=9000.0).state.desired.values()) == 8  # it goes on
    plan = cluster.tick(None, latency=from_before)
    assert min(plan.state.desired.values()) == 6
    plan = cluster.tick(None, latency=Latency(ttft_s=2 * serving_s + 60.0, tpot_s=9.0))
    assert min(plan.state.desired.values()) > 4


def test_a_scale_in_starts_once_users_no_longer_wait_and_is_then_observed(make_autoscale: MakeConfig) -> None:
    policy = {"kind": "periodic", "periods": [{"begins": "* * * * *", "decode": 8}]}
    config = make_autoscale(policy=policy, guard={"step_in_replicas": 2}, gate={"observation_s": 20.0})
    cluster = serve(config)
    run(cluster, 10, None, latency=WELL)
    cluster.controller = changed(config, policy={"kind": "periodic", "periods": [{"begins": "* * * * *", "decode": 4}]})
    plan = cluster.tick(None, latency=LATE)
    assert set(plan.state.desired.values()) == {8}
    assert plan.held_back[-1].text == "no replica leaves while a latency is outside its objective"
    assert len(cluster.tick(None, latency=WELL).withdrawn) == 4
    plan = cluster.tick(None, latency=LATE)
    assert len(plan.reinstated) == 4
    assert set(plan.state.desired.values()) == {8}
    assert len(plan.admitted) == 16


def test_one_role_grows_while_users_wait_though_the_ratio_would_shrink_the_other(make_autoscale: MakeConfig) -> None:
    config = make_autoscale()
    cluster = serve(config)
    run(cluster, 20, 780.0, latency=WELL)
    cluster.controller = changed(config, pd_ratio="1:2")
    cluster.tick(980.0, latency=LATE)
    assert cluster.counts == (8, 10)
    assert len(cluster.plan.admitted) == 16


def test_replicas_that_never_served_stop_without_an_observation(make_autoscale: MakeConfig) -> None:
    cluster = serve(make_autoscale(pd_ratio="1:1", gate={"observation_s": 60.0}), prefill_s=2.0, decode_s=60.0)
    run(cluster, 3, 580.0)
    held = set(cluster.plan.state.held)
    assert len(held) == 4
    plan = cluster.tick(180.0, latency=WELL)
    assert set(plan.victims) == held


def test_after_a_clock_is_set_back_no_loss_lies_in_the_future(make_autoscale: MakeConfig) -> None:
    cluster = serve(make_autoscale())
    run(cluster, 10, 280.0)
    cluster.lose(D)
    cluster.tick(280.0)
    assert cluster.state.lost_s == cluster.now_s
    cluster.now_s -= 600.0
    cluster.tick(280.0)
    assert cluster.state.lost_s == cluster.now_s


def test_prefill_makes_room_for_decode_if_the_budget_is_full_and_users_wait(
    make_autoscale: MakeConfig, make_snapshot: Any
) -> None:
    """6P1D hold all eight GPUs, two of them decode's. Users wait for decode, so three prefill replicas make room."""

    def plan(budget_gpus: int | None, *, decode_more: bool = True) -> Plan:
        counts = {"prefill": 3, "decode": 2 if decode_more else 1}
        config = make_autoscale(
            pd_ratio="3:2" if decode_more else "3:1",
            policy={"kind": "static", **counts},
            guard={"budget_gpus": budget_gpus, "step_in_replicas": 8},
            gate={"observation_s": 60.0},
        )
        seen = make_snapshot(6, 1, latency=Latency(ttft_s=9.0, tpot_s=0.2), bounds=(1, 8))
        pools = tuple(
            replace(p, limits=replace(p.limits, gpus_per_replica=2 if p.key.role is Role.DECODE else 1))
            for p in seen.pools
        )
        state = ControllerState(
            desired={pool.key: len(pool.replicas) for pool in pools},
            admitted=tuple(replica.replica_id for pool in pools for replica in pool.replicas),
        )
        return Controller(config).tick(replace(seen, pools=pools, state=state))

    full = plan(8)
    assert [full.counts[PoolKey("g0", role)] for role in Role] == [3, 1]  # decode grows once the victims have gone
    assert len(full.victims) == 3 and not full.withdrawn  # they stop at once: an observation would show nothing
    assert all(name.startswith("p") for name in full.victims)
    for other in (plan(None), plan(16), plan(8, decode_more=False)):  # there is room for both, or decode needs none
        assert other.counts[PoolKey("g0", Role.PREFILL)] == 6
        assert not other.victims and not other.withdrawn


def test_while_no_replica_may_leave_replicas_that_fit_the_budget_are_added(
    make_autoscale: MakeConfig, make_snapshot: Any
) -> None:
    """2P2D hold six of eight GPUs. The wanted 6:1 would remove a decode replica; two prefill replicas fit beside it."""
    config = make_autoscale(
        pd_ratio="6:1",
        policy={"kind": "static", "prefill": 6, "decode": 1},
        guard={"budget_gpus": 8, "step_in_replicas": 8},
    )
    seen = make_snapshot(2, 2, latency=LATE, bounds=(1, 8))
    pools = tuple(
        replace(p, limits=replace(p.limits, gpus_per_replica=2 if p.key.role is Role.DECODE else 1)) for p in seen.pools
    )
    state = ControllerState(
        desired={pool.key: len(pool.replicas) for pool in pools},
        admitted=tuple(replica.replica_id for pool in pools for replica in pool.replicas),
    )
    plan = Controller(config).tick(replace(seen, pools=pools, state=state))
    assert [plan.counts[PoolKey("g0", role)] for role in Role] == [4, 2]
    assert not plan.victims and not plan.withdrawn
