"""DOPD: sizes both roles at the optimal P/D ratio for forecast arrivals and lengths (DOPD Algorithm 2).

At the end of each *interval* it makes a *plan*: the wanted replicas of both roles for the next interval. In an
*overload* it adds replicas at once.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import Field

from autoscale.engines.capacity import decode_tokens_per_s
from autoscale.engines.lengths import Lengths, MeanRequest
from autoscale.engines.optimal_ratio import DecodeMemoryConfig, optimal_ratio
from autoscale.forecast import ArimaConfig, CorrectionConfig, ForecastConfig
from autoscale.headcount import EPSILON_REPLICAS, Census
from autoscale.policies.policy import (
    Policy,
    ProfiledConfig,
    observed_lengths,
    present_replicas,
    queue_at_endpoint,
    ratio_of,
    weighted_replicas,
    without_blind_removal,
)
from autoscale.ratio import PdRatio
from autoscale.slo import SloConfig
from autoscale.types import Decision, Shown, Snapshot, Traffic
from kvtransfer.topology import Role

# Prefix of the names of the policy's series in the memory; no other policy reads them.
_PREFIX = "dopd_"
# The three series that are forecast.
_SERIES = ("requests_per_s", "input_tokens", "output_tokens")
# The sums in ``_Past.interval`` before the first observation.
_NO_SUMS = (0.0,) * 6


class DopdConfig(ProfiledConfig):
    """The interval, the forecasts, the planned share of decode's concurrency, and the thresholds of an overload.

    The paper gives no numbers for the thresholds. DOPD extends Dynamo, so the defaults are those of Dynamo's planner.
    """

    kind: Literal["dopd"] = "dopd"
    interval_s: float = Field(100.0, gt=0.0, description="Time between two adjustments (T: 'hundreds of seconds').")
    forecast: ForecastConfig = ArimaConfig()
    correction: CorrectionConfig = CorrectionConfig()
    history_points: int = Field(50, ge=1, le=1000, description="Number of remembered intervals; Dynamo's window.")
    concurrency_frac: float = Field(0.9, gt=0.0, le=1.0)
    """Planned share of decode's highest concurrency (section IV-B)."""
    queue_requests: float = Field(5.0, gt=0.0)
    """Waiting requests per prefill replica above which prefill is overloaded (SIZE_QUEUE)."""
    kv_cap_frac: float = Field(0.9, gt=0.0, le=1.0)
    """Used share of decode's KV above which decode is overloaded (KV_CAP)."""
    decode_memory: DecodeMemoryConfig | None = None
    """GPU memory, by which the paper bounds decode's concurrency. Left out, the bounds are those of the profile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Past:
    """The policy's memory between two ticks."""

    # The running interval: its begin, the number of its ticks with observed arrivals, and the sum of their rates. Then,
    # for input and for output tokens: the sum of the rates of ticks with a mean length, and the sum of rate x length.
    interval: tuple[float, ...]
    points: tuple[tuple[float, ...], ...] = ()  # end of each earlier interval, and its means (as in _SERIES)
    forecasts: tuple[float, ...] = ()  # the last forecast of each of _SERIES, not corrected
    factors: tuple[float, ...] = (1.0,) * len(_SERIES)  # by which the forecasts of _SERIES are divided
    plan: tuple[float, ...] = ()  # wanted prefill and decode replicas; empty: no plan holds

    @classmethod
    def of(cls, memory: Mapping[str, tuple[float, ...]], now_s: float) -> "_Past":
        """Read a snapshot's memory. Times in the future are left out: the clock was set back."""
        fresh = cls(interval=(now_s, *_NO_SUMS))
        interval = memory.get(f"{_PREFIX}interval", fresh.interval)
        columns = [memory.get(f"{_PREFIX}{name}", ()) for name in ("at_s", *_SERIES)]
        return cls(
            interval=interval if interval[0] <= now_s else fresh.interval,
            points=tuple(point for point in zip(*columns, strict=True) if point[0] < now_s),
            forecasts=memory.get(f"{_PREFIX}forecasts", ()),
            factors=memory.get(f"{_PREFIX}factors", fresh.factors),
            plan=memory.get(f"{_PREFIX}plan", ()),
        )

    def memory(self) -> dict[str, tuple[float, ...]]:
        """Write it as the memory of a decision."""
        columns = zip(*self.points, strict=True) if self.points else [()] * (1 + len(_SERIES))
        series = dict(zip(("at_s", *_SERIES), columns, strict=True))
        state = {"interval": self.interval, "forecasts": self.forecasts, "factors": self.factors, "plan": self.plan}
        return {f"{_PREFIX}{name}": values for name, values in (series | state).items()}

    def with_traffic(self, traffic: Traffic) -> "_Past":
        """A copy with the traffic of one more tick."""
        rate = traffic.requests_per_s
        if rate is None or not traffic.is_whole:
            return self
        since_s, *sums = self.interval
        added = [1.0, rate]
        for length in (traffic.input_tokens_mean, traffic.output_tokens_mean):
            added += [0.0, 0.0] if length is None else [rate, rate * length]
        return replace(self, interval=(since_s, *(a + b for a, b in zip(sums, added, strict=True))))

    def means(self) -> tuple[float, ...] | None:
        """Mean rate, input tokens and output tokens of the interval; ``None``: one of them is not known.

        The rate is known if it was observed in this interval. A length that was not observed is that of the interval
        before.
        """
        _, ticks, rates, input_rates, inputs, output_rates, outputs = self.interval
        earlier_input, earlier_output = self.points[-1][2:] if self.points else (None, None)
        input_tokens = inputs / input_rates if input_rates > 0.0 else earlier_input
        output_tokens = outputs / output_rates if output_rates > 0.0 else earlier_output
        if not ticks or input_tokens is None or output_tokens is None:
            return None
        return rates / ticks, input_tokens, output_tokens


