"""Tandem's own: what will arrive one start ahead, sized for both roles from the profile; latency as a safety net."""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from autoscale.capacity import decode_batch, decode_tokens_per_s, handoff_engines, prefill_engines
from autoscale.headcount import desired_replicas
from autoscale.policies.latency_net import has_shown_what_it_did
from autoscale.policies.profiled import ProfiledConfig
from autoscale.profile import EngineProfile
from autoscale.ratio import PdRatio
from autoscale.slo import SloConfig
from autoscale.types import Decision, ReplicaStats, Snapshot
from kvtransfer.cost import CROSS_SWITCH_FRAC
from kvtransfer.topology import LinkTier, Role

# Fewer points make no line.
_LEAST_POINTS = 4
# Beyond it a request that needs a long prompt's KV has to wait.
_FULL_KV_FRAC = 0.9
# What keeps replicas busy, and whose: prompts, output tokens, and the KV that decode pulls.
_LOADS = {"prefill": Role.PREFILL, "decode": Role.DECODE, "handoff": Role.DECODE}
_SERIES = (
    "at_s",
    *_LOADS,
    *(f"{what}_{name}" for what in ("ahead", "surprise") for name in _LOADS),
    *(f"wanted_{role}" for role in Role),
)
# Forecasts are not judged before they have seen so much: a service that fills from nothing surprises by all of it.
_FIRST_S = 60.0
# What is seen at a tick came over the window before it.
_SEEN_S = 10.0
# Of the history: a policy that waited for all of it would never have looked so long.
_STAY_FRAC = 0.9
# A load that comes at once is looked for over so many starts: until it is seen, asked for, and there.
_BURST_STARTS = 3.0


class DefaultConfig(ProfiledConfig):
    """How far to look ahead, and how full replicas may be."""

    kind: Literal["default"] = "default"
    prefill_busy_frac: float = Field(
        0.9, gt=0.0, le=1.0, description="The most of their time that they may compute, or pull KV."
    )
    decode_busy_frac: float = Field(0.95, gt=0.0, le=1.0, description="The most of their batch that may be taken.")
    prefill_spare: float = Field(
        0.8, ge=0.0, description="Replicas beyond the busy ones, times the root of their number (beta)."
    )
    decode_spare: float = Field(
        4.0, ge=0.0, description="Standard deviations of the requests, or of their KV, that must fit beyond the mean."
    )
    history_s: float = Field(600.0, gt=0.0, le=3600.0, description="How far back the load is remembered.")
    memory_s: float = Field(60.0, gt=0.0, description="In which what was seen loses two thirds of its weight.")
    ahead_frac: float = Field(
        0.75, ge=0.0, le=2.0, description="How much of a start a rise of prefill's load is followed ahead."
    )
    net_frac: float = Field(0.1, ge=0.0, le=1.0, description="How many more where a latency is beyond its objective.")
    stay_starts: float = Field(
        4.0,
        ge=0.0,
        description="The most that was wanted of a role within so many of its starts, and nine tenths of history_s at "
        "most, counts; until it has looked so long, nobody leaves.",
    )
    burst_frac: float = Field(
        0.7,
        ge=0.0,
        description="Where more than this share of the peak has come or gone within three starts of prefill, replicas "
        "stay for what came in all of history_s.",
    )
    burst_work_frac: float = Field(
        0.88, gt=0.0, le=1.0, description="The share of that work for which there are enough of them."
    )

    def stay_s(self, role: Role) -> float:
        """How long what was wanted of a role counts, seconds."""
        return min(self.stay_starts * self.start_s(role), _STAY_FRAC * self.history_s)


