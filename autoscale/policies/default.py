"""Tandem's own policy: sizes both roles by engine profiles, for the load after one start; latency is a safety net.

A *load* is a number of replicas: those that it keeps busy all the time, by the profiles. There are three loads (see
``_LOADS``). *Spare* replicas are for what chance adds to a load, and for surprises. A *surprise* is the load less the
forecast of it. A *burst* is a rise or fall of the prefill load that is too fast for replicas to be added in time.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from pydantic import Field

from autoscale.engines.capacity import (
    decode_batch,
    decode_tokens_per_s,
    handoff_engines,
    prefill_engines,
    prefill_engines_for,
)
from autoscale.engines.profile import EngineProfile
from autoscale.policies.policy import (
    ProfiledConfig,
    ProfiledPolicy,
    is_latency_current,
    present_replicas,
    ratio_of,
    replicas_of,
    weighted_replicas,
)
from autoscale.types import Decision, Snapshot
from kvtransfer.cost import CROSS_SWITCH_FRAC
from kvtransfer.topology import LinkTier, Role

# Fewest observations of a load, one per tick, through which a line is drawn. Before that, the largest observation
# counts. The value's reason is not recorded. With fewer points, chance looks like a rise; with more, the first rise
# shows later.
_LEAST_POINTS = 4
# Used share of its KV above which a decode replica counts as full: a request with a long prompt waits for KV there. The
# value's reason is not recorded. With a larger share, waits for decode's KV look like waits for prefill; with a smaller
# one, KV stays unused.
_FULL_KV_FRAC = 0.9
# The role that each load keeps busy. The loads are prompts, output tokens, and the KV that decode pulls.
_LOADS = {"prefill": Role.PREFILL, "decode": Role.DECODE, "handoff": Role.DECODE}
# The series in the policy's memory, each with a value per tick: for each load its value, its forecast (ahead) and its
# surprise; for each role the needed replicas (wanted).
_SERIES = (
    "at_s",
    *_LOADS,
    *(f"{what}_{name}" for what in ("ahead", "surprise") for name in _LOADS),
    *(f"wanted_{role}" for role in Role),
)
# Time after the first tick in the history, seconds: forecasts of this time give no surprise. Otherwise the whole load
# of a service that has just begun would be a surprise. The value's reason is not recorded. A larger one shows real
# surprises later.
_UNJUDGED_S = 60.0
# Mean age of the events that a tick observes, seconds: half of the default window_s of 20 s. An observed load is as old
# as this.
_OBSERVATION_AGE_S = 10.0
# Longest time for which replicas stay (stay_starts), as a share of history_s. With 1 and long starts, replicas would
# hardly ever leave, since the oldest tick in the history is mostly younger than history_s. The description of
# stay_starts repeats the value.
_STAY_FRAC = 0.9
# Longest rise or fall of a burst, in starts of prefill: one to observe it, one to ask for replicas, one until they
# serve. The description of burst_frac repeats the value.
_BURST_STARTS = 3.0


class DefaultConfig(ProfiledConfig):
    """How full replicas may be, how many are spare, and for how long the load is remembered."""

    kind: Literal["default"] = "default"
    prefill_busy_frac: float = Field(0.9, gt=0.0, le=1.0)
    """Largest planned share of time in which prefill replicas compute, or in which decode replicas pull KV."""
    decode_busy_frac: float = Field(0.95, gt=0.0, le=1.0)
    """Largest planned share of decode replicas' batch."""
    prefill_spare: float = Field(0.8, ge=0.0)
    """Spare replicas for prompts, and for KV that decode pulls, as a multiple (beta) of the square root of the replicas
    that this load keeps busy."""
    decode_spare: float = Field(4.0, ge=0.0)
    """Spare decode replicas, in standard deviations of the number of requests on decode, or of their KV."""
    history_s: float = Field(600.0, gt=0.0, le=3600.0, description="Time for which the load is remembered, seconds.")
    memory_s: float = Field(60.0, gt=0.0)
    """Age at which an observation has about a third (1/e) of the weight of the newest one, seconds."""
    ahead_frac: float = Field(0.75, ge=0.0, le=2.0)
    """Time for which a rise of prompts, or of KV that decode pulls, is extrapolated, as a share of the role's start."""
    net_frac: float = Field(0.1, ge=0.0, le=1.0)
    """Share of a role's replicas that is added while a latency misses its objective, at least one replica."""
    stay_starts: float = Field(4.0, ge=0.0)
    """Time for which each role keeps the most replicas that its load needed, in start times of the role. It is at most
    0.9 of history_s. No replica leaves before the load has been observed for that time."""
    burst_frac: float = Field(0.7, ge=0.0)
    """Least rise or fall of the prefill load within 3 start times of prefill that is a burst, as a share of the largest
    prefill load in history_s. For history_s after a burst, each role keeps replicas for burst_work_frac of its work."""
    burst_work_frac: float = Field(0.88, gt=0.0, le=1.0)
    """Share of the work of the last history_s for which replicas stay after a burst; older work weighs less."""
    starts_by_forecast: bool = False
    """Whether replicas also start for the forecast of requests (autoscale.forecast), while its errors are smaller than
    those of the last value. It never removes a replica. On the public traces it changed no count (decision 270)."""

    @property
    def uses_forecast(self) -> bool:
        """It does if replicas start by it."""
        return self.starts_by_forecast


