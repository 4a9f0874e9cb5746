"""Engines on one machine's cores, as on CPU: they slow each other, and the machine is not always as fast (pure)."""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass

from kvtransfer.topology import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What sharing a machine costs.

    ``contention_frac``: by role, how much longer a step takes for each other engine that computes when it begins.
    ``swing_frac``: the standard deviation of the logarithm of the time that the same step takes. ``swing_s``: within
    which that changes: what slows one step, a neighbour or a garbage collection, slows the next too.
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
        """How many times as long a step takes as alone.

        Args:
            role: of the engine.
            now_s: when the step begins; engines take turns, so it may be a little earlier than the one before.
            computing: other engines that compute then.
        """
        kept = math.exp(-max(0.0, now_s - self._at_s) / self._host.swing_s)
        self._swing = kept * self._swing + math.sqrt(1.0 - kept * kept) * self._rng.gauss(0.0, 1.0)
        self._at_s = max(self._at_s, now_s)
        contention = 1.0 + self._host.contention_frac[role] * computing
        return contention * math.exp(self._host.swing_frac * self._swing)