class Default:
    """The policy; see ``decide``."""

    def __init__(self, config: DefaultConfig, *, ratio: PdRatio, slo: SloConfig) -> None:
        self._config = config
        self._slo = slo

    def decide(self, snapshot: Snapshot) -> Decision:
        """Replicas for what will arrive one start ahead, and what chance adds to it.

        The smaller their number, the larger the share that chance may add. Source: square-root staffing, Halfin and
        Whitt, "Heavy-traffic limits for queues with many exponential servers" (1981); on decode the number of requests
        in flight is taken for Poisson with lengths that vary as much as their mean.
        """
        config, traffic, now_s = self._config, snapshot.traffic, snapshot.now_s
        rate, inputs, outputs = traffic.requests_per_s, traffic.input_tokens_mean, traffic.output_tokens_mean
        if rate is None or not traffic.is_whole:
            return Decision(wanted=None, reason="what arrived was not observed, or not all of it")
        if rate > 0.0 and (inputs is None or outputs is None):
            return Decision(wanted=None, reason="no request has ended yet: nobody knows how long answers are")
        busy, spread = self._busy(snapshot)
        memory = snapshot.state.memory
        is_ours = len({len(memory.get(name, ())) for name in _SERIES}) == 1  # and not of another version
        past = memory.get("at_s", ()) if is_ours else ()
        # In order; a clock that was set back leaves points ahead of us.
        kept = slice(bisect_left(past, now_s - config.history_s), bisect_left(past, now_s))
        series = {name: memory.get(name, ())[kept] for name in _SERIES}
        series["at_s"] = times = (*series["at_s"], now_s)
        for name in _LOADS:
            series[name] = (*series[name], busy[name])
        at_s, loads = np.array(times), {name: np.array(series[name]) for name in _LOADS}
        needed, peaks = dict.fromkeys(Role, 0.0), dict.fromkeys(Role, 0.0)
        for name, role in _LOADS.items():
            full_frac = config.decode_busy_frac if name == "decode" else config.prefill_busy_frac
            # Requests stay on decode for their answer's time, so its load comes later than they do; and while they
            # gather, those that have ended were short, which looks like a rise.
            horizon_s = 0.0 if name == "decode" else config.start_s(role)
            level, slope = _line(at_s, loads[name], config.memory_s)
            ahead = max(0.0, level + slope * horizon_s * config.ahead_frac)
            weight = config.decode_spare if name == "decode" else config.prefill_spare
            spare = weight * math.sqrt(spread[name] * ahead)
            # By how much the load, smoothed, exceeds what was expected when there was still time to start replicas.
            expected = _before(times, series[f"ahead_{name}"], config.start_s(role) + _SEEN_S)
            surprises = (*series[f"surprise_{name}"], 0.0 if expected is None else max(0.0, level) - expected)
            series[f"ahead_{name}"], series[f"surprise_{name}"] = (*series[f"ahead_{name}"], ahead), surprises
            # Chance and change come by themselves, so what both may add is the root of their squares.
            spare = math.hypot(spare, max(0.0, *surprises))
            needed[role] = max(needed[role], ahead / full_frac, ahead + spare)
            # What chance adds is in them already.
            most = max(series[name][-1], _carrying(at_s, loads[name], config))
            peaks[role] = max(peaks[role], most / full_frac)
        burst = _burst_frac(at_s, loads["prefill"], _BURST_STARTS * config.start_s(Role.PREFILL))
        now = desired_replicas(snapshot.state.desired)
        wanted = {}
        for role in Role:
            name, since_s = f"wanted_{role}", now_s - config.stay_s(role)
            series[name] = (*series[name], needed[role])
            # A burst is over before who is asked for ahead of it is there: keep what the last ones took.
            wanted[role] = (
                peaks[role] if burst > config.burst_frac else max(series[name][bisect_left(times, since_s) :])
            )
            if times[0] > since_s:  # what came before is unknown, as for Kubernetes' stabilisation window
                wanted[role] = max(wanted[role], now[role])
        reason = f"{rate:.3g} requests/s keep {busy['prefill']:.2g}P{max(busy['decode'], busy['handoff']):.2g}D busy"
        if (late := self._late(snapshot)) is not None:
            role, why = late
            wanted[role] = max(wanted[role], now[role] + max(1.0, config.net_frac * now[role]))
            reason += f"; {why}: {role} gets more"
        return Decision(
            wanted=wanted,
            ratio=PdRatio.of(wanted),
            memory={str(name): each for name, each in series.items()},
            reason=reason,
        )

    def _busy(self, snapshot: Snapshot) -> tuple[Mapping[str, float], Mapping[str, float]]:
        """What keeps replicas busy, and how unevenly.

        Long prompts cost more than their share of the tokens, so a token costs what it does in the prompt that tokens
        are in on average, not in the average prompt. What engines found in their prefix caches costs nothing.

        Returns:
            Busy replicas by each load, and by each load how uneven it is: what chance adds grows with the root of both.
            Of KV on its way it is how many times the average prompt that is which KV belongs to on average; on decode,
            twice the share of a replica that a request takes, as lengths vary as much as their mean.
        """
        config, traffic = self._config, snapshot.traffic
        rate, inputs, outputs = (
            value or 0.0 for value in (traffic.requests_per_s, traffic.input_tokens_mean, traffic.output_tokens_mean)
        )
        context_tokens = inputs + outputs / 2
        batch = decode_batch(config.decode, context_tokens, self._slo.tpot_s)
        weighted = max(inputs, traffic.input_tokens_weighted_mean or 0.0)
        unevenness = weighted / inputs if inputs else 1.0
        is_far = any(pool.link_tier is LinkTier.S2 for pool in snapshot.pools)
        held, held_tokens = _held(snapshot, config.decode, context_tokens, self._slo.tpot_s)
        # Long answers come with long prompts, which means of requests do not say: who is there does. Without this, too
        # many replicas, on which few requests are at a time, would let too many of them go.
        arriving = rate * outputs / decode_tokens_per_s(config.decode, held_tokens, self._slo.tpot_s)
        busy = {
            "prefill": prefill_engines(config.prefill, rate / unevenness, weighted, traffic.cached_frac or 0.0),
            "decode": max(arriving, held),
            "handoff": handoff_engines(config.decode, rate, inputs) / (CROSS_SWITCH_FRAC if is_far else 1.0),
        }
        # The larger share of a replica that one request takes, of its batch or, by its own length, of its KV.
        share = max(1.0 / batch, (weighted + outputs / 2) / config.decode.kv_tokens)
        # Routers see how many tokens wait, so that uneven prompts share all prefill replicas.
        return busy, {"prefill": 1.0, "decode": 2.0 * share, "handoff": unevenness}

    def _late(self, snapshot: Snapshot) -> tuple[Role, str] | None:
        """The safety net: the role that keeps users waiting, once who was asked for before has shown what it did."""
        latency, slo = snapshot.latency, self._slo
        if slo.is_met(latency) or not has_shown_what_it_did(snapshot):
            return None
        if latency.tpot_s is not None and latency.tpot_s > slo.tpot_s:
            return Role.DECODE, f"TPOT is {latency.tpot_s:.3g} s"
        decode = _decode_replicas(snapshot)
        # Prompts that wait beside full KV wait for decode, whoever computes them.
        full = sum((replica.kv_usage_frac or 0.0) > _FULL_KV_FRAC for replica in decode)
        return Role.DECODE if 2 * full > len(decode) else Role.PREFILL, f"TTFT is {latency.ttft_s:.3g} s"


