"""Measures many places in rounds, so that the repeats of one place are spread over time, and tells how far it is."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from autoscale.engines.form import Place
from autoscale.engines.repeats import LEAST_AGREED_ROUNDS, LEAST_ROUNDS, is_settled
from autoscale.engines.sampling import Survey, Times, place_times
from deployments.profiler.pace import Pace
from deployments.profiler.points import Points, Timing

OnProgress = Callable[[str], None]
Measure = Callable[[Place], Awaitable[float]]

# Least time between two measurements of one place, seconds: about as long as a shared machine is slow at a time.
_APART_S = 5.0


@dataclass(slots=True)
class Track:
    """One kind of measurement on one engine.

    Attributes:
        engine: name of the engine, in messages and stored points.
        kind: what is measured, such as ``prefill``.
        measure: measures a place once, seconds.
        next_places: the places of the next round.
        least_rounds: rounds in which each place is measured at least.
        pace: of the engine; ``None``: its times are taken as they are.
        timings: measurements by place, one for each round.
    """

    engine: str
    kind: str
    measure: Measure
    next_places: Callable[[Times], list[Place]]
    least_rounds: int
    pace: Pace | None = None
    timings: dict[Place, list[Timing]] = field(default_factory=dict)

    @property
    def times(self) -> dict[Place, list[float]]:
        """Seconds by place, one for each round, as on an undisturbed machine."""
        pace = self.pace
        return {
            place: [each.seconds if pace is None else pace.undisturbed_s(each) for each in timings]
            for place, timings in self.timings.items()
        }

    def seconds(self, place: Place) -> float:
        """The time of a place."""
        return place_times(self.times)[place]

    def expected(self) -> int:
        """Measurements that this track takes at least, with those that are done."""
        places = {*self.timings, *self.next_places(self.times)}
        return sum(max(self.least_rounds, len(self.timings.get(place, ()))) for place in places)

    async def add(self, place: Place, points: Points) -> None:
        """Measure a place, or take its stored timing, for one more round."""
        timings = self.timings.setdefault(place, [])
        key = (self.engine, self.kind, *place, len(timings) + 1)
        timing = await points.measured(key, lambda: self._timing(place))
        timings.append(timing)
        if self.pace is not None:
            self.pace.note(timing)

    async def _timing(self, place: Place) -> Timing:
        if self.pace is None:
            return Timing(await self.measure(place))
        return await self.pace.beside(lambda: self.measure(place))


def survey_track(engine: str, kind: str, survey: Survey, measure: Measure, pace: Pace | None = None) -> Track:
    """A curve, measured where it bends."""
    return Track(engine, kind, measure, survey.next_places, LEAST_ROUNDS, pace)


def places_track(engine: str, kind: str, places: Sequence[Place], measure: Measure, pace: Pace | None = None) -> Track:
    """Some places, each measured until three of its times agree."""
    return Track(engine, kind, measure, partial(_unsettled, places), LEAST_AGREED_ROUNDS, pace)


def _unsettled(places: Sequence[Place], times: Times) -> list[Place]:
    return [place for place in places if not is_settled(times.get(place, ()))]


class MeasuringError(ValueError):
    """An engine failed while it was measured."""


async def measure_all(
    tracks: Sequence[Track], points: Points, rng: random.Random, on_progress: OnProgress, apart_s: float = _APART_S
) -> None:
    """Measure all places of all tracks, round by round.

    Args:
        tracks: what to measure; their times are added.
        points: where measured times are stored.
        rng: the order of a round.
        on_progress: called before each measurement.
        apart_s: least time between two measurements of one place, seconds.

    Raises:
        MeasuringError: an engine failed.
    """
    progress, last_s = _Progress(points, on_progress), dict[tuple[str, str, Place], float]()
    while due := [(track, place) for track in tracks for place in track.next_places(track.times)]:
        rng.shuffle(due)
        due.sort(key=lambda each: each[1][1])  # by context: the prefix cache has the beginning of a longer one
        expected = sum(track.expected() for track in tracks)
        for track, place in due:
            progress.tell(track, place, sum(len(each) for one in tracks for each in one.timings.values()), expected)
            before, key = len(points.timings), (track.engine, track.kind, place)
            if key in last_s:
                await asyncio.sleep(max(0.0, last_s[key] + apart_s - time.monotonic()))
            try:
                await track.add(place, points)
            except Exception as error:
                raise MeasuringError(
                    f"the {track.engine} engine failed at {_text(track, place)} ({type(error).__name__}: {error}): run "
                    f"the command again, it goes on with the {len(points.timings)} measurements in {points.path}"
                ) from error
            if len(points.timings) > before:  # it was measured now
                last_s[key] = time.monotonic()


class _Progress:
    """How far a run is, and how long the rest takes at the pace so far."""

    def __init__(self, points: Points, on_progress: OnProgress) -> None:
        self._points, self._on_progress = points, on_progress
        self._began_s, self._at_begin = time.monotonic(), len(points.timings)

    def tell(self, track: Track, place: Place, done: int, expected: int) -> None:
        measured_now = len(self._points.timings) - self._at_begin
        text = f"{done} of at least {expected} measurements"
        if measured_now:
            left_s = (time.monotonic() - self._began_s) / measured_now * max(1, expected - done)
            text += f", {left_s:.0f} s left"
        self._on_progress(f"{text}: {track.engine}, {_text(track, place)}")


def _text(track: Track, place: Place) -> str:
    return f"{track.kind.replace('_', ' ')} {' x '.join(str(each) for each in place if each)}"
