"""Interference I(d, v): how much slower an operator gets beside another one on the same GPU, in two streams."""

import math
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import Any

import torch

from deployments.operator_profiler.meter import Meter
from deployments.operator_profiler.timing import Burst, CudaTimer, HostTimer, Timer, new_event
from tests.lab.operators.layer import Layer
from tests.lab.operators.shapes import Point
from tests.lab.operators.tables import POINT_COLUMNS, Skipped, Table, point_cells

PAIR_COLUMNS = (
    *POINT_COLUMNS,
    *(f"neighbour_{name}" for name in POINT_COLUMNS),
    "alone_us",
    "beside_us",
    "interference_ratio",
    "repeats",
    "window_ms",
    "method",
    "sm_clock_mhz",
)
# Bursts of a pair are short, so that many end inside the window.
BURST_US = 1500.0
_LEAST_BURSTS = 8
# An operator that is starved may end few bursts; fewer than this say nothing.
_LEAST_INSIDE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One operator, ready to run on its own stream, and its time alone."""

    point: Point
    burst: Burst
    timer: Timer
    alone_us: float
    bursts: int


def mean_inside(marks_us: Sequence[float], begin_us: float, end_us: float) -> tuple[float, int]:
    """Mean length of the bursts that lie wholly inside a window, and their number; marks are ends of bursts.

    Raises:
        ValueError: Fewer than two lie inside.
    """
    first, last = bisect_left(marks_us, begin_us), bisect_right(marks_us, end_us) - 1
    if last - first < _LEAST_INSIDE:
        raise ValueError(
            f"only {max(0, last - first)} bursts lie inside the common window of {end_us - begin_us:.0f} us"
        )
    return (marks_us[last] - marks_us[first]) / (last - first), last - first


def run_streams(one: Lane, other: Lane) -> tuple[list[float], list[float]]:
    """Both lanes at once on two CUDA streams; marks of each in microseconds of a common clock."""
    base = new_event()
    torch.cuda.synchronize()
    base.record()
    base.synchronize()
    marks: tuple[list[Any], list[Any]] = ([], [])
    # Launched in the order in which they would run alone, so that neither queue is empty while the other works.
    turns = sorted(
        (index * lane.alone_us * lane.burst.calls, which)
        for which, lane in enumerate((one, other))
        for index in range(lane.bursts)
    )
    for _, which in turns:
        lane = (one, other)[which]
        assert isinstance(lane.timer, CudaTimer)
        with torch.cuda.stream(lane.timer.stream):
            if not marks[which]:
                marks[which].append(new_event())
                marks[which][0].record()
            lane.burst.launch()
            mark = new_event()
            mark.record()
            marks[which].append(mark)
    torch.cuda.synchronize()
    first, second = ([base.elapsed_time(mark) * 1e3 for mark in lane] for lane in marks)
    return first, second


def run_threads(one: Lane, other: Lane) -> tuple[list[float], list[float]]:
    """Both lanes at once in two threads of the host, for dry runs."""
    found: list[list[float]] = [[], []]

    def run(which: int, lane: Lane) -> None:
        found[which] = lane.timer.marks_us(lane.burst, lane.bursts)

    threads = [threading.Thread(target=run, args=item) for item in enumerate((one, other))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found[0], found[1]


def _lane(layer: Layer, timer: Timer, point: Point, window_us: float) -> Lane:
    burst = timer.burst(layer.calls(point))
    marks = timer.marks_us(burst, 2)
    bursts = max(_LEAST_BURSTS, math.ceil(window_us / max(marks[2] - marks[1], 1.0)))
    # Alone it runs as long as beside another, at the clock that this gives.
    marks = timer.marks_us(burst, bursts)
    return Lane(
        point=point,
        burst=burst,
        timer=timer,
        alone_us=(marks[-1] - marks[1]) / (bursts - 1) / burst.calls,
        bursts=bursts,
    )


def _rows(one: Lane, other: Lane, meter: Meter, run: Callable[..., Any], method: str) -> list[dict[str, Any]]:
    marks = run(one, other)
    clock_mhz = meter.sm_clock_mhz()
    begin_us, end_us = max(lane[0] for lane in marks), min(lane[-1] for lane in marks)
    rows = []
    for lane, neighbour, own in ((one, other, marks[0]), (other, one, marks[1])):
        burst_us, count = mean_inside(own, begin_us, end_us)
        beside_us = burst_us / lane.burst.calls
        rows.append(
            point_cells(lane.point)
            | point_cells(neighbour.point, "neighbour_")
            | {
                "alone_us": lane.alone_us,
                "beside_us": beside_us,
                "interference_ratio": beside_us / lane.alone_us,
                "repeats": count * lane.burst.calls,
                "window_ms": (end_us - begin_us) / 1e3,
                "method": method,
                "sm_clock_mhz": clock_mhz,
            }
        )
    return rows if one.point != other.point else rows[:1]


@dataclass(slots=True, kw_only=True)
class PairsRoom:
    """What a run of pairs needs: where rows go, and how long it may take."""

    device: str
    meter: Meter
    table: Table
    skipped: Skipped
    deadline_s: float
    window_us: float
    say: Callable[[str], None]


def _lanes(room: PairsRoom, points: Sequence[Point]) -> dict[Point, Lane]:
    """Each point on one stream and with its own tensors."""
    timer: Timer = HostTimer() if room.device == "cpu" else CudaTimer(room.meter, target_us=BURST_US)
    layer, lanes = Layer(room.device), {}
    for point in points:
        try:
            lanes[point] = _lane(layer, timer, point, room.window_us)
        except Exception as error:
            timer.finish()
            room.skipped.note("pairs", point, error)
    return lanes


def measure_pairs(room: PairsRoom, points: Sequence[Point]) -> None:
    """All pairs of the points, an operator with itself included; a pair that fails is a row of skipped points."""
    # Two captures of each point: CUDA never runs one graph twice at the same time.
    first, second = _lanes(room, points), _lanes(room, points)
    run, method = (run_threads, "threads") if room.device == "cpu" else (run_streams, "two streams")
    timer = HostTimer() if room.device == "cpu" else CudaTimer(room.meter)
    for one, other in combinations_with_replacement(points, 2):
        if one not in first or other not in second:
            continue
        if time.monotonic() > room.deadline_s:
            room.skipped.note("pairs", one, f"no time left, beside {other.label()}")
            continue
        try:
            for row in _rows(first[one], second[other], room.meter, run, method):
                room.table.add(row)
        except Exception as error:
            timer.finish()
            room.skipped.note("pairs", one, f"beside {other.label()}: {error}")
        room.say(f"pairs: {one.label()} beside {other.label()}")
