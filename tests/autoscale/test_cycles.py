"""Many cycles on random clusters whose nodes come and go; then all nodes stay, and no count may change any more."""

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest

from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.controller import Controller
from autoscale.decide.cycle import lacking_types, tick_all
from autoscale.decide.slots import Slots
from autoscale.decide.supply import start_nodes
from autoscale.ratio import PdRatio
from autoscale.types import (
    ControllerState,
    Demand,
    Plan,
    PoolKey,
    PoolLimits,
    PoolStats,
    ReplicaStats,
    Snapshot,
    Traffic,
)
from kvtransfer.topology import LinkTier, Node, Role, Topology

_INTERVAL_S, _START_S, _DRAIN_S = 5.0, 5.0, 10.0
_STORMY, _SETTLING, _QUIET = 60, 60, 40
KINDS = ("H100", "A100")


@dataclass
class Replica:
    """One replica, as Serve and Ray see it."""

    name: str
    key: PoolKey
    on: tuple[str, ...] = ()
    placed_s: float = 0.0
    gone_s: float | None = None


class Cluster:
    """Services, nodes, and what Serve and Ray do with plans."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.now_s, self.born = rng, 1000.0, 0
        self.nodes = {f"n{i}": self._node(f"n{i}") for i in range(rng.randint(2, 8))}
        self.alive, self.cordoned = set(self.nodes), set[str]()
        self.controllers: dict[str, Controller] = {}
        self.pools: dict[PoolKey, tuple[str, PoolStats]] = {}
        for number in range(rng.randint(1, 4)):
            self._add_service(f"s{number}")
        self.budget = {kind: float(rng.randint(6, 24)) for kind in KINDS if rng.random() < 0.3}
        self.warm = rng.choice([0, 0, 1])
        self.replicas: list[Replica] = []
        self.targets = {key: pool.limits.lowest_replicas for key, (_, pool) in self.pools.items()}
        self.starts: dict[PoolKey, tuple[str, ...]] = {}
        self.states = dict.fromkeys(self.controllers, ControllerState())
        self.lacking = frozenset[str]()
        self.awaited = set[str]()

    def _node(self, name: str) -> Node:
        s2, s1 = self.rng.choice("ab"), self.rng.choice("xy")
        gpus = float(self.rng.choice([2, 4, 8]))
        kind, under = self.rng.choice(KINDS), ("d", "c", s2, s2 + s1, "")
        labels = {"s2": s2, "s1": s2 + s1}
        return Node(name=name, labels=labels, under=under, gpu_type=kind, gpus=gpus, cpus=64.0, free_cpus=64.0)

    def _add_service(self, name: str) -> None:
        rng = self.rng
        ratio = PdRatio.parse(rng.choice(["1:1", "1:2", "1:3", "2:1", "0:1", "3:2"]))
        decode, sleeps = rng.randint(1, 6), rng.random() < 0.3
        prefill = 0 if ratio.is_aggregated else max(1, round(decode * ratio.per_decode()))
        config: dict[str, Any] = {
            "pd_ratio": str(ratio),
            "policy": {"kind": "static", "prefill": prefill, "decode": decode},
            "priority": rng.randint(0, 3),
            "guard": {"cooldown_out_s": rng.choice([0.0, 10.0]), "cooldown_in_s": rng.choice([0.0, 10.0])},
            "gate": {"observation_s": 10.0},
            "no_node_s": 15.0,
            "warm_replicas": rng.choice([0, 0, 1, 2]),
            "quota_gpus": {rng.choice(KINDS): float(rng.randint(1, 8))} if rng.random() < 0.3 else {},
            "idle_to_zero_s": 40.0 if sleeps else None,
        }
        self.controllers[name] = Controller(AutoscaleConfig.model_validate(config))
        for number in range(rng.randint(1, 3)):
            level = rng.choice(["s1", "s2", ""])
            selector = {level: rng.choice(list(self.nodes.values())).labels[level]} if level else {}
            affinity = rng.choice([LinkTier.NONE, LinkTier.S1, LinkTier.S2]) if level else LinkTier.NONE
            lowest = 0 if sleeps or number or rng.random() < 0.3 else 1
            if lowest and level == "s2" and affinity is LinkTier.S1:
                affinity = LinkTier.S2  # the configuration refuses S1 here: Serve alone places the minimum
            is_preemptible, highest = not lowest and rng.random() < 0.3, rng.choice([1, 2, 6])
            for role in (Role.DECODE,) if ratio.is_aggregated else tuple(Role):
                demand = Demand(
                    selector=selector, gpu_type=rng.choice(KINDS), workers=rng.choice([1, 1, 2, 4]), gpus_per_worker=1.0
                )
                key = PoolKey(f"{name}g{number}", role)
                self.pools[key] = (
                    name,
                    PoolStats(
                        key=key,
                        replicas=(),
                        target_replicas=lowest,
                        limits=PoolLimits(
                            lowest_replicas=lowest,
                            highest_replicas=highest,
                            gpus_per_replica=demand.gpus,
                            demand=demand,
                            cost=rng.choice([1.0, 2.0]),
                            preference=rng.randint(0, 1),
                            affinity=affinity,
                            is_preemptible=is_preemptible,
                        ),
                    ),
                )

    def seen(self) -> list[Node]:
        """The nodes that are alive, with their free GPUs."""
        free = {name: self.nodes[name].gpus for name in self.alive}
        for replica in self.replicas:
            for name in replica.on:
                free[name] -= self.pools[replica.key][1].limits.gpus_per_replica
        assert min(free.values()) >= 0
        return [
            replace(self.nodes[name], free_gpus=free[name], is_cordoned=name in self.cordoned) for name in sorted(free)
        ]

    def storm(self) -> None:
        """Nodes are lost, come back and are cordoned, and requests wait for services that sleep."""
        rng = self.rng
        if rng.random() < 0.06 and len(self.alive) > 1:
            lost = rng.choice(sorted(self.alive))
            self.alive.remove(lost)
            self.replicas = [replica for replica in self.replicas if lost not in replica.on]
        if rng.random() < 0.08:
            self.alive = set(self.nodes)
        if rng.random() < 0.1:
            self.cordoned = {rng.choice(sorted(self.nodes))} if rng.random() < 0.5 else set()
        self.awaited |= {name for name in self.controllers if rng.random() < 0.05}

    def calm(self) -> None:
        """All nodes are alive, and none is cordoned."""
        self.alive, self.cordoned = set(self.nodes), set()

    def _serve(self) -> None:
        """Replicas end and are asked for as the last plans say, and Ray finds nodes for them."""
        self.replicas = [r for r in self.replicas if r.gone_s is None or r.gone_s > self.now_s]
        victims = {name for state in self.states.values() for name in state.victims}
        for key, target in self.targets.items():
            mine = [r for r in self.replicas if r.key == key and r.gone_s is None]
            order = sorted(mine, key=lambda r: (r.name not in victims, self._is_ready(r)))
            for replica in order[: max(0, len(mine) - target)]:
                if self._is_ready(replica):
                    replica.gone_s = self.now_s + _DRAIN_S
                else:
                    self.replicas.remove(replica)
            for _ in range(target - len(mine)):
                self.born += 1
                self.replicas.append(Replica(f"{key}#{self.born}", key))
        for replica in (r for r in self.replicas if not r.on and r.gone_s is None):
            allowed = self.starts.get(replica.key)
            nodes = [node for node in self.seen() if allowed is None or node.name in allowed]
            slots, demand = Slots(Topology(nodes)), self.pools[replica.key][1].demand
            assert demand is not None
            for index, _, _ in slots.take(demand) or ():
                replica.on, replica.placed_s = (slots.topology.nodes[index].name,), self.now_s

    def _is_ready(self, replica: Replica) -> bool:
        return bool(replica.on) and self.now_s - replica.placed_s >= _START_S

    def _snapshot(self, service: str, is_busy: bool) -> Snapshot:
        state, pools = self.states[service], []
        for key, pool in ((key, pool) for key, (of, pool) in self.pools.items() if of == service):
            mine = [r for r in self.replicas if r.key == key]
            running = [r for r in mine if r.gone_s is None and self._is_ready(r)]
            shown = {"observed_s": self.now_s, "kv_usage_frac": 0.5, "waiting_requests": 0.0}
            pools.append(
                replace(
                    pool,
                    replicas=tuple(
                        ReplicaStats(replica_id=r.name, running_requests=float(is_busy), **shown) for r in running
                    ),
                    target_replicas=self.targets[key],
                    draining=tuple(r.name for r in mine if r.gone_s is not None and r.name in state.victims),
                    held_replicas=sum(r.gone_s is None and bool(r.on) and r.name not in state.victims for r in mine),
                    on={r.name: r.on for r in mine if r.on},
                )
            )
        traffic = Traffic(requests_per_s=float(is_busy))
        is_awaited = service in self.awaited
        return Snapshot(now_s=self.now_s, pools=tuple(pools), state=state, traffic=traffic, is_awaited=is_awaited)

    def cycle(self, is_busy: bool) -> dict[str, Plan]:
        """One interval."""
        self.now_s += _INTERVAL_S
        self._serve()
        nodes = self.seen()
        decided = tick_all(
            self.controllers,
            {name: self._snapshot(name, is_busy) for name in self.controllers},
            slots=Slots(Topology(nodes).with_scarcity()),
            budget_gpus=self.budget,
            warm_replicas=self.warm,
            lacking_types=self.lacking,
        )
        self.lacking = lacking_types(decided)
        starts: dict[PoolKey, tuple[str, ...]] = {}
        for name, (own, plan) in decided.items():
            assert self.controllers[name].tick(own) == plan  # law 16
            self.states[name] = plan.state
            self.targets |= plan.counts
            own_starts, _ = start_nodes(self.starts, plan.nodes, plan.counts, own.pools, Slots(Topology(nodes)), {})
            starts |= own_starts
            if any(self._is_ready(r) for r in self.replicas if self.pools[r.key][0] == name):
                self.awaited.discard(name)
        self.starts = starts
        return {name: plan for name, (_, plan) in decided.items()}


@pytest.mark.parametrize("seed", range(24))
def test_once_all_nodes_stay_no_count_changes_and_every_law_holds(seed: int) -> None:
    rng = random.Random(seed)
    cluster = Cluster(rng)
    for _ in range(_STORMY):
        cluster.storm()
        cluster.cycle(is_busy=rng.random() < 0.5)
    cluster.calm()
    for _ in range(_SETTLING):
        cluster.cycle(is_busy=True)
    before = dict(cluster.targets)
    for _ in range(_QUIET):
        plans = cluster.cycle(is_busy=True)
        assert cluster.targets == before
    for key, (service, pool) in cluster.pools.items():
        state = plans[service].state
        assert pool.limits.lowest_replicas <= state.desired[key] <= pool.limits.highest_replicas
        if key.role is Role.PREFILL and state.desired[key]:
            # Law 4: decode may run without prefill in its group, and prefill never without decode.
            assert state.desired[PoolKey(key.group, Role.DECODE)]
        domains = {
            cluster.nodes[name].under[:4] if pool.limits.affinity is LinkTier.S1 else cluster.nodes[name].under[:3]
            for replica in cluster.replicas
            if replica.key.group == key.group
            for name in replica.on
        }
        assert len(domains) <= 1 or pool.limits.affinity is LinkTier.NONE  # law 11
    for kind, budget in cluster.budget.items():  # law 9
        pools = [
            (key, pool) for key, (_, pool) in cluster.pools.items() if pool.demand and pool.demand.gpu_type == kind
        ]
        held = sum(
            pool.limits.gpus_per_replica
            for key, pool in pools
            for replica in cluster.replicas
            if replica.key == key and replica.on
        )
        assert held <= max(budget, sum(pool.limits.lowest_replicas * pool.limits.gpus_per_replica for _, pool in pools))
