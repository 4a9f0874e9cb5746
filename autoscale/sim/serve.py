"""The virtual counterpart of Ray Serve and of ``ray_policy``: it ticks the controller and follows its plans (pure)."""

from collections.abc import Mapping
from dataclasses import replace

from autoscale.decide.controller import Controller
from autoscale.decide.forecasting import forecaster_of, start_ahead_s
from autoscale.forecast.forecaster import fit
from autoscale.load_forecast import LoadForecast
from autoscale.observe.signals import Signals
from autoscale.sim.cluster import VirtualCluster
from autoscale.sim.fleet import Fleet, VirtualPool
from autoscale.types import ControllerState, Plan, PoolKey, PoolStats, Snapshot
from router.membership import routable


class VirtualServe:
    """Stands between a controller and a virtual cluster; ``start`` it before the cluster runs."""

    def __init__(
        self,
        cluster: VirtualCluster,
        controller: Controller,
        pools: Mapping[PoolKey, VirtualPool],
        *,
        decides_from_s: float = 0.0,
    ) -> None:
        """It has not started, and has no replicas.

        ``decides_from_s``: before this time (s) the counts do not change, and all first replicas serve at any ratio.
        """
        self.cluster = cluster
        self.controller = controller
        # As the live policy does, the controller also decides when another replica becomes ready.
        self.fleet = Fleet(cluster, pools, self._decide)
        self.plans: list[tuple[float, Plan]] = []
        self._decides_from_s = decides_from_s
        # The controller that ticks: until decides_from_s a paused one, whose gate keeps no replica out of routing.
        gate = controller.config.gate.model_copy(update={"is_enabled": False})
        self._acting_controller = Controller(controller.config.model_copy(update={"is_paused": True, "gate": gate}))
        self._targets = {key: pool.lowest_replicas for key, pool in pools.items()}
        self._state = ControllerState()
        self._signals = Signals(controller.config.window_s)
        self._forecaster = forecaster_of(controller.config)

    def start(self, counts: Mapping[PoolKey, int]) -> None:
        """Begin with these ready replicas of each pool."""
        for key, count in counts.items():
            self._targets[key] = count
            self.fleet.begin(key, count)
        self._route(None)
        self.cluster.at(self.cluster.now_s, self._tick)

    def fail(self, key: PoolKey, count: int) -> None:
        """Let the ``count`` oldest replicas of a pool die; Serve starts others at once."""
        for life in self.fleet.running(key)[:count]:
            self.fleet.kill(life)
        self._decide()

    def _tick(self) -> None:
        if self.cluster.now_s >= self._decides_from_s:
            self._acting_controller = self.controller
        self._decide()
        self.cluster.at(self.cluster.now_s + self.controller.config.interval_s, self._tick)

    def _decide(self) -> None:
        now_s = self.cluster.now_s
        plan = self._acting_controller.tick(self._snapshot())
        self._state = plan.state
        # The recorded plans lack the policy's memory, which would fill a gigabyte in three days of a trace.
        state, decision = replace(plan.state, memory={}), replace(plan.decision, memory=None)
        self.plans.append((now_s, replace(plan, state=state, decision=decision)))
        self._follow(plan)

    def _snapshot(self) -> Snapshot:
        config, now_s = self.controller.config, self.cluster.now_s
        reports = {
            key: {
                life.replica_id: (now_s, self.cluster.report(life.replica))
                for life in self.fleet.running(key)
                if life.replica is not None
            }
            for key in self.fleet.pools
        }
        self._signals.add(reports, now_s, config.interval_s)
        if (demand := self.cluster.endpoint_report()) is not None:
            self._signals.add_endpoint({"endpoint": (now_s, demand)}, now_s, config.interval_s)
        snapshot = Snapshot(
            now_s=now_s,
            pools=tuple(
                PoolStats(
                    key=key,
                    replicas=self._signals.replicas(key),
                    target_replicas=self._targets[key],
                    draining=tuple(life.replica_id for life in self.fleet.here[key] if life.is_stopping),
                    limits=limits,
                )
                for key, limits in self.fleet.pools.items()
            ),
            latency=self._signals.latency(config.slo.quantile_frac),
            traffic=self._signals.traffic(),
            state=self._state,
            is_awaited=self.cluster.is_awaited,
        )
        return replace(snapshot, forecast=self._forecast(snapshot))

    def _forecast(self, snapshot: Snapshot) -> LoadForecast | None:
        """The forecast of the load. Unlike the live shell, this one fits in the tick itself."""
        if self._forecaster is None:
            return None
        ahead_s = start_ahead_s(self.controller.config, snapshot.state)
        if (task := self._forecaster.observe(snapshot.traffic, snapshot.now_s, ahead_s)) is not None:
            self._forecaster.take(task, fit(task))
        return self._forecaster.forecast(snapshot.now_s)

    def _follow(self, plan: Plan) -> None:
        for key in self.fleet.pools:
            self._targets[key] = plan.counts[key]
            self.fleet.scale(key, plan.counts[key], plan.victims)
        self._route(frozenset(plan.admitted))

    def _route(self, admitted: frozenset[str] | None) -> None:
        """Route requests to the running replicas that a plan admits; ``None``: there is no plan, so to all."""
        for key in self.fleet.pools:
            names = [life.replica_id for life in self.fleet.running(key)]
            self.cluster.route(key, routable(names, admitted))
