"""Engines on the cores of one machine: they slow each other down, and the machine's speed varies."""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autoscale.engines.engine_model import EngineModel
from autoscale.engines.engine_step import Step
from autoscale.engines.profile import EngineProfile
from autoscale.sim.cluster import VirtualCluster
from autoscale.sim.replica import VirtualReplica
from autoscale.types import PoolKey
from kvtransfer.topology import Role
from router.config import RouterConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The cost of sharing a machine.

    Attributes:
        contention_frac: by role, how much longer a step takes for each other engine that computes when it begins.
        swing_frac: standard deviation of the logarithm of a step's time.
        swing_s: correlation time of that: a neighbour or a garbage collection slows several steps in a row.
    """

    contention_frac: Mapping[Role, float]
    swing_frac: float = 0.0
    swing_s: float = 1.0


class SharedCores:
    """How fast a host is from step to step: an Ornstein-Uhlenbeck process, one for all engines on it."""

    def __init__(self, host: Host, rng: random.Random) -> None:
        self._host = host
        self._rng = rng
        self._at_s, self._swing = 0.0, rng.gauss(0.0, 1.0)

    def slowdown(self, role: Role, now_s: float, computing: int) -> float:
        """How many times longer a step takes than alone.

        Args:
            role: of the engine.
            now_s: when the step begins; it may be slightly before the last one's begin.
            computing: other engines that compute then.
        """
        correlation = math.exp(-max(0.0, now_s - self._at_s) / self._host.swing_s)
        self._swing = correlation * self._swing + math.sqrt(1.0 - correlation * correlation) * self._rng.gauss(0.0, 1.0)
        self._at_s = max(self._at_s, now_s)
        contention = 1.0 + self._host.contention_frac[role] * computing
        return contention * math.exp(self._host.swing_frac * self._swing)


class _SlowedEngine(EngineModel):
    """An engine whose every step takes longer by a factor, which ``slowdown`` gives for the begin of the step (s)."""

    def __init__(self, profile: EngineProfile, slowdown: Callable[[float], float]) -> None:
        super().__init__(profile)
        self._slowdown = slowdown

    def plan(self, now_s: float, most_steps: int = 1) -> Step | None:
        step = super().plan(now_s)
        return step if step is None else step._replace(first_s=step.first_s * self._slowdown(now_s))


class SharedCluster(VirtualCluster):
    """A virtual cluster on one host; every step is simulated by itself."""

    def __init__(
        self, profiles: Mapping[PoolKey, EngineProfile], router: RouterConfig, rng: random.Random, host: Host
    ) -> None:
        super().__init__(profiles, router, rng)
        self._cores = SharedCores(host, rng)
        self._all: list[VirtualReplica] = []

    def add(self, key: PoolKey, replica_id: str) -> VirtualReplica:
        """A new replica, ready but not routed to."""
        replica = super().add(key, replica_id)

        def slowdown(now_s: float) -> float:
            computing = sum(other.step is not None for other in self._all if other is not replica)
            return self._cores.slowdown(key.role, now_s, computing)

        replica.engine = _SlowedEngine(replica.engine.profile, slowdown)
        self._all.append(replica)
        return replica
