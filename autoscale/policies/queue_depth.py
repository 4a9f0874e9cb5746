"""Queue depth: replicas for arrivals, and to serve the queue in time (the queue-depth chapter, section 23.4)."""

import math
from collections.abc import Mapping
from statistics import linear_regression
from typing import Literal

from pydantic import Field, model_validator

from autoscale.headcount import EPSILON_REPLICAS
from autoscale.policies.decode_rate import DecodeRate
from autoscale.policies.policy import (
    DRIFT_FRAC,
    Policy,
    present_replicas,
    queue_at_endpoint,
    weight_of,
    weighted_replicas,
    without_blind_removal,
)
from autoscale.policies.service_rate import ServiceRate
from autoscale.types import Decision, Shown, Snapshot
from kvtransfer.strict_config import StrictConfig
from kvtransfer.topology import Role

# Largest number of points of a trend that the memory holds; with more ticks in trend_s, some are left out.
_MOST_POINTS = 64


class QueueDepthConfig(StrictConfig):
    """Service rates of one replica, the time to serve a queue, and the time for which arrivals are extrapolated.

    In the law that the chapter prints, ``target_queue`` is 0 and ``burn_down_s`` is the promised wait. In its code they
    are 40 requests and 3 s. Its controllers (Exercise 23.4.2) are: reactive (the defaults), headroom (``headroom_frac``
    0.4), predictive (``lead_s`` equal to a start), and headroom with predictive.
    """

    kind: Literal["queue_depth"] = "queue_depth"
    prefill_requests_per_s: float | None = Field(None, gt=0.0)
    """Requests per second of one prefill replica of the first group at your objective (mu). If busy replicas are
    observed to serve fewer, that number holds instead."""
    decode_requests_per_s: float | None = Field(None, gt=0.0)
    """Requests per second of one decode replica of the first group at your objective (mu). If replicas are observed to
    serve fewer, with a queue or at the TPOT objective, that number holds instead."""
    target_queue: float = Field(0.0, ge=0.0, description="Requests that may wait without more replicas (Q*).")
    burn_down_s: float = Field(1.0, gt=0.0)
    """Time in which the queue beyond target_queue must be served, seconds."""
    headroom_frac: float = Field(0.0, ge=0.0, le=10.0, description="Standing spare: 0.4 adds 40 % to the replicas.")
    lead_s: float = Field(0.0, ge=0.0)
    """Time for which arrivals are extrapolated, seconds; choose the time of a start. Once starts have been observed,
    their time is taken instead. 0: no extrapolation."""
    trend_s: float = Field(60.0, gt=0.0)
    """Time over which the trend of arrivals is measured, seconds; choose several times window_s."""

    @property
    def rates(self) -> dict[Role, float | None]:
        """The configured service rate of each role, requests/s; ``None``: the ratio sizes it."""
        return {Role.PREFILL: self.prefill_requests_per_s, Role.DECODE: self.decode_requests_per_s}

    @model_validator(mode="after")
    def _check_rates(self) -> "QueueDepthConfig":
        if self.prefill_requests_per_s is None and self.decode_requests_per_s is None:
            raise ValueError(
                "give prefill_requests_per_s, decode_requests_per_s or both: what one replica serves at your objective"
            )
        return self


def replicas_for_queue(arrivals_per_s: float, queue: float, served_per_s: float, config: QueueDepthConfig) -> int:
    """``ceil((lambda + max(0, Q - Q*) / burn_down_s) / mu)``, times one plus the headroom, rounded up again.

    lambda: ``arrivals_per_s``. Q: ``queue``, requests. Q*: ``target_queue``. mu: ``served_per_s`` of one replica.

    Source: the queue-depth chapter, section 23.4.
    """
    demand_per_s = arrivals_per_s + max(0.0, queue - config.target_queue) / config.burn_down_s
    return math.ceil(math.ceil(demand_per_s / served_per_s) * (1.0 + config.headroom_frac))