class _Load(NamedTuple):
    """One of ``_LOADS`` now."""

    replicas: float  # number of replicas that it keeps busy
    unevenness: float  # variance of this number by chance, divided by the number


class Default(ProfiledPolicy[DefaultConfig]):
    """Replicas of both roles from arrivals per second and mean lengths, by the engines' profiles.

    Source: square-root staffing, Halfin and Whitt, "Heavy-traffic limits for queues with many exponential servers"
    (1981).
    """

    is_fit_for_aggregated = True
    has_own_ratio = True

    def decide_with_observed(self, snapshot: Snapshot) -> Decision:
        """Replicas for the load that is expected after one start, and spare replicas for chance.

        The fewer replicas are busy, the larger is the share of spare ones. The number of requests on decode is taken as
        Poisson distributed. The standard deviation of the requests' lengths is taken as equal to the mean length.
        """
        traffic = snapshot.traffic
        rate = traffic.requests_per_s
        if rate is None or not traffic.is_whole:
            return Decision(wanted=None, reason="what arrived was not observed, or not all of it")
        if rate > 0.0 and (traffic.input_tokens_mean is None or traffic.output_tokens_mean is None):
            return Decision(wanted=None, reason="no request has ended yet: the length of answers is not known")
        loads, present = self._loads(snapshot), present_replicas(snapshot)
        history = _History.of(snapshot.state.memory, snapshot.now_s, self._config)
        growth = self._growth(snapshot, rate)
        wanted = self._replicas_to_keep(history, self._needed(history, loads, growth), present)
        decode = max(loads["decode"].replicas, loads["handoff"].replicas)
        prefill_text = "" if self._ratio.is_aggregated else f"{loads['prefill'].replicas:.2g}P"
        reason = f"{rate:.3g} requests/s keep {prefill_text}{decode:.2g}D busy"
        if growth > 1.0:
            reason += f", {snapshot.forecast} are forecast"
        if (late := self._late_role(snapshot)) is not None:
            role, why = late
            wanted[role] = max(wanted[role], present[role] + max(1.0, self._config.net_frac * present[role]))
            reason += f"; {why}: {role} gets more"
        return Decision(wanted=wanted, ratio=ratio_of(wanted, snapshot), memory=history.series, reason=reason)

    def _growth(self, snapshot: Snapshot, rate: float) -> float:
        """Forecast requests per present one, at least 1; 1 if the forecast is not used, or not proven."""
        forecast = snapshot.forecast
        if not self._config.starts_by_forecast or forecast is None or not forecast.requests_per_s.is_proven or not rate:
            return 1.0
        return max(1.0, forecast.requests_per_s.value / rate)

    def _needed(self, history: "_History", loads: Mapping[str, _Load], growth: float) -> dict[Role, float]:
        """Replicas of each role for the expected load, spare ones included. Adds this tick's values to the history.

        ``growth``: forecast requests per present one.
        """
        config, needed = self._config, dict.fromkeys(Role, 0.0)
        for name, role in _LOADS.items():
            history.add(name, loads[name].replicas)
            busy_frac, spare_factor = config.prefill_busy_frac, config.prefill_spare
            horizon_s = config.start_s(role)
            if name == "decode":
                # Decode's load is not extrapolated. It rises later than arrivals do, since requests stay for the time
                # of their answers. And while requests gather, the short ones end first. So the mean length of the
                # answers that have ended grows, which looks like a rise of the load.
                busy_frac, spare_factor, horizon_s = config.decode_busy_frac, config.decode_spare, 0.0
            level, slope = _line(history.times, np.array(history.series[name]), config.memory_s)
            ahead = max(0.0, level + slope * horizon_s * config.ahead_frac)
            if name != "decode" and growth > 1.0:
                ahead = max(ahead, growth * loads[name].replicas)
            spare = spare_factor * math.sqrt(loads[name].unevenness * ahead)
            # The surprise compares with the forecast that was made one start before the observed events: at that time
            # replicas could still be started for them.
            expected = history.expected(name, config.start_s(role) + _OBSERVATION_AGE_S)
            history.add(f"surprise_{name}", 0.0 if expected is None else max(0.0, level) - expected)
            history.add(f"ahead_{name}", ahead)
            largest_surprise = max(0.0, *history.series[f"surprise_{name}"])
            # Chance and surprise are independent, so their squares add up.
            spare = math.hypot(spare, largest_surprise)
            needed[role] = max(needed[role], ahead / busy_frac, ahead + spare)
        return needed

    def _replicas_to_keep(
        self, history: "_History", needed: Mapping[Role, float], present: Mapping[Role, float]
    ) -> dict[Role, float]:
        """The most replicas that were needed within stay_starts; after a burst, those for most remembered work."""
        config, at_s = self._config, history.series["at_s"]
        within_s = _BURST_STARTS * config.start_s(Role.PREFILL)
        has_burst = _burst_frac(history.times, np.array(history.series["prefill"]), within_s) > config.burst_frac
        to_keep = {}
        for role in Role:
            history.add(f"wanted_{role}", needed[role])
            stay_s = min(config.stay_starts * config.start_s(role), _STAY_FRAC * config.history_s)
            since_s = at_s[-1] - stay_s
            if has_burst:  # replicas that are added for a burst serve too late, so those of the last bursts stay
                to_keep[role] = self._replicas_for_bursts(history, role)
            else:
                to_keep[role] = max(history.series[f"wanted_{role}"][bisect_left(at_s, since_s) :])
            if at_s[0] > since_s:  # the needs before the history are unknown, so no replica leaves
                to_keep[role] = max(to_keep[role], present[role])
        return to_keep

    def _replicas_for_bursts(self, history: "_History", role: Role) -> float:
        """The most replicas that one of the role's loads needs: for its present value, or for its remembered work."""
        config, most = self._config, 0.0
        for name in (name for name, its_role in _LOADS.items() if its_role is role):
            # No spare: the observed loads already contain what chance added.
            for_work = _replicas_for_work(history.times, np.array(history.series[name]), config)
            busy_frac = config.decode_busy_frac if name == "decode" else config.prefill_busy_frac
            most = max(most, max(history.series[name][-1], for_work) / busy_frac)
        return most

    def _loads(self, snapshot: Snapshot) -> dict[str, _Load]:
        """The present loads.

        A long prompt costs more than its share of the tokens. So the cost of prefill is the mean cost over the
        distribution of lengths. Without it, the cost is computed as if all prompts had the weighted mean length, with
        the same tokens per second. Tokens in prefix caches cost nothing.
        """
        config, traffic, tpot_s = self._config, snapshot.traffic, self._slo.tpot_s
        rate, inputs, outputs = (
            value or 0.0 for value in (traffic.requests_per_s, traffic.input_tokens_mean, traffic.output_tokens_mean)
        )
        context_tokens = inputs + outputs / 2
        weighted_inputs = max(inputs, traffic.input_tokens_weighted_mean or 0.0)
        prompt_unevenness = weighted_inputs / inputs if inputs else 1.0  # 1: all prompts are equally long
        cached_frac = traffic.cached_frac or 0.0
        engine = config.decode if self._ratio.is_aggregated else config.prefill  # computes the prompts
        if traffic.input_lengths:
            # The lengths are of prompts that reached decode. Admission refuses long prompts first, so the offered ones
            # are longer. The lengths are multiplied, so that their mean is the offered one.
            reached = math.fsum(tokens * share for tokens, share in traffic.input_lengths)
            longer = inputs / reached if inputs and reached else 1.0
            lengths = [(tokens * longer, share) for tokens, share in traffic.input_lengths]
            prefill = prefill_engines_for(engine, rate, lengths, cached_frac)
        else:
            prefill = prefill_engines(engine, rate / prompt_unevenness, weighted_inputs, cached_frac)
        # Before any KV was pulled, the link is taken as that of the profile, or as a part of it across switches.
        is_across_switches = any(pool.limits.link_tier is LinkTier.S2 for pool in snapshot.pools)
        is_reduced = is_across_switches and not snapshot.state.links
        handoff = handoff_engines(config.decode, rate, inputs) / (CROSS_SWITCH_FRAC if is_reduced else 1.0)
        prompt_s = 0.0  # time of prompts on an engine for each output token
        if self._ratio.is_aggregated:  # its engines compute prompts too, and no KV is handed over
            prompt_s, handoff = prefill / (rate * outputs) if rate * outputs else 0.0, 0.0
        in_progress, in_progress_tokens = _load_in_progress(snapshot, config.decode, context_tokens, tpot_s, prompt_s)
        # Long answers come with long prompts. The contexts of requests in progress show that, the mean lengths of
        # arrivals do not. With the means, ``arriving`` would be too low. It decides while each decode replica has few
        # requests, so decode would then lose too many replicas.
        arriving = rate * outputs / decode_tokens_per_s(config.decode, in_progress_tokens, tpot_s, prompt_s)
        # Share of a decode replica that one request takes: of the batch, or of the KV if that is more.
        batch = decode_batch(config.decode, context_tokens, tpot_s, prompt_s)
        request_frac = max(1.0 / batch, (weighted_inputs + outputs / 2) / config.decode.kv_tokens)
        return {
            "prefill": _Load(prefill, 1.0),  # routers distribute prompts by tokens, so lengths do not add to chance
            # The variance is that of the number of requests (Poisson), and as much again for their lengths.
            "decode": _Load(max(arriving, in_progress), 2.0 * request_frac),
            "handoff": _Load(handoff, prompt_unevenness),
        }

    def _late_role(self, snapshot: Snapshot) -> tuple[Role, str] | None:
        """The role that needs more replicas, and the latency that misses its objective; ``None``: no latency does.

        It is also ``None`` until latencies show the effect of the last added replicas.
        """
        latency, slo = snapshot.latency, self._slo
        if slo.is_met(latency) or not is_latency_current(snapshot):
            return None
        if latency.tpot_s is not None and latency.tpot_s > slo.tpot_s:
            return Role.DECODE, f"TPOT is {latency.tpot_s:.3g} s"
        decode = replicas_of(snapshot, Role.DECODE)
        full_replicas = sum((replica.kv_usage_frac or 0.0) > _FULL_KV_FRAC for replica in decode)
        # If the KV of most decode replicas is full, prompts wait for decode and not for prefill.
        role = Role.DECODE if 2 * full_replicas > len(decode) or self._ratio.is_aggregated else Role.PREFILL
        if slo.refuses_too_many(latency):
            return role, f"{latency.refused_frac:.0%} of the requests are refused"
        return role, f"TTFT is {latency.ttft_s:.3g} s"


