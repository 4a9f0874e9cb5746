"""Measures the series of a model within a budget, in rounds, and goes on where an earlier run stopped."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from autoscale.engines.repeats import LEAST_ROUNDS, least_time
from autoscale.operators.device import DeviceFacts
from autoscale.operators.graph import OperatorGraph
from autoscale.operators.kinds import wide_dtype
from deployments.operator_profiler.device import ProfilingError, device_name, free_bytes
from deployments.operator_profiler.meter import open_meter
from deployments.operator_profiler.pace import HostPace, host_clock
from deployments.operator_profiler.series import Series
from deployments.operator_profiler.survey import Place, expected, next_places, order
from deployments.operator_profiler.tensors import Tensors
from deployments.operator_profiler.timing import CudaTimer, DeviceLostError, HostTimer, Timer
from deployments.profiler.pace import undisturbed_s
from deployments.profiler.points import Points, Timing

POINTS_FILE = "points.jsonl"
# Share of the free memory that a point may take.
_MEMORY_FRAC = 0.6
# One call may take this share of the budget; a longer one is left out, and the table's end stands for it.
_CALL_FRAC = 1 / 200
# Length of a burst of calls on a CPU, microseconds.
_BURST_US = 6000.0
_US = 1e-6

OnProgress = Callable[[str], None]


@dataclass(slots=True)
class Survey:
    """A series while it is measured: timings by place, and the places that are left out, with the reason."""

    series: Series
    timings: dict[Place, list[Timing]] = field(default_factory=dict)
    left_out: dict[Place, str] = field(default_factory=dict)


class Run:
    """One run on one device.

    Args:
        points: Where measurements are stored, with those of earlier runs.
        facts: Of the device.
        tensors: Makes the calls.
        dtype: Of the weights.
        budget_s: Time for all measurements of this run.
    """

    def __init__(self, points: Points, facts: DeviceFacts, tensors: Tensors, dtype: str, budget_s: float) -> None:
        self.points = points
        self._facts, self._device, self._budget_s = facts, facts.kind, budget_s
        self._room_bytes = room_bytes(self._device)
        self._dtype, self._tensors = wide_dtype(dtype), tensors
        self._timer: Timer = (
            HostTimer(target_us=_BURST_US, clock=host_clock)
            if self._device == "cpu"
            else CudaTimer(open_meter(self._device))
        )
        self._paces_s: list[float] = []
        self._pace = HostPace() if self._device == "cpu" else None  # a GPU is not shared
        self.surveys: list[Survey] = []
        self.is_complete = False

    def measure(self, series: Sequence[Series], on_progress: OnProgress) -> None:
        """Measure in rounds until nothing is due or the budget is over.

        Raises:
            ProfilingError: an operator does not fit into the memory, or the device failed.
        """
        self.surveys = [self._survey(each) for each in series]
        end_s = time.monotonic() + self._budget_s
        while due := [(survey, place) for survey in self.surveys for place in self._due(survey)]:
            total = sum(
                expected(each.timings, [place for owner, place in due if owner is each]) for each in self.surveys
            )
            for survey, place in due:
                left_s = end_s - time.monotonic()
                if left_s <= 0.0:
                    return
                done = sum(len(each) for one in self.surveys for each in one.timings.values())
                count = f"{done} of at least {total} measurements, at most {left_s:.0f} s left"
                on_progress(f"{count}: {_text(survey, place)}")
                self._add(survey, place)
        self.is_complete = True

    def rows(self) -> Iterator[tuple[str, tuple[str | float, ...]]]:
        """All measured points: the table, and its row."""
        for survey in self.surveys:
            times = self._times(survey)
            for outer, inner in sorted(times, key=order):
                sizes = (inner,) if outer is None else (outer, inner)
                yield survey.series.table, (*survey.series.key, *sizes, least_time(times[outer, inner]) / _US)

    def _survey(self, series: Series) -> Survey:
        """A series with the timings of earlier runs."""
        if series.weight_bytes > self._room_bytes:
            raise ProfilingError(
                f"{series.operator} has {series.weight_bytes / 1e9:.2f} GB of weights, and only "
                f"{self._room_bytes / 1e9:.2f} GB may be used on {self._facts.name}: free memory, or give a larger --tp"
            )
        survey = Survey(series)
        start = (series.table, *series.key)
        for place, timing in self.points.timings.items():
            if place[: len(start)] == start:
                outer, inner, _ = place[len(start) :]
                survey.timings.setdefault((outer, inner), []).append(timing)
                self._note(timing)
        return survey

    def _due(self, survey: Survey) -> list[Place]:
        """What is due next, without places that are too large."""
        while True:
            due = next_places(survey.series, self._times(survey), frozenset(survey.left_out))
            too_large = {place: reason for place in due if (reason := self._reason(survey, place))}
            if not too_large:
                return due
            survey.left_out |= too_large

    def _reason(self, survey: Survey, place: Place) -> str | None:
        """Why a place cannot be measured."""
        if survey.timings.get(place):
            return None
        work = survey.series.work(place[0] or 0, place[1])
        facts = self._facts
        if work.traffic_bytes > self._room_bytes:
            return f"needs {work.traffic_bytes / 1e9:.1f} GB of memory"
        flops_per_s = facts.reached_flops_per_s[self._dtype]
        seconds = max(work.flops / flops_per_s, work.traffic_bytes / facts.reached_bytes_per_s)
        is_first = place[1] == survey.series.inner[0]
        if seconds > _CALL_FRAC * self._budget_s and not is_first:
            return f"takes about {seconds:.1f} s, more than {_CALL_FRAC:.1%} of the budget"
        return None

    def _add(self, survey: Survey, place: Place) -> None:
        series, timings = survey.series, survey.timings.setdefault(place, [])
        try:
            before_s = self._pace_s()
            self._tensors.give_back()
            found = self._timer.time(series.calls(self._tensors, place[0] or 0, place[1]))
            self._timer.finish()
        except DeviceLostError as error:
            raise ProfilingError(f"the GPU failed at {_text(survey, place)} ({error}): run again, it goes on") from None
        except (RuntimeError, NotImplementedError) as error:  # no memory, or no kernel for the size
            del survey.timings[place]
            survey.left_out[place] = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            self._tensors.drop()
            return
        pace_s = None if before_s is None else min(before_s, self._pace_s() or before_s)
        # On a shared CPU noise only adds to a time.
        time_us = found.median_us if self._pace is None else found.least_us
        timing = Timing(time_us * _US, pace_s)
        timings.append(timing)
        self._note(timing)
        self.points.add((series.table, *series.key, *place, len(timings)), timing)

    def _pace_s(self) -> float | None:
        return None if self._pace is None else self._pace.seconds()

    def _note(self, timing: Timing) -> None:
        if timing.pace_s is not None:
            self._paces_s.append(timing.pace_s)

    def _times(self, survey: Survey) -> Mapping[Place, list[float]]:
        """Seconds by place, as on an undisturbed machine."""
        return {
            place: [undisturbed_s(each, self._paces_s) for each in timings]
            for place, timings in survey.timings.items()
            if timings
        }


def room_bytes(device: str) -> float:
    """Memory that a point may take."""
    return _MEMORY_FRAC * free_bytes(device)


def identity(graph: OperatorGraph, model: str, device: str, dtype: str, library: str) -> dict[str, Any]:
    """What makes points those of one run: others are refused by name."""
    return {
        "model": model,
        "shape": asdict(graph.shape),
        "device": device_name(device),
        "dtype": dtype,
        "kernels": library,
        "torch": torch.__version__,
        "threads": torch.get_num_threads() if device == "cpu" else 0,
    }


def repeats(surveys: Sequence[Survey]) -> dict[int, int]:
    """Number of points by number of rounds."""
    found: dict[int, int] = {}
    for survey in surveys:
        for timings in survey.timings.values():
            found[len(timings)] = found.get(len(timings), 0) + 1
    return dict(sorted(found.items()))


def unrepeated(surveys: Sequence[Survey]) -> int:
    """Points with fewer rounds than they need."""
    return sum(len(timings) < LEAST_ROUNDS for survey in surveys for timings in survey.timings.values())


def _text(survey: Survey, place: Place) -> str:
    series = survey.series
    sizes = " x ".join(str(each) for each in place if each)
    return f"{series.operator} {' '.join(map(str, series.key))}, {sizes}"
