"""WVA's admission: a request is refused while every decode replica of its group is full (pure)."""

import random
from dataclasses import dataclass

from autoscale.engines.engine_model import EngineModel
from autoscale.sim.cluster import Group, VirtualCluster
from autoscale.sim.journey import Journey
from autoscale.sim.scenario import Scenario
from autoscale.slo import SloConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Saturation:
    """A decode replica is full from ``kv_usage_frac`` of its KV (0..1) on, or from ``waiting_requests`` on."""

    kv_usage_frac: float
    waiting_requests: int

    def holds(self, engine: EngineModel) -> bool:
        """Whether an engine is full."""
        return engine.kv_usage_frac >= self.kv_usage_frac or len(engine.waiting) >= self.waiting_requests


class RefusingCluster(VirtualCluster):
    """A cluster that refuses a request while every decode replica of its group is full."""

    refuse_at: Saturation

    def _admit(self, group: Group, journey: Journey) -> None:
        if self._is_full(group):
            self._records[journey.number] = journey.record(error="refused")
        else:
            super()._admit(group, journey)

    def _is_full(self, group: Group) -> bool:
        if not group.decode:
            return False
        for name in group.decode:
            group.replicas[name].settle()
            if not self.refuse_at.holds(group.replicas[name].engine):
                return False
        return True


@dataclass(frozen=True, kw_only=True)
class RefusingScenario(Scenario):
    """A scenario on such a cluster; ``refuse_at``: ``None``: no request is refused."""

    refuse_at: Saturation | None

    def cluster(self, slo: SloConfig | None = None) -> VirtualCluster:
        """A cluster without replicas, at which the trace will arrive."""
        if self.refuse_at is None:
            return super().cluster(slo)
        cluster = RefusingCluster(self.profiles, self.router, random.Random(self.seed), slo=slo)
        cluster.refuse_at = self.refuse_at
        cluster.submit(self.trace)
        return cluster