def _decode_replicas(snapshot: Snapshot) -> list[ReplicaStats]:
    return [replica for pool in snapshot.pools if pool.key.role is Role.DECODE for replica in pool.replicas]


def _held(snapshot: Snapshot, profile: EngineProfile, context_tokens: float, tpot_s: float) -> tuple[float, float]:
    """Decode replicas that the requests there would fill, and their mean context.

    How long answers are is learnt from those that have ended, and the long ones end last: who is there has a longer
    context than who arrives, and a batch of them is smaller.

    Args:
        snapshot: with the decode replicas.
        profile: of one of them.
        context_tokens: of those who arrive; it counts where replicas do not say how much KV they hold.
        tpot_s: the objective.
    """
    decode = _decode_replicas(snapshot)
    kv_frac = math.fsum(each.kv_usage_frac or 0.0 for each in decode)
    with_kv = math.fsum((each.running_requests or 0.0) + (each.deferred_requests or 0.0) for each in decode)
    requests = with_kv + math.fsum(each.waiting_requests or 0.0 for each in decode)
    if with_kv >= 1.0 and kv_frac:
        context_tokens = max(context_tokens, kv_frac * profile.kv_tokens / with_kv)
    held = max(requests / decode_batch(profile, context_tokens, tpot_s), kv_frac / _FULL_KV_FRAC)
    return held, context_tokens


def _line(times: np.ndarray, values: np.ndarray, memory_s: float) -> tuple[float, float]:
    """The line through what was seen, older points counting less: its level now, and its slope where it rises.

    Args:
        times: of the points, seconds.
        values: busy replicas at each.
        memory_s: how fast points age.
    """
    if len(values) < _LEAST_POINTS:
        return float(values.max()), 0.0
    t = times - times[-1]
    w = np.exp(t / memory_s)
    whole = w.sum()
    tm, vm = (t * w).sum() / whole, (values * w).sum() / whole
    t, v = t - tm, values - vm
    slope = max(0.0, float((t * v * w).sum() / max(1e-9 * whole, (t * t * w).sum())))
    return float(vm - slope * tm), slope


def _before(times: Sequence[float], aheads: Sequence[float], since_s: float) -> float | None:
    """What was expected so long ago, or a tick later; ``None`` where that is too early to be judged.

    Args:
        times: of the points, seconds, the last of which is now.
        aheads: what was expected at each but the last.
        since_s: how long ago.
    """
    before = bisect_left(times, times[-1] - since_s)
    return aheads[before] if before < len(aheads) and times[before] >= times[0] + _FIRST_S else None


def _carrying(times: np.ndarray, values: np.ndarray, config: DefaultConfig) -> float:
    """The least that would have carried a share of the work remembered, if what is above it at any time is late.

    Work of half the history ago counts a third: where bursts get smaller, the large one fades.
    """
    work = values * np.exp((times - times[-1]) / (config.history_s / 2))
    order = np.argsort(values)
    carried = np.cumsum(work[order])
    return float(values[order][np.searchsorted(carried, config.burst_work_frac * carried[-1])]) if carried[-1] else 0.0


def _burst_frac(times: np.ndarray, values: np.ndarray, within_s: float) -> float:
    """The largest rise or fall within a time, as a share of the peak: of a burst perhaps only the end was seen."""
    moves = np.abs(values[:, None] - values) * (np.abs(times[:, None] - times) <= within_s)
    return float(moves.max() / max(1e-9, values.max()))