def _load_in_progress(
    snapshot: Snapshot, profile: EngineProfile, context_tokens: float, tpot_s: float, prompt_s: float
) -> tuple[float, float]:
    """Standard decode replicas that the requests in progress fill, and the mean context of these requests, tokens.

    Only requests that have ended show the lengths of answers, and the long ones end last. So requests in progress may
    have longer contexts than ``context_tokens``, the mean of arriving requests, and fewer of them fit a batch.
    ``prompt_s``: time of prompts on these engines for each output token, seconds.
    """
    decode = replicas_of(snapshot, Role.DECODE)
    # In KV caches of a standard replica.
    used_kv = math.fsum(
        (each.kv_usage_frac or 0.0) * weight for each, weight in weighted_replicas(snapshot, Role.DECODE)
    )
    with_kv = math.fsum((each.running_requests or 0.0) + (each.deferred_requests or 0.0) for each in decode)
    requests = with_kv + math.fsum(each.waiting_requests or 0.0 for each in decode)
    if with_kv >= 1.0 and used_kv:
        context_tokens = max(context_tokens, used_kv * profile.kv_tokens / with_kv)
    by_batch = requests / decode_batch(profile, context_tokens, tpot_s, prompt_s)
    return max(by_batch, used_kv / _FULL_KV_FRAC), context_tokens


