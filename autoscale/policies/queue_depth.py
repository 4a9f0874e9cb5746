"""Queue depth: enough replicas for what arrives, and for the backlog to be gone in time (the chapter, section 23.4)."""

import math
from collections.abc import Mapping
from statistics import linear_regression
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from autoscale.ratio import PdRatio
from autoscale.slo import SloConfig
from autoscale.types import Decision, Shown, Snapshot
from kvtransfer.topology import Role

# Of one trend: however often decisions are made.
_MOST_POINTS = 64


class QueueDepthConfig(BaseModel):
    """What one replica of each role serves, how fast a queue must go, and how far ahead arrivals are looked at.

    ``target_queue`` 0 and ``burn_down_s`` at the wait that was promised are the chapter's printed law; 40 and 3 s are
    those of its code. Its controllers: reactive as it stands, headroom with ``headroom_frac`` 0.4, predictive with
    ``lead_s`` at the time that a start takes, and both together (Exercise 23.4.2).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    kind: Literal["queue_depth"] = "queue_depth"
    prefill_requests_per_s: float | None = Field(None, gt=0.0, description="What one prefill replica serves (mu).")
    decode_requests_per_s: float | None = Field(None, gt=0.0, description="What one decode replica serves (mu).")
    target_queue: float = Field(0.0, ge=0.0, description="Requests that may wait without a replica more (Q*).")
    burn_down_s: float = Field(1.0, gt=0.0, description="Time in which a longer queue must be gone.")
    headroom_frac: float = Field(0.0, ge=0.0, le=10.0, description="Standing spare: 0.4 asks for 40 % more replicas.")
    lead_s: float = Field(0.0, ge=0.0, description="Arrivals so far ahead count: what a start takes; 0 for those now.")
    trend_s: float = Field(
        60.0, gt=0.0, description="What their trend is taken over: several times the window of the arrivals (20 s)."
    )

    @model_validator(mode="after")
    def _check_rates(self) -> "QueueDepthConfig":
        if self.prefill_requests_per_s is None and self.decode_requests_per_s is None:
            raise ValueError(
                "give prefill_requests_per_s, decode_requests_per_s or both: what one replica serves at your objective"
            )
        return self


def replicas_for_queue(
    arrivals_per_s: float,
    queue: float,
    *,
    served_per_s: float,
    target_queue: float,
    burn_down_s: float,
    headroom_frac: float = 0.0,
) -> int:
    """``ceil((lambda + max(0, Q - Q*) / burn_down_s) / mu)``, times one plus the headroom, rounded up again.

    Args:
        arrivals_per_s: requests that arrive (lambda).
        queue: requests that wait (Q).
        served_per_s: requests that one replica serves (mu).
        target_queue: Q*.
        burn_down_s: time in which the rest must be gone.
        headroom_frac: standing spare.
    """
    demand_per_s = arrivals_per_s + max(0.0, queue - target_queue) / burn_down_s
    return math.ceil(math.ceil(demand_per_s / served_per_s) * (1.0 + headroom_frac))


class QueueDepth:
    """The policy; see ``decide``."""

    def __init__(self, config: QueueDepthConfig, *, ratio: PdRatio, slo: SloConfig) -> None:
        self._config = config

    def decide(self, snapshot: Snapshot) -> Decision:
        """Each role with a known rate by its own queue; the ratio then lifts the other."""
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
            queues = [r.waiting_requests for p in snapshot.pools if p.key.role is role for r in p.replicas]
            if not queues or None in queues:
                return Decision(wanted=None, reason=f"not every {role} replica reports its queue")
            queue = math.fsum(waiting for waiting in queues if waiting is not None)
            wanted[role] = replicas_for_queue(
                coming,
                queue,
                served_per_s=rate,
                target_queue=self._config.target_queue,
                burn_down_s=self._config.burn_down_s,
                headroom_frac=self._config.headroom_frac,
            )
            shown.append(Shown(name=f"{role}_queue", value=queue, target=self._config.target_queue))
        if not snapshot.traffic.is_whole:  # there may be more, so it takes nobody away
            now = dict.fromkeys(Role, 0.0)
            for key, count in snapshot.state.desired.items():
                now[key.role] += count
            wanted = {role: max(wanted[role], now[role]) for role in Role}
        waiting = ", ".join(f"{entry.name} {entry.value:.4g}" for entry in shown)
        ahead = f", {coming:.4g} in {self._config.lead_s:g} s" if memory is not None else ""
        reason = f"{arrivals:.4g} requests/s{ahead}; {waiting}"
        return Decision(wanted=wanted, reason=reason, shown=tuple(shown), memory=memory)

    def _ahead(self, snapshot: Snapshot, arrivals: float) -> tuple[float, Mapping[str, tuple[float, ...]] | None]:
        """Arrivals one lead from now on the line through those of the trend, never fewer than now; and the trend.

        As the chapter's, it takes the larger of what is and what comes. Before half of the trend has been seen the line
        is mostly noise, so nothing is extrapolated.
        """
        config, memory, now_s = self._config, snapshot.state.memory, snapshot.now_s
        if not config.lead_s or not snapshot.traffic.is_whole:  # a part would look like a fall, and then like a rise
            return arrivals, None
        seen = zip(memory.get("arrivals_at_s", ()), memory.get("arrivals_per_s", ()), strict=False)
        past = [(at, rate) for at, rate in seen if now_s - config.trend_s <= at < now_s]
        points = [*past, (now_s, arrivals)]
        kept = points if not past or now_s - past[-1][0] >= config.trend_s / _MOST_POINTS else past
        series = {"arrivals_at_s": tuple(at for at, _ in kept), "arrivals_per_s": tuple(rate for _, rate in kept)}
        if now_s - points[0][0] < config.trend_s / 2:
            return arrivals, series
        slope, level = linear_regression([at - now_s for at, _ in points], [rate for _, rate in points])
        return max(arrivals, level + slope * config.lead_s), series
