"""An engine's profile as users see it, measured at the endpoint of an idle application, proxies and ingress included.

One request at a time gives the prefill curve, and several at once give the decode surface. The cost of a handoff shows
where prompts become too long for local prefill. The KV of an engine cannot be measured from outside and is taken from a
given profile. The time that load adds is fitted in ``load_fit``.
"""

import asyncio
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from autoscale.engines.profile import DecodeSurface, EngineProfile, Handoff, PrefillCurve, Source
from autoscale.report import RequestRecord
from autoscale.traces.trace import TraceRequest
from serve_app.load.generator import LoadGenerator

# Lengths of prompts that are prefilled locally, in tokens.
LOCAL_TOKENS = (16, 32, 64, 128)
# Lengths of prompts that are prefilled remotely, in tokens.
REMOTE_TOKENS = (160, 256, 512, 1024, 1536, 2000)
# Requests at once.
BATCHES = (1, 2, 4, 8, 16)
_SHORT_TOKENS, _LONG_TOKENS, _LONG_BATCHES = 32, 1024, (1, 2, 4)
_ALONE_OUTPUT_TOKENS, _BATCH_OUTPUT_TOKENS = 24, 128
_ALONE_REQUESTS, _BATCH_ROUNDS = 12, 5

Records = Sequence[RequestRecord]


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Records of a calibration.

    Attributes:
        alone: requests one at a time, by the length of their prompts.
        short: batches with short prompts, by the number of requests at once.
        long: batches with long prompts, likewise.
    """

    alone: Mapping[int, Records]
    short: Mapping[int, Records]
    long: Mapping[int, Records]


def calibrate(generator: LoadGenerator, on_progress: Callable[[str], None]) -> Calibration:
    """Send the requests to an idle application; about two minutes on two cores."""

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
    """The profile with the times that the client measured.

    Args:
        base: profile of the same engines, for their KV.
        calibration: records of an application with one replica of each role.

    Raises:
        ValueError: a request of the calibration failed.
    """
    parts = (calibration.alone, calibration.short, calibration.long)
    failed = [r.error for each in parts for records in each.values() for r in records if r.error]
    if failed:
        raise ValueError(f"{len(failed)} requests of the calibration failed, the first with {failed[0]!r}: see the log")
    ttft = {tokens: _median([r.ttft_s for r in records]) for tokens, records in calibration.alone.items()}
    step = {count: _median([r.tpot_s for r in records]) for count, records in calibration.short.items()}
    # Local time of a prompt of the first remote length, on the line through the two longest local ones.
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
    """Steps by batch at short contexts, and a line for the time that context adds for each request."""
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