class Dopd(Policy[DopdConfig]):
    """Replicas of both roles from forecasts of arrivals per second and of lengths, by the engines' profiles.

    In a service without prefill, decode replicas do the work of both roles (``capacity.decode_batch``).
    Source: DOPD Algorithm 2; the ratio is that of section IV (Eq. 14, ``engines.optimal_ratio``).
    """

    is_fit_for_aggregated = True
    has_own_ratio = True

    def __init__(self, config: DopdConfig, *, ratio: PdRatio, slo: SloConfig) -> None:
        super().__init__(config, ratio=ratio, slo=slo)
        if config.decode_memory is not None:
            config.decode_memory.readable_bytes(slo.tpot_s)  # raises a ValueError if the objective is too short

    def decide(self, snapshot: Snapshot) -> Decision:
        """At the end of each interval, replicas for the next one. In an overload, more replicas at once.

        After an overload the counts stay until the interval ends.
        """
        present = present_replicas(snapshot)
        past = _Past.of(snapshot.state.memory, snapshot.now_s).with_traffic(snapshot.traffic)
        remaining_s = past.interval[0] + self._config.interval_s - snapshot.now_s
        if snapshot.traffic.requests_per_s is None:
            reason = "no arrivals were observed"
        elif remaining_s > 0.0:
            reason = f"the next adjustment is in {remaining_s:.0f} s"
        elif (means := past.means()) is None:
            reason = "arrivals and their lengths were not observed yet"
        else:
            past, reason = self._adjusted(past, means, snapshot)
        plan = past.plan or tuple(present[role] for role in Role)
        wanted = dict(zip(Role, plan, strict=True))
        if (urgent := self._overload(snapshot, past, wanted)) is not None:
            return urgent
        wanted = without_blind_removal(wanted, snapshot)
        is_planned = bool(past.plan) and snapshot.traffic.requests_per_s is not None
        return Decision(
            wanted=wanted if is_planned else None, reason=reason, ratio=ratio_of(wanted, snapshot), memory=past.memory()
        )

    def _adjusted(self, past: _Past, means: tuple[float, ...], snapshot: Snapshot) -> tuple[_Past, str]:
        """The memory with a plan for the next interval, and the reason (Algorithm 2, lines 24-35).

        The forecast mean lengths scale the distribution of the lengths that are observed now. ``means``: means of the
        interval that ends now.
        """
        config, factors, now_s = self._config, past.factors, snapshot.now_s
        if past.forecasts:
            outcomes = zip(past.factors, past.forecasts, means, strict=True)
            factors = tuple(config.correction.updated(*outcome) for outcome in outcomes)
        points = (*past.points, (now_s, *means))[-config.history_points :]
        times_s, *series = zip(*points, strict=True)
        results = [config.forecast.forecast(times_s, values, config.interval_s) for values in series]
        forecasts = tuple(each.value for each in results)
        rate, inputs, outputs = (value / factor for value, factor in zip(forecasts, factors, strict=True))
        inputs, outputs = max(1.0, inputs), max(1.0, outputs)  # lengths must be above 0
        lengths = (observed_lengths(snapshot.traffic) or Lengths.fixed(inputs, outputs)).scaled(inputs, outputs)
        best = optimal_ratio(
            config.prefill, config.decode, lengths, tpot_s=self._slo.tpot_s, memory=config.decode_memory
        )
        # Lines 32 and 33. r_next is ``in_flight``: the requests on decode if batches are full (Little's law). R_opt is
        # ``prefill_per_decode`` (Eq. 14).
        in_flight = rate * outputs * best.decode_step_s
        decode = rate / (config.concurrency_frac * best.decode_requests_per_s)
        prefill = best.prefill_per_decode * decode
        if self._ratio.is_aggregated:
            # Time of the engine for prompts, for each output token.
            prompt_s = MeanRequest.of(lengths, config.decode).prefill_s / outputs
            capacity = decode_tokens_per_s(config.decode, lengths.context_tokens, self._slo.tpot_s, prompt_s)
            prefill, decode = 0.0, rate * outputs / (config.concurrency_frac * capacity)
        notes = [f"{name}: {each.fallback}" for name, each in zip(_SERIES, results, strict=True) if each.fallback]
        if best.is_extrapolated:
            notes.append("beyond what the profiles cover")
        text = f"{rate:.3g} requests/s of {inputs:.0f} + {outputs:.0f} tokens ahead, {in_flight:.3g} in flight"
        past = _Past(
            interval=(now_s, *_NO_SUMS), points=points, forecasts=forecasts, factors=factors, plan=(prefill, decode)
        )
        text = f"{text}, optimal P/D ratio {best.prefill_per_decode:.3g}"
        return past, "; ".join((text, f"decode is limited by the {best.decode_limit}", *notes))

    def _overload(self, snapshot: Snapshot, past: _Past, planned: Mapping[Role, float]) -> Decision | None:
        """More replicas if a role's load is over its threshold, else ``None`` (Algorithm 2, lines 18-23).

        It differs from the printed algorithm in two ways. There, line 22 swaps n_d and n_p. And lines 20 and 21 would
        also remove replicas of a role that is not overloaded.

        The paper's adjustPD looks at the load again only after replicas have started. So a role gets no more replicas
        here while some of its replicas start. Otherwise a growing queue would add replicas at every tick.
        """
        census = Census.of(snapshot.pools, snapshot.state)
        present = census.desired
        waiting = [each.waiting_requests or 0.0 for each, _ in weighted_replicas(snapshot, Role.PREFILL)]
        used_kv = [(each.kv_usage_frac or 0.0) * weight for each, weight in weighted_replicas(snapshot, Role.DECODE)]
        # Requests that wait on prefill, and the used KV of decode in standard replicas.
        loads = {Role.PREFILL: math.fsum(waiting) + queue_at_endpoint(snapshot), Role.DECODE: math.fsum(used_kv)}
        caps = {Role.PREFILL: self._config.queue_requests, Role.DECODE: self._config.kv_cap_frac}
        serving = {role: census.running[role] - census.withdrawn[role] for role in Role}
        are_starting = {role: serving[role] < present[role] - EPSILON_REPLICAS for role in Role}
        needed = {role: 0 if are_starting[role] else math.ceil(loads[role] / caps[role]) for role in Role}
        if self._ratio.is_aggregated:  # a queue there is a need of decode
            needed = {Role.PREFILL: 0, Role.DECODE: 0 if are_starting[Role.DECODE] else max(needed.values())}
        if all(needed[role] <= present[role] + EPSILON_REPLICAS for role in Role):
            return None
        wanted = {role: max(float(needed[role]), present[role], planned[role]) for role in Role}
        names = {Role.PREFILL: "prefill_queue_requests", Role.DECODE: "decode_kv_replicas"}
        shown = tuple(Shown(name=names[role], value=loads[role], target=caps[role] * present[role]) for role in Role)
        return Decision(
            wanted=wanted,
            reason="overload: " + ", ".join(f"{each.name} {each.value:.4g} for {each.target:.4g}" for each in shown),
            ratio=ratio_of(wanted, snapshot),
            is_step=True,
            is_urgent=True,
            shown=shown,
            memory=replace(past, plan=()).memory(),  # without a plan the counts stay until the interval ends
        )