class QueueDepth(Policy[QueueDepthConfig]):
    """Replicas of each role with a configured service rate, from arrivals per second and the waiting requests."""

    is_fit_for_aggregated = True
    is_fit_for_pooling = True

    def decide(self, snapshot: Snapshot) -> Decision:
        """Size each role that has a service rate by its queue, in its engines and at the endpoint.

        The implied wait is Q / (n mu), the time in which n running standard replicas serve the queue Q. A role without
        a service rate gets 0 here, and the guard sizes it by the ratio.
        """
        arrivals = snapshot.traffic.requests_per_s
        if arrivals is None:
            return Decision(wanted=None, reason="no arrivals were observed")
        lead_s = self._lead_s(snapshot)
        expected, trend = self._forecast(snapshot, arrivals, lead_s)
        memory = {**snapshot.state.memory, **(trend or {})}
        wanted, present = dict.fromkeys(Role, 0.0), present_replicas(snapshot)
        shown, drifts = [], list[str]()
        for role, configured in self._config.rates.items():
            if configured is None or not any(pool.key.role is role for pool in snapshot.pools):
                continue
            learned, learned_memory = self._learned(snapshot, role)
            memory |= learned_memory
            # A configured rate below the observed one is left as it is: it may leave room for the objective.
            rate = min(configured, learned or math.inf)
            replicas = weighted_replicas(snapshot, role)
            queues, running = [replica.waiting_requests for replica, _ in replicas], weight_of(replicas)
            if not queues or None in queues:
                return Decision(wanted=None, reason=f"not every {role} replica reports its queue")
            # A request that waits at the endpoint will need both roles.
            queue = math.fsum(requests or 0.0 for requests in queues) + queue_at_endpoint(snapshot)
            wanted[role] = replicas_for_queue(expected, queue, rate, self._config)
            if running < present[role] - EPSILON_REPLICAS:
                # Replicas that start will serve a part of the queue. Until then it adds none, only arrivals do.
                for_arrivals = replicas_for_queue(expected, 0.0, rate, self._config)
                wanted[role] = min(wanted[role], max(for_arrivals, present[role]))
            shown.append(Shown(name=f"{role}_queue", value=queue, target=self._config.target_queue))
            wait_s = queue / (running * rate)
            shown.append(Shown(name=f"{role}_implied_wait_s", value=wait_s, target=self._config.burn_down_s))
            if learned is not None:
                shown.append(Shown(name=f"{role}_service_rate", value=learned, target=configured))
                if abs(learned - configured) > DRIFT_FRAC * configured:
                    drift = f"a {role} replica serves {learned:.3g} requests/s, configured are {configured:.3g}"
                    drifts.append(f"; {drift}")
        wanted = without_blind_removal(wanted, snapshot)
        queues_text = ", ".join(f"{entry.name} {entry.value:.4g}" for entry in shown)
        forecast_text = f", {expected:.4g} in {lead_s:.4g} s" if trend is not None else ""
        reason = f"{arrivals:.4g} requests/s{forecast_text}; {queues_text}{''.join(drifts)}"
        return Decision(wanted=wanted, reason=reason, shown=tuple(shown), memory=memory)

    def _learned(self, snapshot: Snapshot, role: Role) -> tuple[float | None, dict[str, tuple[float, ...]]]:
        """The observed service rate of a role, requests/s (``None``: none was observed), and the policy's memory of it.

        For decode there are two rates, one at the TPOT objective and one with a queue; the lower one counts.
        """
        state, now_s = snapshot.state, snapshot.now_s
        busy = ServiceRate.of(state.memory, role, now_s).observed(snapshot, role)
        rates, memory = [busy.requests_per_s], busy.memory(role)
        if role is Role.DECODE:
            steps = DecodeRate.of(state.memory, now_s).observed(snapshot, self._slo.tpot_s)
            rates.append(steps.requests_per_s(self._slo.tpot_s, snapshot.traffic.output_tokens_mean))
            memory |= steps.memory()
        return min((rate for rate in rates if rate is not None), default=None), memory

    def _lead_s(self, snapshot: Snapshot) -> float:
        """Time for which arrivals are extrapolated: that of the slowest pool's observed starts, or else ``lead_s``.

        At most ``trend_s``: a trend says little about a longer time. A start that waits for a node may take hours.
        """
        observed_s, lead_s = snapshot.state.longest_start_s, self._config.lead_s
        return min(observed_s, self._config.trend_s) if lead_s and observed_s is not None else lead_s

    def _forecast(
        self, snapshot: Snapshot, arrivals: float, lead_s: float
    ) -> tuple[float, Mapping[str, tuple[float, ...]] | None]:
        """Arrivals per second ``lead_s`` from now by the trend, at least the present ones; and the trend's memory.

        Without ``lead_s``, or if the traffic was observed only in part, the memory is ``None`` and stays as it is. A
        line through points of less than half of ``trend_s`` is mostly noise, so it is not extrapolated.
        """
        config, memory, now_s = self._config, snapshot.state.memory, snapshot.now_s
        if not lead_s or not snapshot.traffic.is_whole:  # partial traffic would look like a fall
            return arrivals, None
        series = zip(memory.get("arrivals_at_s", ()), memory.get("arrivals_per_s", ()), strict=False)
        past = [(at, rate) for at, rate in series if now_s - config.trend_s <= at < now_s]
        points = [*past, (now_s, arrivals)]
        is_new_stored = not past or now_s - past[-1][0] >= config.trend_s / _MOST_POINTS
        stored = points if is_new_stored else past
        trend = {"arrivals_at_s": tuple(at for at, _ in stored), "arrivals_per_s": tuple(rate for _, rate in stored)}
        if now_s - points[0][0] < config.trend_s / 2:
            return arrivals, trend
        slope, level = linear_regression([at - now_s for at, _ in points], [rate for _, rate in points])
        return max(arrivals, level + slope * lead_s), trend
