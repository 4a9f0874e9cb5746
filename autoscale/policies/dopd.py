"""DOPD: sizes both roles at the optimal P/D ratio for forecast arrivals and lengths (DOPD Algorithm 2).

At the end of each *interval* it makes a *plan*: the wanted replicas of both roles, for the snapshot's forecast of the
load (``autoscale.forecast``). In an *overload* it adds replicas at once.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import Field

from autoscale.engines.capacity import decode_tokens_per_s
from autoscale.engines.lengths import Lengths, MeanRequest
from autoscale.engines.optimal_ratio import DecodeMemoryConfig, ratio_for
from autoscale.headcount import EPSILON_REPLICAS, Census
from autoscale.load_forecast import LoadForecast
from autoscale.policies.policy import (
    ProfiledConfig,
    ProfiledPolicy,
    observed_lengths,
    present_replicas,
    queue_at_endpoint,
    ratio_of,
    weighted_replicas,
    without_blind_removal,
)
from autoscale.ratio import PdRatio
from autoscale.slo import SloConfig
from autoscale.types import Decision, Shown, Snapshot
from kvtransfer.topology import Role

# Prefix of the names of the policy's series in the memory; no other policy reads them.
_PREFIX = "dopd_"


class DopdConfig(ProfiledConfig):
    """The interval, the planned share of decode's concurrency, and the thresholds of an overload.

    The paper gives no numbers for the thresholds. DOPD extends Dynamo, so the defaults are those of Dynamo's planner.
    """

    kind: Literal["dopd"] = "dopd"
    interval_s: float = Field(100.0, gt=0.0, description="Time between two adjustments (T: 'hundreds of seconds').")
    concurrency_frac: float = Field(0.9, gt=0.0, le=1.0)
    """Planned share of decode's highest concurrency (section IV-B)."""
    queue_requests: float = Field(5.0, gt=0.0)
    """Waiting requests per prefill replica above which prefill is overloaded (SIZE_QUEUE)."""
    kv_cap_frac: float = Field(0.9, gt=0.0, le=1.0)
    """Used share of decode's KV above which decode is overloaded (KV_CAP)."""
    decode_memory: DecodeMemoryConfig | None = None
    """GPU memory, by which the paper bounds decode's concurrency. Left out, the bounds are those of the profile."""

    @property
    def uses_forecast(self) -> bool:
        """It does: Algorithm 2, line 27."""
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Past:
    """The policy's memory between two ticks."""

    began_s: float  # begin of the running interval
    plan: tuple[float, ...] = ()  # wanted prefill and decode replicas; empty: no plan holds

    @classmethod
    def of(cls, memory: Mapping[str, tuple[float, ...]], now_s: float) -> "_Past":
        """Read a snapshot's memory. A begin in the future does not count: the clock was set back."""
        (began_s,) = memory.get(f"{_PREFIX}began_s", (now_s,))
        return cls(began_s=min(began_s, now_s), plan=memory.get(f"{_PREFIX}plan", ()))

    def memory(self) -> dict[str, tuple[float, ...]]:
        """Write it as the memory of a decision."""
        return {f"{_PREFIX}began_s": (self.began_s,), f"{_PREFIX}plan": self.plan}


class Dopd(ProfiledPolicy[DopdConfig]):
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

    def decide_with_observed(self, snapshot: Snapshot) -> Decision:
        """At the end of each interval, replicas for the next one. In an overload, more replicas at once.

        After an overload the counts stay until the interval ends.
        """
        present = present_replicas(snapshot)
        past = _Past.of(snapshot.state.memory, snapshot.now_s)
        remaining_s = past.began_s + self._config.interval_s - snapshot.now_s
        if snapshot.traffic.requests_per_s is None:
            reason = "no arrivals were observed"
        elif remaining_s > 0.0:
            reason = f"the next adjustment is in {remaining_s:.0f} s"
        elif (forecast := snapshot.forecast) is None:
            reason = "there is no forecast: no step with arrivals and their lengths has ended lately"
        else:
            past, reason = self._adjusted(forecast, snapshot)
        plan = past.plan or tuple(present[role] for role in Role)
        wanted = dict(zip(Role, plan, strict=True))
        if (urgent := self._overload(snapshot, past, wanted)) is not None:
            return urgent
        wanted = without_blind_removal(wanted, snapshot)
        is_planned = bool(past.plan) and snapshot.traffic.requests_per_s is not None
        return Decision(
            wanted=wanted if is_planned else None, reason=reason, ratio=ratio_of(wanted, snapshot), memory=past.memory()
        )

    def _adjusted(self, forecast: LoadForecast, snapshot: Snapshot) -> tuple[_Past, str]:
        """The memory with a plan for the next interval, and the reason (Algorithm 2, lines 24-35).

        The forecast mean lengths scale the distribution of the lengths that are observed now. Tokens in prefix caches
        cost no time.
        """
        config = self._config
        rate, inputs, outputs = (each.value for each in forecast.series.values())
        inputs, outputs = max(1.0, inputs), max(1.0, outputs)  # lengths must be above 0
        lengths = (observed_lengths(snapshot.traffic) or Lengths.fixed(inputs, outputs)).scaled(inputs, outputs)
        cached_frac = snapshot.traffic.cached_frac or 0.0
        request = MeanRequest.of(lengths, config.prefill, cached_frac)
        best = ratio_for(request, config.decode, tpot_s=self._slo.tpot_s, memory=config.decode_memory)
        # Lines 32 and 33. r_next is ``in_flight``: the requests on decode if batches are full (Little's law). R_opt is
        # ``prefill_per_decode`` (Eq. 14).
        in_flight = rate * outputs * best.decode_step_s
        decode = rate / (config.concurrency_frac * best.decode_requests_per_s)
        prefill = best.prefill_per_decode * decode
        if self._ratio.is_aggregated:
            # Time of the engine for prompts, for each output token.
            prompt_s = MeanRequest.of(lengths, config.decode, cached_frac).prefill_s / outputs
            capacity = decode_tokens_per_s(config.decode, lengths.context_tokens, self._slo.tpot_s, prompt_s)
            prefill, decode = 0.0, rate * outputs / (config.concurrency_frac * capacity)
        notes = forecast.fallbacks
        if best.is_extrapolated:
            notes.append("beyond what the profiles cover")
        text = f"{forecast}, {in_flight:.3g} in flight, optimal P/D ratio {best.prefill_per_decode:.3g}"
        reason = "; ".join((text, f"decode is limited by the {best.decode_limit}", *notes))
        return _Past(began_s=snapshot.now_s, plan=(prefill, decode)), reason

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
