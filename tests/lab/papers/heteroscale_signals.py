"""HeteroScale's Figure 6: the eight signals on one trace, under one quota, from the same counts (pure)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoscale.decide.config import AutoscaleConfig, GuardConfig
from autoscale.observe.histogram import TPOT_EDGES_S, TTFT_EDGES_S, Histogram, quantile
from autoscale.policies.heteroscale import HeteroScaleConfig, LatencyStepsConfig, Signal
from autoscale.sim.outcome import Result
from autoscale.sim.scenario import Run, run_policy
from autoscale.sim.split import SplitSimulator, signals_of
from autoscale.slo import SloConfig
from autoscale.traces.trace import cut
from tests.lab.papers.heteroscale_setting import ATTAINMENT_FRAC, HOUR_S, LOAD_FRAC, Dialogue

# Section 4.2.1: eight hours from morning to mid-afternoon.
FIRST_HOUR, HOURS = 7, 8
_SAMPLE_S = 5.0
# A pool grows and shrinks beyond the guard's shares of its count. A latency, which is not linear, should act at the
# same distance from the thresholds' load.
_GUARD = GuardConfig()
# The highest values allowed, so that latencies and a backlog that are not the tested signal change nothing.
_NO_TTFT_S, _NO_TPOT_S, _NO_BACKLOG_TOKENS = 250.0, 8.0, 1e12

# A signal tracks the load if its error is at most this share.
TRACKS_FRAC = 0.25
# A signal stays high if it shows at half the load at least this share of its value at full load.
STAYS_FRAC = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracking:
    """How well replicas followed the need.

    ``error_frac``: mean distance from the need, as a share of it. ``overshoot``: the most replicas over the highest
    need. ``swing``: the most replicas over the fewest.
    """

    error_frac: float
    overshoot: float
    swing: float


def tracking(replicas: NDArray[np.float64], needed: NDArray[np.float64]) -> Tracking:
    """Compare replicas with need at the same instants, both above 0."""
    return Tracking(
        error_frac=float(np.mean(np.abs(replicas - needed) / needed)),
        overshoot=float(replicas.max() / needed.max()),
        swing=float(replicas.max() / replicas.min()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """One signal. ``half_load_frac``: its value at half of the best split's highest rate, over that at the rate."""

    tracking: Tracking
    scale_events: int
    half_load_frac: float


Found = Mapping[Signal, Tried]


def track_signals(dialogue: Dialogue, test: SplitSimulator, say: Callable[[str], None]) -> dict[Signal, Tried]:
    """Each signal alone on the same eight hours."""
    best = dialogue.best
    at_half = signals_of(test.run(best.prefill, best.decode, best.requests_per_s / 2))
    trace = cut(dialogue.day(seed=0), FIRST_HOUR * HOUR_S, HOURS * HOUR_S)
    scenario = dialogue.scenario(trace)
    first = dialogue.pools(dialogue.counts(float(dialogue.needed(np.array([FIRST_HOUR * HOUR_S]))[0])))
    found = {}
    for signal, config in signal_configs(dialogue, test).items():
        run = run_policy(scenario, config, first)
        result = Result.of(run)
        found[signal] = Tried(
            tracking=tracking(*_replicas_and_need(dialogue, run, result.timeline)),
            scale_events=result.outcome.scale_events,
            half_load_frac=(at_half[signal] or 0.0) / dialogue.shown(signal),
        )
        say(f"{signal}: {found[signal]}, {run.attainment_frac:.1%} within the objective")
    return found


def signal_configs(dialogue: Dialogue, test: SplitSimulator) -> dict[Signal, AutoscaleConfig]:
    """The policy on each signal, without a safety net, which would otherwise be tested instead.

    All signals act at the same load of a replica. The target of a linear signal is a share of its value at the best
    split's highest rate; the guard acts at a distance above and below it. A latency acts at its value at the load
    above, severely at its value at the highest rate, and back at its value at the load below.
    """
    best = dialogue.best
    loads = (1.0, LOAD_FRAC * (1.0 + _GUARD.hysteresis_out_frac), LOAD_FRAC * (1.0 - _GUARD.hysteresis_in_frac))
    runs = [test.run(best.prefill, best.decode, load * best.requests_per_s) for load in loads]
    configs = {}
    for signal in Signal:
        slo = {"ttft_s": _NO_TTFT_S, "tpot_s": _NO_TPOT_S, "quantile_frac": ATTAINMENT_FRAC}
        if signal in (Signal.TTFT, Signal.TPOT):
            severe_s, moderate_s, relaxed_s = (latency_s(run, signal) for run in runs)
            slo[f"{signal}_s"] = moderate_s
            steps = LatencyStepsConfig(
                severe_frac=severe_s / moderate_s, moderate_frac=1.0, relaxed_frac=relaxed_s / moderate_s
            )
            policy = HeteroScaleConfig(signal=signal, latency=steps, backlog_floor_tokens=_NO_BACKLOG_TOKENS)
        else:
            target = dialogue.target(signal)
            policy = HeteroScaleConfig(signal=signal, target=target, backlog_floor_tokens=_NO_BACKLOG_TOKENS)
        configs[signal] = dialogue.config(policy, SloConfig(**slo))
    return configs


