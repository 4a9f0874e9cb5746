"""An engine's profile as users see it: from requests to a running application alone, proxies and ingress included.

One request at a time gives the prefill curve, and several at once the decode surface. What a handoff costs is read off
where prompts are too long to be prefilled where they decode. What an engine holds is not seen from outside and stays
that of the profile given.

An application that has been idle, or is busy with others, takes longer than one that is asked again and again: where
engines, proxies and clients share a few cores, by a half. What that adds is fitted to a replayed trace.
"""

import asyncio
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from autoscale.profile import DecodeSurface, EngineProfile, Handoff, PrefillCurve, Source
from autoscale.report import RequestRecord
from autoscale.sim.static import replay
from autoscale.trace import TraceRequest
from kvtransfer.topology import Role
from router.config import RouterConfig
from serve_app.bench import LoadGenerator

# Prompts by what they are for; the first two lists are shorter and longer than what is prefilled where it decodes.
LOCAL_TOKENS = (16, 32, 64, 128)
REMOTE_TOKENS = (160, 256, 512, 1024, 1536, 2000)
BATCHES = (1, 2, 4, 8, 16)
_SHORT_TOKENS, _LONG_TOKENS, _LONG_BATCHES = 32, 1024, (1, 2, 4)
_ALONE_OUTPUT_TOKENS, _BATCH_OUTPUT_TOKENS = 24, 128
_ALONE_REQUESTS, _BATCH_ROUNDS = 12, 5
# Where simulated and real times are compared.
_QUANTILES = np.linspace(0.1, 0.95, 18)
_SWEEPS = 4

Records = Sequence[RequestRecord]


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was asked of an application, and how it fared.

    ``alone``: requests one at a time, by the length of their prompts; ``short`` and ``long``: batches of so many
    requests at once, with short prompts and long ones.
    """

    alone: Mapping[int, Records]
    short: Mapping[int, Records]
    long: Mapping[int, Records]


def calibrate(generator: LoadGenerator, on_progress: Callable[[str], None]) -> Calibration:
    """Ask an application that does nothing else, about two minutes on two cores."""

    def alone(tokens: int) -> Records:
        on_progress(f"{tokens} input tokens, one request at a time")
        load = [_request(tokens, _ALONE_OUTPUT_TOKENS)] * _ALONE_REQUESTS
        return asyncio.run(generator.keep_in_flight(load, 1))

    def batch(tokens: int, count: int) -> Records:
        on_progress(f"{tokens} input tokens, {count} at once")
        load = [_request(tokens, _BATCH_OUTPUT_TOKENS)] * count
        return [r for _ in range(_BATCH_ROUNDS) for r in asyncio.run(generator.keep_in_flight(load, count))]

    return Calibration(
        alone={tokens: alone(tokens) for tokens in (*LOCAL_TOKENS, *REMOTE_TOKENS)},
        short={count: batch(_SHORT_TOKENS, count) for count in BATCHES},
        long={count: batch(_LONG_TOKENS, count) for count in _LONG_BATCHES},
    )


def served_profile(base: EngineProfile, calibration: Calibration) -> EngineProfile:
    """The profile with the times that users saw.

    Args:
        base: of the same engines; what they hold is its.
        calibration: of an application with one replica of each role.

    Raises:
        ValueError: a request of the calibration failed.
    """
    asked = (calibration.alone, calibration.short, calibration.long)
    failed = [r.error for each in asked for records in each.values() for r in records if r.error]
    if failed:
        raise ValueError(f"{len(failed)} requests of the calibration failed, the first with {failed[0]!r}: see the log")
    ttft = {tokens: _median([r.ttft_s for r in records]) for tokens, records in calibration.alone.items()}
    step = {count: _median([r.tpot_s for r in records]) for count, records in calibration.short.items()}
    # What a prompt of the first remote length would take locally, on the line through the two longest local ones.
    sooner, later = LOCAL_TOKENS[-2:]
    slope = (ttft[later] - ttft[sooner]) / (later - sooner)
    first = REMOTE_TOKENS[0]
    base_s = max(0.0, ttft[first] - (ttft[later] + slope * (first - later)) - step[1])
    handoff = Handoff(
        base_s=round(base_s, 6),
        kv_bytes_per_token=base.handoff.kv_bytes_per_token,
        bytes_per_s=base.handoff.bytes_per_s,
    )
    prefill = {tokens: ttft[tokens] for tokens in LOCAL_TOKENS}
    prefill |= {tokens: ttft[tokens] - handoff.seconds_for(tokens) - step[1] for tokens in REMOTE_TOKENS}
    seconds = accumulate((max(0.0, each) for each in prefill.values()), max)
    return base.model_copy(
        update={
            "name": f"{base.name}_served",
            "prefill": PrefillCurve(tokens=tuple(prefill), seconds=tuple(round(each, 6) for each in seconds)),
            "decode": _surface(calibration, step),
            "handoff": handoff,
            "sources": (
                Source(part="prefill, decode, handoff", kind="measured", text="at the endpoint, by one client"),
                *(source for source in base.sources if source.part not in ("prefill", "decode", "handoff")),
            ),
        }
    )


def _surface(calibration: Calibration, step: Mapping[int, float]) -> DecodeSurface:
    """Steps by batch at short contexts; what context adds is a line, for each request as much."""
    short, long = (tokens + _BATCH_OUTPUT_TOKENS // 2 for tokens in (_SHORT_TOKENS, _LONG_TOKENS))
    rises = [(_median([r.tpot_s for r in rs]) - step[count]) / count for count, rs in calibration.long.items()]
    rise_s = max(0.0, statistics.median(rises))
    # Noise must not make the larger batch the faster one.
    rows = np.maximum.accumulate([step[count] for count in BATCHES])
    return DecodeSurface(
        batch=BATCHES,
        context_tokens=(short, long),
        step_s=tuple(
            (round(float(row), 6), round(float(row) + rise_s * count, 6))
            for count, row in zip(BATCHES, rows, strict=True)
        ),
    )


def _median(values: Sequence[float | None]) -> float:
    return statistics.median(value for value in values if value is not None)


def _request(input_tokens: int, output_tokens: int) -> TraceRequest:
    return TraceRequest(at_s=0.0, input_tokens=input_tokens, output_tokens=output_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What load adds to a served profile.

    ``contention_frac``: see ``VirtualCluster``. ``wake_s``: of a step with
    prompts that nobody decodes beside, since processes that have slept take time.
    ``single_frac`` and ``batch_frac``: steps of one request and of several, as shares of the profile's.
    ``handoff_s``: more of each handoff.
    """

    contention_frac: float = 0.5
    wake_s: float = 0.005
    single_frac: float = 1.0
    batch_frac: float = 1.0
    handoff_s: float = 0.0

    def applied_to(self, profile: EngineProfile) -> EngineProfile:
        """The profile with all but contention."""
        decode, handoff = profile.decode, profile.handoff
        share = np.array([self.single_frac if batch == 1 else self.batch_frac for batch in decode.batch])
        rows = np.maximum.accumulate(np.array(decode.step_s) * share[:, None])
        return profile.model_copy(
            update={
                "prefill": profile.prefill.model_copy(
                    update={"seconds": tuple(seconds + self.wake_s for seconds in profile.prefill.seconds)}
                ),
                "decode": decode.model_copy(update={"step_s": tuple(tuple(map(float, row)) for row in rows)}),
                "handoff": handoff.model_copy(update={"base_s": max(0.0, handoff.base_s + self.handoff_s)}),
            }
        )

    def simulated(self, profile: EngineProfile, trace: Sequence[TraceRequest], router: RouterConfig) -> Records:
        """What it foretells of a trace on one replica of each role."""
        profiles = dict.fromkeys(Role, self.applied_to(profile))
        return replay(trace, dict.fromkeys(Role, 1), profiles, router, contention_frac=self.contention_frac)