@dataclass(slots=True)
class _History:
    """The series in the policy's memory (``_SERIES``), with the present tick."""

    series: dict[str, tuple[float, ...]]
    times: np.ndarray  # the series ``at_s``: the time of each tick

    @classmethod
    def of(cls, memory: Mapping[str, tuple[float, ...]], now_s: float, config: DefaultConfig) -> "_History":
        """The history of a snapshot, with the time of this tick. The other values of this tick are added later."""
        are_equally_long = len({len(memory.get(name, ())) for name in _SERIES}) == 1  # else another version wrote them
        past = memory.get("at_s", ()) if are_equally_long else ()
        # Points of the future are left out too: the clock was set back.
        recent = slice(bisect_left(past, now_s - config.history_s), bisect_left(past, now_s))
        series = {name: memory.get(name, ())[recent] for name in _SERIES}
        series["at_s"] = (*series["at_s"], now_s)
        return cls(series, np.array(series["at_s"]))

    def add(self, name: str, value: float) -> None:
        """Add the value of this tick to a series."""
        self.series[name] = (*self.series[name], value)

    def expected(self, name: str, ago_s: float) -> float | None:
        """The forecast that was made ``ago_s`` ago, or at the next tick after that.

        ``None``: there is no such forecast, or it is from the first ``_UNJUDGED_S``.
        """
        times, aheads = self.series["at_s"], self.series[f"ahead_{name}"]
        at = bisect_left(times, times[-1] - ago_s)
        return aheads[at] if at < len(aheads) and times[at] >= times[0] + _UNJUDGED_S else None