def latency_s(run: Run, signal: Signal) -> float:
    """The quantile of a latency as the controller reads it, from buckets."""
    histogram = Histogram(TTFT_EDGES_S if signal is Signal.TTFT else TPOT_EDGES_S)
    for record in run.measured:
        seen = record.ttft_s if signal is Signal.TTFT else record.tpot_s
        if seen is not None:
            histogram.observe(seen)
    found = quantile(histogram.edges, histogram.counts, ATTAINMENT_FRAC)
    assert found is not None
    return found


def _replicas_and_need(
    dialogue: Dialogue, run: Run, timeline: Sequence[tuple[float, int, int]]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Running replicas of both roles, and the need, every few seconds after the warm-up."""
    samples = int((run.scenario.end_s - run.scenario.warm_up_s) // _SAMPLE_S)
    at_s = run.scenario.warm_up_s + _SAMPLE_S * np.arange(samples, dtype=np.float64)
    changes_s, prefill, decode = (np.array(column, dtype=np.float64) for column in zip(*timeline, strict=True))
    index = np.searchsorted(changes_s, at_s, side="right") - 1
    return (prefill + decode)[index], dialogue.needed(at_s + FIRST_HOUR * HOUR_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The claim of section 4.2.2 on a signal, and the rule that decides it."""

    claimed: str
    rule: str
    holds: Callable[[Found], bool]


def _error(found: Found, signal: Signal) -> float:
    return found[signal].tracking.error_frac


def _tracks(signal: Signal) -> Expected:
    return Expected(
        claimed="scales out and in with the load",
        rule="error <= 25 %",
        holds=lambda found: _error(found, signal) <= TRACKS_FRAC,
    )


def _stays(signal: Signal) -> Expected:
    return Expected(
        claimed="stays high when the load falls; no signal",
        rule="shows >= 90 % at half load; error > 25 %",
        holds=lambda found: found[signal].half_load_frac >= STAYS_FRAC and _error(found, signal) > TRACKS_FRAC,
    )


def _is_less_sensitive(found: Found) -> bool:
    own, tps = found[Signal.PREFILL_GPU_UTILIZATION].tracking, found[Signal.DECODE_TPS].tracking
    return own.error_frac <= TRACKS_FRAC and own.swing <= tps.swing


def _oscillates(found: Found) -> bool:
    ttft, tps = found[Signal.TTFT], found[Signal.DECODE_TPS]
    is_most = all(ttft.scale_events >= each.scale_events for each in found.values())
    return is_most and ttft.tracking.overshoot > tps.tracking.overshoot


def _is_smoother(found: Found) -> bool:
    ttft, tpot = found[Signal.TTFT], found[Signal.TPOT]
    return tpot.scale_events < ttft.scale_events and tpot.tracking.overshoot <= ttft.tracking.overshoot


EXPECTED: Mapping[Signal, Expected] = {
    Signal.DECODE_TPS: _tracks(Signal.DECODE_TPS),
    Signal.PREFILL_TPS: _tracks(Signal.PREFILL_TPS),
    Signal.PREFILL_GPU_UTILIZATION: Expected(
        claimed="valid, less sensitive than TPS",
        rule="error <= 25 %, swing <= decode TPS's",
        holds=_is_less_sensitive,
    ),
    Signal.DECODE_GPU_UTILIZATION: _stays(Signal.DECODE_GPU_UTILIZATION),
    Signal.PREFILL_SM_ACTIVITY: Expected(
        claimed="correlates well with the load",
        rule="error <= 25 %",
        holds=_tracks(Signal.PREFILL_SM_ACTIVITY).holds,
    ),
    Signal.DECODE_SM_ACTIVITY: _stays(Signal.DECODE_SM_ACTIVITY),
    Signal.TTFT: Expected(
        claimed="overshoots, then corrects often",
        rule="most events; overshoot above decode TPS's",
        holds=_oscillates,
    ),
    Signal.TPOT: Expected(
        claimed="smoother than TTFT",
        rule="fewer events than TTFT; overshoot no more",
        holds=_is_smoother,
    ),
}
