"""Warm replicas: they run, and get no requests until their service grows."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.controller import Controller
from autoscale.decide.cycle import lacking_types, shared, tick_all
from autoscale.decide.placing import with_warm
from autoscale.ratio import PdRatio
from autoscale.room import PoolRoom, Room
from autoscale.types import ControllerState, Demand, Plan, PoolKey, PoolLimits, PoolStats, ReplicaStats, Snapshot
from kvtransfer.topology import Node, Role
from tests.autoscale.decide.test_cycle import room

P, D = Role.PREFILL, Role.DECODE
NOW_S = 1000.0


def controller(prefill: int, decode: int, ratio: str = "1:1", **fields: Any) -> Controller:
    """A service that wants these replicas."""
    config = {
        "pd_ratio": ratio,
        "policy": {"kind": "static", "prefill": prefill, "decode": decode},
        "guard": {"cooldown_out_s": 0.0, "cooldown_in_s": 0.0, "step_out_replicas": 9, "step_in_replicas": 9},
        "gate": {"observation_s": 10.0},
        "interval_s": 5.0,
        **fields,
    }
    return Controller(AutoscaleConfig.model_validate(config))


def running(counts: Mapping[Role, int], service: str = "s", gpu_type: str = "H100") -> tuple[PoolStats, ...]:
    return tuple(
        PoolStats(
            key=PoolKey(service, role),
            replicas=tuple(
                ReplicaStats(replica_id=f"{service}-{role}{i}", observed_s=NOW_S, running_requests=0.0)
                for i in range(counts[role])
            ),
            target_replicas=counts[role],
            limits=PoolLimits(
                lowest_replicas=0,
                highest_replicas=9,
                gpus_per_replica=1,
                demand=Demand(gpu_type=gpu_type, gpus_per_worker=1.0),
            ),
        )
        for role in Role
    )


def started(counts: Mapping[Role, int], service: str = "s", gpu_type: str = "H100") -> Snapshot:
    """The snapshot of a service whose replicas all serve."""
    pools = running(counts, service, gpu_type)
    names = tuple(replica.replica_id for pool in pools for replica in pool.replicas)
    state = ControllerState(
        ticked_s=NOW_S - 5.0, desired={pool.key: counts[pool.key.role] for pool in pools}, admitted=names
    )
    return Snapshot(now_s=NOW_S, pools=pools, state=state)


def later(plan: Plan, counts: Mapping[Role, int] | None = None, seconds: float = 5.0) -> Snapshot:
    """The next snapshot: the replicas that the plan asked for run, or ``counts``."""
    now = {key.role: count for key, count in plan.counts.items()} if counts is None else counts
    now_s = (plan.state.ticked_s or 0.0) + seconds
    pools = tuple(
        replace(pool, replicas=tuple(replace(one, observed_s=now_s) for one in pool.replicas)) for pool in running(now)
    )
    return Snapshot(now_s=now_s, pools=pools, state=plan.state)


def by_role(counts: Mapping[PoolKey, int]) -> tuple[int, int]:
    return (
        sum(count for key, count in counts.items() if key.role is P),
        sum(count for key, count in counts.items() if key.role is D),
    )


def test_a_warm_replica_of_the_larger_role_starts_with_its_share_of_the_other_role() -> None:
    plan = controller(1, 3, "1:3", warm_replicas=1).tick(started({P: 1, D: 3}))
    assert by_role(plan.state.desired) == (1, 3)
    assert by_role(plan.state.warm) == (1, 1)
    assert by_role(plan.counts) == (2, 4)


def test_warm_replicas_run_and_get_no_requests() -> None:
    service = controller(1, 1, warm_replicas=2)
    plan = service.tick(later(service.tick(started({P: 1, D: 1}))))
    assert by_role(plan.counts) == (3, 3)
    assert plan.admitted == ("s-prefill0", "s-decode0")
    assert set(plan.state.held) == {"s-prefill1", "s-prefill2", "s-decode1", "s-decode2"}
    assert plan.victims == () and plan.withdrawn == ()
    assert service.tick(later(plan)).counts == plan.counts  # the next tick changes nothing


def test_a_service_that_grows_admits_its_warm_replicas_at_once_and_starts_new_ones() -> None:
    plan = controller(1, 1, warm_replicas=1).tick(started({P: 1, D: 1}))
    plan = controller(2, 2, warm_replicas=1).tick(later(plan))
    assert by_role(plan.state.desired) == (2, 2)
    assert plan.admitted == ("s-prefill0", "s-prefill1", "s-decode0", "s-decode1")
    assert by_role(plan.counts) == (3, 3)


def test_a_service_that_shrinks_keeps_one_replica_warm_without_a_start() -> None:
    before = controller(3, 3).tick(started({P: 3, D: 3}))
    plan = controller(2, 2, warm_replicas=1).tick(later(before))
    assert by_role(plan.state.desired) == (2, 2)
    assert by_role(plan.counts) == (3, 3)  # no replica starts or stops
    assert plan.victims == () and plan.withdrawn == () and len(plan.admitted) == 4


def test_warm_replicas_that_are_no_longer_wanted_stop_at_once() -> None:
    warm = controller(1, 1, warm_replicas=1)
    plan = warm.tick(later(warm.tick(started({P: 1, D: 1}))))
    plan = controller(1, 1).tick(later(plan))
    assert set(plan.victims) == {"s-prefill1", "s-decode1"}
    assert plan.admitted == ("s-prefill0", "s-decode0")


@pytest.mark.parametrize(
    ("highest", "budget", "expected"),
    [(9, None, (4, 4)), (3, None, (3, 3)), (9, 7, (3, 3)), (9, 4, (2, 2)), (2, None, (2, 2))],
)
def test_bounds_and_budget_hold_for_warm_replicas_too(
    highest: int, budget: int | None, expected: tuple[int, int]
) -> None:
    room = Room.of(
        (
            PoolRoom(role=role, limits=PoolLimits(lowest_replicas=1, highest_replicas=highest, gpus_per_replica=1.0))
            for role in Role
        ),
        budget,
    )
    both = with_warm({P: 2, D: 2}, 2, PdRatio(1, 1), room, dict.fromkeys(Role, 0))
    assert (both[P], both[D]) == expected


def test_replicas_that_end_still_hold_the_gpus_of_a_budget() -> None:
    room = Room.of(
        (
            PoolRoom(role=role, limits=PoolLimits(lowest_replicas=1, highest_replicas=9, gpus_per_replica=1.0))
            for role in Role
        ),
        4,
    )
    assert with_warm({P: 1, D: 1}, 1, PdRatio(1, 1), room, {P: 0, D: 0}) == {P: 2, D: 2}
    assert with_warm({P: 1, D: 1}, 1, PdRatio(1, 1), room, {P: 0, D: 1}) == {P: 1, D: 1}


def test_a_paused_service_starts_no_warm_replica_and_a_sleeping_one_has_none() -> None:
    plan = controller(1, 1, warm_replicas=1, is_paused=True).tick(started({P: 1, D: 1}))
    assert by_role(plan.counts) == (1, 1)
    plan = controller(1, 1, warm_replicas=1, idle_to_zero_s=60.0).tick(started({P: 0, D: 0}))
    assert by_role(plan.counts) == (0, 0)


def test_a_warm_replica_that_is_lost_is_started_again() -> None:
    service = controller(1, 1, warm_replicas=1)
    plan = service.tick(later(service.tick(started({P: 1, D: 1}))))
    plan = service.tick(later(plan, {P: 2, D: 1}))
    assert by_role(plan.counts) == (2, 2) and plan.victims == ()


def test_services_share_warm_replicas_in_turn() -> None:
    assert shared(3, ["a", "b"]) == {"a": 2, "b": 1}
    assert shared(0, ["a"]) == {"a": 0}
    assert shared(3, []) == {}


def together(lacking: frozenset[str] = frozenset(), holder: str | None = None) -> dict[str, tuple[int, int]]:
    """The warm replicas of three services that share one; ``last`` is the least important and has another type."""
    snapshots = {
        name: started({P: 1, D: 1}, name, kind) for name, kind in (("a", "H100"), ("b", "H100"), ("last", "H20"))
    }
    if holder is not None:
        state = replace(snapshots[holder].state, warm=dict.fromkeys(snapshots[holder].state.desired, 1))
        snapshots[holder] = replace(snapshots[holder], state=state)
    controllers = {name: controller(1, 1, priority=0 if name == "last" else 1) for name in snapshots}
    nodes = [
        Node(name=kind, gpu_type=kind, gpus=8.0, free_gpus=2.0, cpus=64.0, free_cpus=64.0) for kind in ("H100", "H20")
    ]
    decided = tick_all(controllers, snapshots, slots=room(nodes), warm_replicas=1, lacking_types=lacking)
    return {name: by_role(plan.state.warm) for name, (_, plan) in decided.items() if any(plan.state.warm.values())}


def test_the_most_important_service_gets_the_shared_warm_replica_and_of_equals_its_holder() -> None:
    assert together() == {"a": (1, 1)}
    assert together(holder="b") == {"b": (1, 1)}
    assert together(holder="last") == {"a": (1, 1)}


def test_no_replica_is_warm_on_a_gpu_type_that_others_lack() -> None:
    assert together(lacking=frozenset({"H100"})) == {"last": (1, 1)}
    short = controller(9, 9)
    nodes = [Node(name="n", gpu_type="H100", gpus=8.0, free_gpus=2.0, cpus=64.0, free_cpus=64.0)]
    decided = tick_all({"s": short}, {"s": started({P: 1, D: 1})}, slots=room(nodes))
    assert lacking_types(decided) == {"H100"}
