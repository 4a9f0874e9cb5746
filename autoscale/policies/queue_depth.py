"""Queue depth: replicas for the arrivals, and to work off the queue in time (the queue-depth chapter, section 23.4)."""

import math
from collections.abc import Mapping
from statistics import linear_regression
from typing import Literal

from pydantic import Field, model_validator

from autoscale.headcount import desired_replicas
from autoscale.policies.policy import Policy, replicas_of
from autoscale.types import Decision, Shown, Snapshot
from kvtransfer.strict_config import StrictConfig
from kvtransfer.topology import Role

# The most points of a trend that are remembered.
_MOST_POINTS = 64


class QueueDepthConfig(StrictConfig):
    """Service rates of one replica, how fast a queue must go, and how far ahead arrivals are extrapolated.

    The chapter's printed law has ``target_queue`` 0 and ``burn_down_s`` at the promised wait; its code has 40 and 3 s.
    Its controllers (Exercise 23.4.2): reactive as the defaults, headroom with ``headroom_frac`` 0.4, predictive with
    ``lead_s`` at the time of a start, and both together.
    """

    kind: Literal["queue_depth"] = "queue_depth"
    prefill_requests_per_s: float | None = Field(None, gt=0.0)
    """Requests per second of one prefill replica (mu)."""
    decode_requests_per_s: float | None = Field(None, gt=0.0)
    """Requests per second of one decode replica (mu)."""
    target_queue: float = Field(0.0, ge=0.0, description="Requests that may wait without more replicas (Q*).")
    burn_down_s: float = Field(1.0, gt=0.0)
    """Time in which the queue beyond target_queue must be worked off."""
    headroom_frac: float = Field(0.0, ge=0.0, le=10.0, description="Standing spare: 0.4 adds 40 % to the replicas.")
    lead_s: float = Field(0.0, ge=0.0)
    """Arrivals are extrapolated this far, the time of a start; 0: not at all."""
    trend_s: float = Field(60.0, gt=0.0)
    """The trend of arrivals is taken over this time: several times window_s."""

    @model_validator(mode="after")
    def _check_rates(self) -> "QueueDepthConfig":
        if self.prefill_requests_per_s is None and self.decode_requests_per_s is None:
            raise ValueError(
                "give prefill_requests_per_s, decode_requests_per_s or both: what one replica serves at your objective"
            )
        return self


def replicas_for_queue(arrivals_per_s: float, queue: float, served_per_s: float, config: QueueDepthConfig) -> int:
    """``ceil((lambda + max(0, Q - Q*) / burn_down_s) / mu)``, times one plus the headroom, rounded up again.

    lambda: ``arrivals_per_s``; Q: ``queue``; Q*: ``target_queue``; mu: ``served_per_s`` of one replica.

    Source: the queue-depth chapter, section 23.4.
    """
    demand_per_s = arrivals_per_s + max(0.0, queue - config.target_queue) / config.burn_down_s
    return math.ceil(math.ceil(demand_per_s / served_per_s) * (1.0 + config.headroom_frac))


class QueueDepth(Policy[QueueDepthConfig]):
    """Replicas of each role with a configured service rate, from arrivals per second and its waiting requests."""

    def decide(self, snapshot: Snapshot) -> Decision:
        """Size each role with a known service rate by its own queue; the ratio then lifts the other role."""
        arrivals = snapshot.traffic.requests_per_s
        if arrivals is None:
            return Decision(wanted=None, reason="no arrivals were observed")
        coming, memory = self._ahead(snapshot, arrivals)
        wanted = dict.fromkeys(Role, 0.0)
        shown = []
        rates = {Role.PREFILL: self._config.prefill_requests_per_s, Role.DECODE: self._config.decode_requests_per_s}
        for role, rate in rates.items():
            if rate is None or not any(pool.key.role is role for pool in snapshot.pools):
                continue
            queues = [replica.waiting_requests for replica in replicas_of(snapshot, role)]
            if not queues or None in queues:
                return Decision(wanted=None, reason=f"not every {role} replica reports its queue")
            queue = math.fsum(waiting for waiting in queues if waiting is not None)
            wanted[role] = replicas_for_queue(coming, queue, rate, self._config)
            shown.append(Shown(name=f"{role}_queue", value=queue, target=self._config.target_queue))
        if not snapshot.traffic.is_whole:  # there may be more traffic, so no replica leaves
            present = desired_replicas(snapshot.state.desired)
            wanted = {role: max(wanted[role], float(present[role])) for role in Role}
        waiting = ", ".join(f"{entry.name} {entry.value:.4g}" for entry in shown)
        ahead = f", {coming:.4g} in {self._config.lead_s:g} s" if memory is not None else ""
        reason = f"{arrivals:.4g} requests/s{ahead}; {waiting}"
        return Decision(wanted=wanted, reason=reason, shown=tuple(shown), memory=memory)

    def _ahead(self, snapshot: Snapshot, arrivals: float) -> tuple[float, Mapping[str, tuple[float, ...]] | None]:
        """Arrivals per second after ``lead_s`` by the trend's line, at least those of now; and the trend's memory.

        Before half of ``trend_s`` has been observed the line is mostly noise, so nothing is extrapolated.
        """
        config, memory, now_s = self._config, snapshot.state.memory, snapshot.now_s
        if not config.lead_s or not snapshot.traffic.is_whole:  # partial traffic would look like a fall
            return arrivals, None
        series = zip(memory.get("arrivals_at_s", ()), memory.get("arrivals_per_s", ()), strict=False)
        past = [(at, rate) for at, rate in series if now_s - config.trend_s <= at < now_s]
        points = [*past, (now_s, arrivals)]
        stored = points if not past or now_s - past[-1][0] >= config.trend_s / _MOST_POINTS else past
        trend = {"arrivals_at_s": tuple(at for at, _ in stored), "arrivals_per_s": tuple(rate for _, rate in stored)}
        if now_s - points[0][0] < config.trend_s / 2:
            return arrivals, trend
        slope, level = linear_regression([at - now_s for at, _ in points], [rate for _, rate in points])
        return max(arrivals, level + slope * config.lead_s), trend