def _line(times: np.ndarray, values: np.ndarray, memory_s: float) -> tuple[float, float]:
    """The line through the observations: its level now, replicas, and its slope, replicas/s, at least 0.

    It is a weighted linear regression. The weight of an observation is exp(-age / memory_s).
    """
    if len(values) < _LEAST_POINTS:
        return float(values.max()), 0.0
    t = times - times[-1]
    w = np.exp(t / memory_s)
    total = w.sum()
    mean_t, mean_v = (t * w).sum() / total, (values * w).sum() / total
    t, v = t - mean_t, values - mean_v
    variance = max(1e-9 * total, (t * t * w).sum())  # above 0 if all weight is on one time
    slope = max(0.0, float((t * v * w).sum() / variance))
    return float(mean_v - slope * mean_t), slope


def _replicas_for_work(times: np.ndarray, values: np.ndarray, config: DefaultConfig) -> float:
    """The fewest busy replicas that would have carried ``burst_work_frac`` of the remembered work in time.

    ``values``: a load at each tick; its work is its sum over the ticks. The weight of work is
    exp(-age / (history_s / 2)), so the memory of one large burst fades.
    """
    work = values * np.exp((times - times[-1]) / (config.history_s / 2))
    order = np.argsort(values)
    # With as many replicas as a load, the work of all ticks with at most this load is carried in time.
    carried = np.cumsum(work[order])
    if not carried[-1]:
        return 0.0
    fewest = np.searchsorted(carried, config.burst_work_frac * carried[-1])
    return float(values[order][fewest])


def _burst_frac(times: np.ndarray, values: np.ndarray, within_s: float) -> float:
    """The largest rise or fall within ``within_s``, as a share of the largest value.

    A fall counts, since the history may begin during a burst.
    """
    # Matrices: each tick against each other one.
    changes = np.abs(values[:, None] - values)
    is_near = np.abs(times[:, None] - times) <= within_s
    return float((changes * is_near).max() / max(1e-9, values.max()))
