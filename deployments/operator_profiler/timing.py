"""A call is timed as a burst: so many calls in one CUDA graph that the launch costs do not count."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch

from deployments.operator_profiler.meter import Meter

Call = Callable[[], Any]
# Most calls in one burst: a graph of some thousand kernels is still captured in milliseconds.
MAX_CALLS = 256
# Bursts longer than this are measured in fewer groups.
_LONG_BURST_US = 20_000.0
_LONG_BURST_GROUPS = 5
# Calls and loops on a CPU that are longer are measured once.
_LONG_LOOP_US = 100_000.0
# Below this share of the highest clock a point is timed once more: the GPU was still waking up.
_AWAKE_CLOCK_FRAC = 0.6


class DeviceLostError(RuntimeError):
    """The CUDA context answers no more; only a new process can go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Time of one call: quantiles over groups of calls, `repeats` calls in all."""

    median_us: float
    p10_us: float
    p90_us: float
    least_us: float
    repeats: int
    method: str
    sm_clock_mhz: float | None

    def cells(self) -> dict[str, Any]:
        """As cells of a row."""
        return {name: getattr(self, name) for name in TIMING_COLUMNS}


TIMING_COLUMNS = ("median_us", "p10_us", "p90_us", "repeats", "method", "sm_clock_mhz")


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """Calls that are launched as one; `method` says how: graph, or loop where the calls cannot be captured."""

    launch: Call
    calls: int
    method: str


class Timer(Protocol):
    """Times calls on one device."""

    def burst(self, calls: Sequence[Call], can_capture: bool = True) -> Burst:
        """Warm up, and join the calls, in turns, into one launch; a loop where they are not to be captured."""

    def marks_us(self, burst: Burst, count: int) -> list[float]:
        """Times before the first and after each of `count` bursts one after another, from any zero."""

    def time(self, calls: Sequence[Call], can_capture: bool = True) -> Timing:
        """Time of one call; the calls are variants of it that are used in turns."""

    def finish(self) -> None:
        """Wait for all work.

        Raises:
            DeviceLostError: The device answers no more.
        """


def new_event() -> torch.cuda.Event:
    """A CUDA event that keeps the time."""
    make: Any = torch.cuda.Event
    event: torch.cuda.Event = make(enable_timing=True)
    return event


def new_stream() -> torch.cuda.Stream:
    """A CUDA stream beside the default one."""
    make: Any = torch.cuda.Stream
    stream: torch.cuda.Stream = make()
    return stream


def calls_per_burst(call_us: float, variants: int, target_us: float) -> int:
    """Calls in a burst of about `target_us`: each variant equally often, at least once, at most MAX_CALLS in all."""
    wanted = min(MAX_CALLS, math.ceil(target_us / max(call_us, 1.0)))
    return max(variants, wanted // variants * variants)


def summary(samples_us: Sequence[float], repeats: int, method: str, sm_clock_mhz: float | None) -> Timing:
    """Quantiles of samples, each the mean of a group of calls."""
    p10, median, p90 = (float(value) for value in np.percentile(np.asarray(samples_us), (10, 50, 90)))
    return Timing(
        median_us=median,
        p10_us=p10,
        p90_us=p90,
        least_us=min(samples_us),
        repeats=repeats,
        method=method,
        sm_clock_mhz=sm_clock_mhz,
    )


class CudaTimer:
    """Times calls on one CUDA stream.

    Args:
        meter: Readings of the clock.
        target_us: Length of a burst and of a group.
        groups: Groups per point.
        stream: The stream; a new one by default.
    """

    def __init__(
        self, meter: Meter, *, target_us: float = 3000.0, groups: int = 9, stream: torch.cuda.Stream | None = None
    ) -> None:
        self.stream = new_stream() if stream is None else stream
        self._meter, self._target_us, self._groups = meter, target_us, groups
        highest = meter.max_sm_clock_mhz()
        self._awake_mhz = 0.0 if highest is None else highest * _AWAKE_CLOCK_FRAC

    def burst(self, calls: Sequence[Call], can_capture: bool = True) -> Burst:
        """Warm up, and capture the calls, in turns, in one CUDA graph; a loop of launches where that fails."""
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            for call in calls:
                call()
            marks = [new_event() for _ in range(2)]
            marks[0].record()
            for call in calls[:3]:
                call()
            marks[1].record()
            marks[1].synchronize()
            call_us = marks[0].elapsed_time(marks[1]) * 1e3 / len(calls[:3])
            count = calls_per_burst(call_us, len(calls), self._target_us)
            order = [calls[index % len(calls)] for index in range(count)]
            if can_capture:
                try:
                    return Burst(launch=self._capture(order).replay, calls=count, method="graph")
                except Exception:  # not every kernel may be captured; the loop below says so in its method
                    self.finish()
        return Burst(launch=lambda: [call() for call in order], calls=count, method="loop")

    def _capture(self, order: Sequence[Call]) -> torch.cuda.CUDAGraph:
        # torch.cuda.graph() would also empty the allocator's cache each time.
        graph = torch.cuda.CUDAGraph()
        pool = torch.cuda.graph_pool_handle()
        torch.cuda.synchronize()
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            for call in order:
                call()
        finally:
            graph.capture_end()
        return graph

    def marks_us(self, burst: Burst, count: int) -> list[float]:
        """Times before the first and after each of `count` bursts, in microseconds after the first."""
        with torch.cuda.stream(self.stream):
            marks = [new_event() for _ in range(count + 1)]
            marks[0].record()
            for mark in marks[1:]:
                burst.launch()
                mark.record()
            marks[-1].synchronize()
        return [marks[0].elapsed_time(mark) * 1e3 for mark in marks]

    def time(self, calls: Sequence[Call], can_capture: bool = True) -> Timing:
        """Median over groups of the mean time of a call; once more where the GPU was not yet awake."""
        burst = self.burst(calls, can_capture)
        found = self._time(burst)
        if found.sm_clock_mhz is not None and found.sm_clock_mhz < self._awake_mhz:
            found = self._time(burst)
        return found

    def _time(self, burst: Burst) -> Timing:
        burst_us = self.marks_us(burst, 2)
        one_us = max(burst_us[2] - burst_us[1], 1e-3)
        groups = self._groups if one_us < _LONG_BURST_US else min(self._groups, _LONG_BURST_GROUPS)
        rounds = max(1, round(self._target_us / one_us))
        with torch.cuda.stream(self.stream):
            marks = [new_event() for _ in range(groups + 1)]
            marks[0].record()
            for mark in marks[1:]:
                for _ in range(rounds):
                    burst.launch()
                mark.record()
            clock_mhz = self._meter.sm_clock_mhz()  # while the GPU works off the queue
            marks[-1].synchronize()
        calls = rounds * burst.calls
        samples = [first.elapsed_time(last) * 1e3 / calls for first, last in pairwise(marks)]
        return summary(samples, groups * calls, burst.method, clock_mhz)

    def finish(self) -> None:
        """Wait for all work.

        Raises:
            DeviceLostError: The device answers no more.
        """
        try:
            torch.cuda.synchronize()
        except Exception as error:
            raise DeviceLostError(str(error)) from error


class HostTimer:
    """Times calls on the CPU.

    Args:
        target_us: Length of a burst and of a group.
        groups: Groups per point; a burst longer than a tenth of a second is measured once.
        clock: Seconds; by default those of the wall.
    """

    def __init__(
        self, *, target_us: float = 300.0, groups: int = 3, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._target_us, self._groups, self._clock = target_us, groups, clock

    def burst(self, calls: Sequence[Call], can_capture: bool = True) -> Burst:
        """Warm up; a burst is a loop."""
        return self._burst(calls, self._first_us(calls))

    def _first_us(self, calls: Sequence[Call]) -> float:
        """Time of the last variant, after the first one has warmed up."""
        calls[0]()
        started_s = self._clock()
        calls[-1]()
        return (self._clock() - started_s) * 1e6

    def _burst(self, calls: Sequence[Call], call_us: float) -> Burst:
        count = calls_per_burst(call_us, len(calls), self._target_us)
        order = [calls[index % len(calls)] for index in range(count)]
        return Burst(launch=lambda: [call() for call in order], calls=count, method="host loop")

    def marks_us(self, burst: Burst, count: int) -> list[float]:
        """Times before the first and after each of `count` bursts, in microseconds of the host's clock."""
        marks = [self._clock() * 1e6]
        for _ in range(count):
            burst.launch()
            marks.append(self._clock() * 1e6)
        return marks

    def time(self, calls: Sequence[Call], can_capture: bool = True) -> Timing:
        """Median over groups of the mean time of a call."""
        first_us = self._first_us(calls)
        if first_us > _LONG_LOOP_US:
            return summary([first_us], 1, "host loop", None)
        burst = self._burst(calls, first_us)
        marks = self.marks_us(burst, 1)
        if marks[1] - marks[0] < _LONG_LOOP_US:
            marks = self.marks_us(burst, self._groups)
        samples = [(last - first) / burst.calls for first, last in pairwise(marks)]
        return summary(samples, len(samples) * burst.calls, burst.method, None)

    def finish(self) -> None:
        """Nothing is pending."""


def make_timer(device: str, meter: Meter, *, target_us: float = 3000.0, groups: int = 9) -> Timer:
    """The timer of a device: CUDA's, or the host's."""
    return HostTimer() if device == "cpu" else CudaTimer(meter, target_us=target_us, groups=groups)
