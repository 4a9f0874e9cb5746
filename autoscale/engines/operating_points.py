"""Measured operating points of an engine, and what its profile predicts for them (pure, but for loading)."""

import csv
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from autoscale.documents import first_fault
from autoscale.engines.engine_model import EngineModel
from autoscale.engines.engine_step import ModelRequest
from autoscale.engines.profile import EngineProfile
from kvtransfer.strict_config import StrictConfig

# Requests of a run for each one in flight. InferenceX, from which the shipped points come, sends ten.
_REQUESTS_PER_SLOT = 10
# Least requests of a run, so that random lengths average out.
_LEAST_REQUESTS = 40
# Most decode steps that the engine model plans at once.
_MOST_STEPS = 1 << 20


class OperatingPoint(StrictConfig):
    """Means of an engine that computes prompts and decodes, with a fixed number of requests in flight."""

    input_tokens: int = Field(ge=1)
    """Longest prompt."""
    output_tokens: int = Field(ge=2)
    """Longest answer."""
    shortest_frac: float = Field(1.0, gt=0.0, le=1.0)
    """Lengths are drawn evenly between this share of the two lengths and the whole."""
    concurrency: int = Field(ge=1)
    """Requests in flight; a new one is sent when one ends."""
    ttft_s: float | None = Field(None, gt=0.0)
    tpot_s: float | None = Field(None, gt=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a profile predicts for an operating point.

    Attributes:
        ttft_mean_s: mean TTFT, with the burst in which the first requests come together.
        ttft_median_s: median TTFT, which such a burst hardly changes.
        tpot_s: mean of the requests' TPOT.
        is_extrapolated: whether the point lies outside the profile's points.
    """

    ttft_mean_s: float
    ttft_median_s: float
    tpot_s: float
    is_extrapolated: bool


def load_operating_points(path: Path) -> tuple[OperatingPoint, ...]:
    """Read a CSV with the fields of ``OperatingPoint`` as columns; an empty value is not given.

    Raises:
        ValueError: the file cannot be read, a column is unknown or missing, or a value is wrong; names the line.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as lines:
            rows = list(csv.DictReader(lines, restkey="more values than columns"))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
    points = []
    for line, row in enumerate(rows, start=2):
        given: dict[str, Any] = {name.strip(): value for name, value in row.items() if value}
        try:
            points.append(OperatingPoint.model_validate(given))
        except ValidationError as error:
            raise ValueError(f"{path}: line {line}: {first_fault(error)}") from None
    if not points:
        raise ValueError(f"{path}: no operating points after its first line")
    return tuple(points)


def predicted(profile: EngineProfile, point: OperatingPoint, rng: random.Random) -> Prediction:
    """Run the engine model with a fixed number of requests in flight, which are sent together at the start.

    Raises:
        ValueError: a request does not fit the engine's KV.
    """
    engine, now_s = EngineModel(profile), 0.0
    sent_s, first_s = dict[str, float](), dict[str, float]()
    ttfts_s, tpots_s = list[float](), list[float]()
    lengths = [
        (_drawn(point.input_tokens, point, rng), _drawn(point.output_tokens, point, rng))
        for _ in range(max(_LEAST_REQUESTS, _REQUESTS_PER_SLOT * point.concurrency))
    ]
    waiting = [
        ModelRequest(request_id=str(number), input_tokens=prompt, output_tokens=answer)
        for number, (prompt, answer) in enumerate(lengths)
    ]

    def send() -> None:
        if waiting:
            request = waiting.pop()
            sent_s[request.request_id] = now_s
            engine.add(request)

    for _ in range(point.concurrency):
        send()
    while (step := engine.plan(now_s, _MOST_STEPS)) is not None:
        first, ended = engine.apply(step)
        first_s |= dict.fromkeys((request.request_id for request in first), now_s + step.first_s)
        now_s += step.duration_s
        for request in ended:
            name = request.request_id
            ttfts_s.append(first_s[name] - sent_s[name])
            tpots_s.append((now_s - first_s[name]) / max(1, request.output_tokens - 1))
            send()
    context_tokens = (1.0 + point.shortest_frac) / 2 * (point.input_tokens + point.output_tokens / 2)
    return Prediction(
        ttft_mean_s=statistics.fmean(ttfts_s),
        ttft_median_s=statistics.median(ttfts_s),
        tpot_s=statistics.fmean(tpots_s),
        is_extrapolated=not (
            profile.prefill.covers(point.input_tokens) and profile.decode.covers(point.concurrency, context_tokens)
        ),
    )


def _drawn(longest: int, point: OperatingPoint, rng: random.Random) -> int:
    return rng.randint(max(1, round(point.shortest_frac * longest)), longest)


def mean_error_frac(pairs: Sequence[tuple[float | None, float]]) -> float | None:
    """Mean relative error of (measured, predicted) pairs, without sign; ``None``: nothing was measured."""
    errors = [abs(prediction / measured - 1.0) for measured, prediction in pairs if measured is not None]
    return statistics.fmean(errors) if errors else None
