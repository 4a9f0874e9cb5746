"""What Serve and Tandem's shells do around the controller, by a virtual clock: reports, ticks, starts, stops (pure)."""

from collections.abc import Mapping
from dataclasses import replace

from autoscale.controller import Controller
from autoscale.signals import Signals
from autoscale.sim.cluster import VirtualCluster
from autoscale.sim.fleet import Fleet, VirtualPool
from autoscale.sim.nodes import VirtualNodes
from autoscale.types import ControllerState, Plan, PoolKey, PoolStats, Snapshot
from router.membership import routable


class VirtualServe:
    """The control plane's shell around a virtual cluster; ``start`` it before the cluster runs."""

    def __init__(
        self,
        cluster: VirtualCluster,
        controller: Controller,
        pools: Mapping[PoolKey, VirtualPool],
        *,
        held_s: float = 0.0,
        nodes: VirtualNodes | None = None,
        sees_nodes: bool = True,
    ) -> None:
        """``held_s``: until then it only looks, and all that it begins with serve, whatever the ratio.

        ``nodes``: where replicas must find room; with ``sees_nodes`` the controller places by them, else only Ray does.
        """
        self.cluster = cluster
        # As the live policy does whenever another replica runs.
        self.fleet = Fleet(cluster, pools, self._decide, nodes)
        self._seen = nodes if sees_nodes else None
        self.plans: list[tuple[float, Plan]] = []
        self._held_s = held_s
        self._deciding = controller
        gate = controller.config.gate.model_copy(update={"is_enabled": False})
        self._controller = Controller(controller.config.model_copy(update={"is_paused": True, "gate": gate}))
        self._targets = {key: pool.lowest_replicas for key, pool in pools.items()}
        self._state = ControllerState()
        self._signals = Signals(controller.config.window_s)

    def start(self, counts: Mapping[PoolKey, int]) -> None:
        """Begin with replicas that are ready."""
        for key, count in counts.items():
            self._targets[key] = count
            self.fleet.begin(key, count)
        self._route(None)
        self.cluster.at(self.cluster.now_s, self._tick)

    def fail(self, key: PoolKey, count: int) -> None:
        """Let the oldest replicas of a pool die; Serve notices at once, and starts others."""
        for life in self.fleet.running(key)[:count]:
            self.fleet.kill(life)
        self._decide()

    def _tick(self) -> None:
        if self.cluster.now_s >= self._held_s:
            self._controller = self._deciding
        self._decide()
        self.cluster.at(self.cluster.now_s + self._controller.config.interval_s, self._tick)

    def _decide(self) -> None:
        cluster, fleet, now_s = self.cluster, self.fleet, self.cluster.now_s
        config = self._controller.config
        reports = {
            key: {
                life.replica_id: (now_s, cluster.report(life.replica))
                for life in fleet.running(key)
                if life.replica is not None
            }
            for key in fleet.pools
        }
        self._signals.add(reports, now_s, config.interval_s)
        snapshot = Snapshot(
            now_s=now_s,
            pools=tuple(
                PoolStats(
                    key=key,
                    replicas=self._signals.replicas(key),
                    target_replicas=self._targets[key],
                    lowest_replicas=pool.lowest_replicas,
                    highest_replicas=pool.highest_replicas,
                    gpus_per_replica=pool.gpus_per_replica,
                    link_tier=pool.link_tier,
                    cost=pool.cost,
                    draining=tuple(life.replica_id for life in fleet.here[key] if life.is_stopping),
                    demand=None if self._seen is None else pool.demand,
                    held_replicas=None
                    if self._seen is None
                    else sum(life.node is not None and not life.is_stopping for life in fleet.here[key]),
                    affinity=pool.affinity,
                    preference=pool.preference,
                )
                for key, pool in fleet.pools.items()
            ),
            latency=self._signals.latency(config.slo.quantile_frac),
            traffic=self._signals.traffic(),
            state=self._state,
            is_awaited=cluster.is_awaited,
            nodes=None if self._seen is None else self._seen.now(),
        )
        plan = self._controller.tick(snapshot)
        self._state = plan.state
        # What a policy remembers is in the next snapshot; of three days it would fill a gigabyte.
        state, decision = replace(plan.state, memory={}), replace(plan.decision, memory=None)
        self.plans.append((now_s, replace(plan, state=state, decision=decision)))
        fleet.allowed |= {key: names or None for key, names in plan.nodes.items()}
        fleet.find_room()
        for key in fleet.pools:
            self._targets[key] = plan.counts[key]
            fleet.scale(key, plan.counts[key], plan.victims)
        self._route(frozenset(plan.admitted))

    def _route(self, admitted: frozenset[str] | None) -> None:
        for key in self.fleet.pools:
            names = [life.replica_id for life in self.fleet.running(key)]
            self.cluster.route(key, routable(names, admitted))
