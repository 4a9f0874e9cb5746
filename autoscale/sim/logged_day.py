"""The traffic of a running application from its decision log, as a trace for the simulator (pure).

The log has rates and mean lengths of windows, not requests. So arrivals are drawn at the logged rate, and lengths from
a distribution with the logged means. What the log cannot tell is in ``notes``.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.decision_log import LogLine, parse_line
from autoscale.decide.tuning import Pools
from autoscale.extension import error_text
from autoscale.traces.trace import TraceRequest
from autoscale.types import PoolKey, PoolLimits, Traffic

# Between two lines further apart than this, rates are noted as interpolated, seconds: the log has one a minute.
_GAP_S = 150.0
# Shortest part of a log that is worth a simulation, seconds.
_SHORTEST_S = 600.0
# Time from which on a log counts as a day, hours; a little less than a day's first and last line are apart.
_DAY_HOURS = 23.5
# Spread of the output lengths: the log has only their mean. Standard deviation of the logarithm that gives the mean of
# squares of Azure's conversation trace (configs/traces/azure_conv_600s.csv.gz).
_OUTPUT_SIGMA = 0.6
# Lengths without any logged mean, tokens: nothing was answered in the whole log.
_SHORTEST_TOKENS = 1.0
# Most requests of a trace: more take hours to simulate.
_MOST_REQUESTS = 10_000_000
# Longest log, seconds; a longer one has a wrong time.
_MOST_S = 31 * 86_400.0
# Begin of each line of a decision log.
_BEGIN = '{"service":'
# Step of the rate over time, seconds.
_STEP_S = 1.0

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Traffic at one instant: the middle of the window of which it is the mean. ``at_s``: Unix time."""

    at_s: float
    requests_per_s: float
    traffic: Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedDay:
    """One service in the last part of a log.

    Attributes:
        config: its last configuration.
        pools: the last limits of its pools.
        points: its traffic, in order of time.
        skipped: number of lines that were not read, by reason.
    """

    service: str
    config: AutoscaleConfig
    pools: Pools
    points: tuple[Point, ...]
    skipped: dict[str, int]

    @property
    def span_s(self) -> float:
        """Time from the first point to the last, seconds."""
        return self.points[-1].at_s - self.points[0].at_s

    def notes(self) -> list[str]:
        """What the log cannot tell about the traffic, one sentence each."""
        notes = [f"{count} lines were left out: {reason}" for reason, count in self.skipped.items()]
        if (hours := self.span_s / 3600.0) < _DAY_HOURS:
            notes.append(f"the log has {hours:.1f} hours of traffic, not a day: other hours may need other settings")
        gaps = np.diff([point.at_s for point in self.points])
        if (far := gaps[gaps > _GAP_S]).size:
            notes.append(
                f"{far.sum() / self.span_s:.0%} of the time lies between lines more than {_GAP_S:g} s apart, at most "
                f"{far.max() / 60.0:.0f} minutes: rates are interpolated there"
            )
        notes.append(
            "arrivals and lengths are drawn with the logged means: bursts shorter than a window, and the spread of "
            "output lengths, are not in the log"
        )
        cached = [point.traffic.cached_frac for point in self.points if point.traffic.cached_frac is not None]
        if cached and (frac := math.fsum(cached) / len(cached)) >= 0.01:
            notes.append(f"{frac:.0%} of the prompt tokens came from prefix caches; here prefill computes all of them")
        return notes


def read_day(lines: Sequence[str], service: str | None = None, *, last_s: float = 86_400.0) -> LoggedDay:
    """Read the last ``last_s`` seconds of a decision log.

    ``service``: its name; ``None``: the log's only service.

    Raises:
        ValueError: the log is empty, no log, too short, or has several services and none is named.
    """
    parsed, skipped = _parse(lines)
    name = _service_of(parsed, service)
    own = [line for line in parsed if line.service == name]
    config = next((line.config for line in reversed(own) if line.config is not None), None)
    if config is None:
        raise ValueError(
            f"no line has a configuration of {name} that this version can read: give the whole log, which begins with "
            "one"
        )
    limits = next((line.pools for line in reversed(own) if line.pools is not None), None)
    if limits is None:
        raise ValueError(f"no line has a decision about {name}: the log has only configurations and traffic")
    points = [point for point in _points(own) if point.at_s >= own[-1].at_s - last_s]
    if len(points) < 2 or points[-1].at_s - points[0].at_s < _SHORTEST_S:
        raise ValueError(
            f"the log has less than {_SHORTEST_S / 60:g} minutes of {name}'s traffic ({len(points)} lines with a "
            "rate): wait until it has a day, or give an older log too"
        )
    pools = Pools(dict[PoolKey, PoolLimits](limits))
    return LoggedDay(service=name, config=config, pools=pools, points=tuple(points), skipped=dict(skipped))


