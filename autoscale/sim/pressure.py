"""The pressure test: it finds the split of GPUs between the roles that serves the most requests per second (pure).

A split is a number of prefill replicas and a number of decode replicas. Its point (``PressurePoint``) is the highest
rate at which it keeps the objectives.

Source: HeteroScale Algorithm 1, PRESSURETEST.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autoscale.pressure.rate_search import PressurePoint
from autoscale.ratio import PdRatio
from autoscale.sim.config import SimConfig
from autoscale.sim.split import SplitSimulator
from autoscale.traces.trace import TraceRequest
from kvtransfer.topology import Role

# GPUs that are split if the caller gives no number. The reason of the value is not recorded.
_DEFAULT_GPUS = 24
# Disaggregation is worthwhile above this multiple of the rate of aggregated engines, since it is more complex.
_WORTH_FACTOR = 1.02


@dataclass(frozen=True, kw_only=True)
class PressureResult:
    """The points of the splits that were simulated, and of aggregated engines; each uses at most ``gpus`` GPUs."""

    points: Sequence[PressurePoint]
    aggregated: PressurePoint
    gpus: int

    @property
    def best(self) -> PressurePoint:
        """The point of the split with the highest rate."""
        return max(self.points, key=lambda point: point.requests_per_s)

    @property
    def pd_ratio(self) -> PdRatio:
        """The ratio of the best split."""
        return PdRatio.of({Role.PREFILL: self.best.prefill, Role.DECODE: self.best.decode})

    @property
    def is_disaggregation_worthwhile(self) -> bool:
        """Whether the rate of the best split is above ``_WORTH_FACTOR`` times that of aggregated engines."""
        return self.best.requests_per_s > self.aggregated.requests_per_s * _WORTH_FACTOR


def _default_gpus(config: SimConfig) -> int:
    """The number of GPUs that ``pressure_test`` splits by default."""
    prefill, decode = (config.groups[0].pool(role) for role in Role)
    # With more GPUs, one replica of a role would leave more GPUs to the other role than its pool allows.
    most_prefill_gpus, most_decode_gpus = prefill.highest_replicas * prefill.gpus, decode.highest_replicas * decode.gpus
    return min(_DEFAULT_GPUS, most_prefill_gpus + decode.gpus, most_decode_gpus + prefill.gpus)


def pressure_test(
    config: SimConfig,
    trace: Sequence[TraceRequest],
    *,
    gpus: int | None = None,
    seed: int = 0,
    on_point: Callable[[PressurePoint], None] = lambda point: None,
) -> PressureResult:
    """Find the split with the highest rate, for requests with the lengths of a trace and Poisson arrivals.

    A split may leave some GPUs unused. ``gpus``: GPUs to split; ``None``: 24, or fewer if the pools' limits do not
    allow every split of 24. ``on_point``: called with each new point.

    Raises:
        ValueError: several groups, too few GPUs for a replica of each role, or no rate keeps the objectives.
    """
    config.check_one_pair("the pressure test")
    gpus = _default_gpus(config) if gpus is None else gpus
    splits = _splits(config, gpus)
    simulator = SplitSimulator(config, trace, seed)

    def point_of(prefill: int, likely_requests_per_s: float | None) -> PressurePoint:
        point = simulator.find_highest_rate(prefill, splits[prefill], likely_requests_per_s)
        on_point(point)
        return point

    points = _search_peak(point_of, min(splits), max(splits))
    decode = config.groups[0].decode
    aggregated = simulator.find_highest_rate(0, min(gpus // decode.gpus, decode.highest_replicas))
    on_point(aggregated)
    result = PressureResult(points=points, aggregated=aggregated, gpus=gpus)
    if not max(result.best.requests_per_s, aggregated.requests_per_s):
        raise ValueError("no rate keeps the objectives: they are too tight for these engines and lengths")
    return result


def _search_peak(
    point_of: Callable[[int, float | None], PressurePoint], lowest: int, highest: int
) -> list[PressurePoint]:
    """The points that a search for the highest rate needed, those with fewest prefill replicas first.

    There is one peak between ``lowest`` and ``highest`` prefill replicas: on its left prefill limits the rate, on its
    right decode does. So each step drops the third beside the lower one of two rates. ``point_of``: simulates a number
    of prefill replicas; its second argument is the highest rate so far.
    """
    points: dict[int, PressurePoint] = {}

    def rate_of(prefill: int) -> float:
        if prefill not in points:
            points[prefill] = point_of(prefill, max((p.requests_per_s for p in points.values()), default=None))
        return points[prefill].requests_per_s

    low, high = lowest, highest
    while high - low > 2:
        left, right = low + (high - low) // 3, high - (high - low) // 3
        if rate_of(left) < rate_of(right):
            low = left + 1
        elif right > left + 1:
            high = right - 1
        else:  # neighbours, which may have the same rate
            high = right
    # The rates are not exact, so a neighbour on each side is simulated too.
    for prefill in range(max(lowest, low - 1), min(highest, high + 1) + 1):
        rate_of(prefill)
    return [points[prefill] for prefill in sorted(points)]


def _splits(config: SimConfig, gpus: int) -> dict[int, int]:
    """Decode replicas by prefill replicas, for every split within the pools' limits at a ratio that is supported.

    Raises:
        ValueError: there is no such split.
    """
    prefill, decode = (config.groups[0].pool(role) for role in Role)
    most_prefill = (gpus - decode.gpus) // prefill.gpus
    if most_prefill < 1:
        raise ValueError(f"{gpus} GPUs are too few: a replica of each role takes {prefill.gpus + decode.gpus}")
    all_splits = {count: (gpus - count * prefill.gpus) // decode.gpus for count in range(1, most_prefill + 1)}
    splits = {
        p: d
        for p, d in all_splits.items()
        if PdRatio(p, d).is_supported and p <= prefill.highest_replicas and d <= decode.highest_replicas
    }
    if not splits:
        raise ValueError(
            f"{gpus} GPUs make no split at a supported P/D ratio that the pools' highest_replicas allow "
            f"({prefill.highest_replicas} and {decode.highest_replicas}): give {_default_gpus(config)}"
        )
    return splits