_GRID = {
    "contention_frac": np.arange(0.0, 3.01, 0.125),
    "wake_s": np.arange(0.0, 0.0301, 0.001),
    "single_frac": np.arange(0.6, 1.41, 0.05),
    "batch_frac": np.arange(0.6, 1.41, 0.05),
    "handoff_s": np.arange(-0.03, 0.0301, 0.002),
}


def fitted(
    profile: EngineProfile, loads: Sequence[tuple[Sequence[TraceRequest], Sequence[Records]]], router: RouterConfig
) -> Fit:
    """What load adds, by which the quantiles of simulated replays come nearest to the real ones', one after another.

    Args:
        profile: as served.
        loads: traces, and how their requests fared on one replica of each role, each time that they were replayed.
        router: the application's.
    """
    real = [np.median([_quantiles(records) for records in replays], axis=0) for _, replays in loads]

    def error(fit: Fit) -> float:
        simulated = (_quantiles(fit.simulated(profile, trace, router)) for trace, _ in loads)
        return float(np.mean([np.abs(s - r).mean() for s, r in zip(simulated, real, strict=True)]))

    best = Fit()
    least = error(best)
    for _ in range(_SWEEPS):
        before = best
        for name, values in _GRID.items():
            for value in values:
                tried = replace(best, **{name: float(value)})
                if (now := error(tried)) < least:
                    best, least = tried, now
        if best == before:
            break
    return best


def at_the_edge(fit: Fit) -> list[str]:
    """What might lie beyond the values that were tried; contention and waking end at 0 because there is no less."""
    found = {name: getattr(fit, name) for name in _GRID}
    return [
        name
        for name, values in _GRID.items()
        if found[name] >= values[-1] - 1e-9 or (values[0] and found[name] <= values[0] + 1e-9)
    ]


def _quantiles(records: Records) -> NDArray[np.float64]:
    """Logarithms, so that errors are shares."""
    ttft = [r.ttft_s for r in records if r.error is None and r.ttft_s]
    tpot = [r.tpot_s for r in records if r.error is None and r.tpot_s]
    return np.asarray(np.log(np.concatenate([np.quantile(each, _QUANTILES) for each in (ttft, tpot)])))