def _parse(lines: Sequence[str]) -> tuple[list[LogLine], Counter[str]]:
    """The lines that can be read, and why others cannot."""
    parsed, skipped = list[LogLine](), Counter[str]()
    unread: dict[str, str] = {}  # by service: why its last configuration cannot be read
    filled = [line for line in lines if line.strip()]
    if not filled:
        raise ValueError("the log is empty: `tandem top` names the log of a running application")
    for number, line in enumerate(filled, start=1):
        try:
            parsed.append(parse_line(line))
            if parsed[-1].config is not None:
                unread.pop(parsed[-1].service, None)
        except (ValueError, RecursionError) as error:
            record = _record(line)
            if record is None and number == len(filled):
                skipped["the last one is cut off"] += 1
            elif record is None and line.startswith(_BEGIN):  # its writer was killed
                skipped["cut off"] += 1
            elif record is not None and {"config", "snapshot", "traffic"} & record.keys():
                skipped["of another version of Tandem"] += 1
                if "config" in record:
                    unread[str(record.get("service"))] = (
                        f"line {number} has the last configuration: {error_text(error)}"
                    )
            else:
                raise ValueError(f"line {number} is {error}") from None
    if unread:
        raise ValueError(next(iter(unread.values())))
    return parsed, skipped


def _record(line: str) -> dict[str, Any] | None:
    """The JSON object of a line; ``None``: it has none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _service_of(parsed: Iterable[LogLine], service: str | None) -> str:
    names = list(dict.fromkeys(line.service for line in parsed))
    if service is not None and service not in names:
        raise ValueError(f"the log has no service {service!r}: it has {', '.join(names) or 'none'}")
    if service is None and len(names) != 1:
        raise ValueError(f"the log has {len(names)} services: choose one of {', '.join(names)} with --service")
    return service or names[0]


def _points(lines: Iterable[LogLine]) -> list[Point]:
    """The traffic of lines in which all of it was observed, in order of time."""
    points: dict[float, Point] = {}
    window_s = 0.0
    for line in lines:
        window_s = line.config.window_s if line.config is not None else window_s
        traffic = line.traffic
        if traffic is None or not traffic.is_whole or (rate := traffic.requests_per_s) is None:
            continue
        at_s = line.at_s - window_s / 2.0
        points[at_s] = Point(at_s=at_s, requests_per_s=rate, traffic=traffic)
    return [points[at_s] for at_s in sorted(points)]


def trace_of(day: LoggedDay, rng: np.random.Generator) -> tuple[TraceRequest, ...]:
    """Random requests with the rate and the mean lengths of a day, in order of time.

    Raises:
        ValueError: there are no requests, or more than ``_MOST_REQUESTS``.
    """
    times_s = np.array([point.at_s - day.points[0].at_s for point in day.points])
    if times_s[-1] > _MOST_S:
        days, most = times_s[-1] / 86_400.0, _MOST_S / 86_400.0
        raise ValueError(f"the log has {days:.3g} days, more than {most:g}: give another part of it")
    rates = np.array([point.requests_per_s for point in day.points])
    arrivals_s = _arrivals(times_s, rates, rng)
    traffics = [point.traffic for point in day.points]
    inputs = _means([traffic.input_tokens_mean for traffic in traffics], times_s, arrivals_s)
    weighted = _means([traffic.input_tokens_weighted_mean for traffic in traffics], times_s, arrivals_s)
    outputs = _means([traffic.output_tokens_mean for traffic in traffics], times_s, arrivals_s)
    # For a lognormal length, the mean that is weighted by tokens is exp(sigma^2) times the mean.
    input_sigma = np.sqrt(np.log(np.maximum(1.0, weighted / inputs)))
    output_sigma = np.full_like(outputs, _OUTPUT_SIGMA)
    pairs = zip(_lengths(inputs, input_sigma, rng), _lengths(outputs, output_sigma, rng), strict=True)
    return tuple(
        TraceRequest(at_s=at_s, input_tokens=prompt, output_tokens=output)
        for at_s, (prompt, output) in zip(arrivals_s.tolist(), pairs, strict=True)
    )


def _arrivals(times_s: Floats, rates: Floats, rng: np.random.Generator) -> Floats:
    """Arrivals of a Poisson process whose rate is on straight lines between the points, seconds."""
    grid_s = np.arange(0.0, times_s[-1] + _STEP_S, _STEP_S)
    rate = np.interp(grid_s, times_s, rates)
    expected = np.concatenate(([0.0], np.cumsum((rate[1:] + rate[:-1]) / 2.0 * _STEP_S)))
    if not 1.0 <= expected[-1] <= _MOST_REQUESTS:
        what = "no requests" if expected[-1] < 1.0 else f"{expected[-1]:,.0f} requests, more than {_MOST_REQUESTS:,}"
        raise ValueError(f"the log has {what} in {times_s[-1] / 3600.0:.1f} hours: give another part of it")
    count = max(1, rng.poisson(expected[-1]))
    arrivals: Floats = np.interp(np.sort(rng.uniform(0.0, expected[-1], count)), expected, grid_s)
    return np.round(arrivals, 6)


def _means(values: Sequence[float | None], times_s: Floats, at_s: Floats) -> Floats:
    """A mean length at each time, on straight lines between those that were observed, tokens."""
    known = [(when, value) for when, value in zip(times_s.tolist(), values, strict=True) if value is not None]
    if not known:
        return np.full_like(at_s, _SHORTEST_TOKENS)
    when, tokens = zip(*known, strict=True)
    means: Floats = np.interp(at_s, when, tokens)
    return means


def _lengths(means: Floats, sigmas: Floats, rng: np.random.Generator) -> list[int]:
    """Lognormal lengths with these means, at least 1 token."""
    medians = np.log(np.maximum(means, _SHORTEST_TOKENS)) - sigmas**2 / 2.0
    lengths: list[int] = np.maximum(1.0, np.rint(rng.lognormal(medians, sigmas))).astype(int).tolist()
    return lengths
