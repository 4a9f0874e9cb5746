"""Engines of known speed are found again on a machine that is slow for seconds at a time, and in little time."""

import asyncio
import math
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from autoscale.engines.form import decode_surface, ladder, prefill_curve, prompt_terms, step_terms
from autoscale.engines.repeats import between
from autoscale.engines.sampling import Survey, form_of
from deployments.profiler.pace import Pace
from deployments.profiler.points import Points
from deployments.profiler.rounds import MeasuringError, Track, measure_all, places_track, survey_track
from tests.deployments.profiler.slow_machine import SlowMachine
from tests.deployments.profiler.virtual_loop import virtual_time

_MAX_BATCH_TOKENS, _LONGEST_TOKENS, _LARGEST_BATCH, _KV_TOKENS = 2048, 4095, 32, 32_768
_SEEDS = range(10)


def tiny_prompt_s(tokens: int) -> float:
    return 0.006 * math.ceil(tokens / _MAX_BATCH_TOKENS) + 6e-5 * tokens + 4e-8 * tokens**2


def tiny_step_s(batch: int, context_tokens: int) -> float:
    return 0.005 + 2.5e-4 * batch + 3.5e-7 * batch * context_tokens


def gpu_prompt_s(tokens: int) -> float:
    """A short prompt takes the time of the weights; the matrices of a long one take longer."""
    return 0.012 * math.ceil(tokens / _MAX_BATCH_TOKENS) + math.hypot(0.012, 6e-5 * tokens) + 1e-9 * tokens**2


def gpu_step_s(batch: int, context_tokens: int) -> float:
    """Another kernel reads long contexts."""
    return 0.009 + 5e-5 * batch + 1.5e-7 * batch * context_tokens * (1.25 if context_tokens > 1500 else 1.0)


def bent_prompt_s(tokens: int) -> float:
    """Slower beyond 300 tokens, and a second step costs more."""
    return tiny_prompt_s(tokens) * (1.4 if tokens > 300 else 1.0) + (0.1 if tokens > _MAX_BATCH_TOKENS else 0.0)


def bent_step_s(batch: int, context_tokens: int) -> float:
    """Without a CUDA graph beyond a batch of 20."""
    return tiny_step_s(batch, context_tokens) * (1.5 if batch > 20 else 1.0)


def contexts(batch: int) -> tuple[int, ...]:
    longest = min(_LONGEST_TOKENS, _KV_TOKENS // max(6, batch)) - 96
    return 64, between(64, longest) or longest, longest


def tracks(machine: SlowMachine, rng: random.Random, *, has_pace: bool = True) -> list[Track]:
    """Both curves, and places left out of them."""
    pace = Pace(machine.measure_pace) if has_pace else None
    edges = (_MAX_BATCH_TOKENS, _MAX_BATCH_TOKENS + 1)
    prompts = Survey(
        terms=prompt_terms(_MAX_BATCH_TOKENS),
        axis=tuple(sorted({*ladder(16, _LONGEST_TOKENS, 1.7), *edges})),
        contexts=lambda tokens: (0,),
    )
    steps = Survey(terms=step_terms, axis=ladder(1, _LARGEST_BATCH, 1.7), contexts=contexts)
    lengths = [(rng.choice(range(16, _LONGEST_TOKENS)), 0) for _ in range(8)]
    batches = [rng.randint(1, _LARGEST_BATCH) for _ in range(8)]
    places = [(batch, rng.randint(64, contexts(batch)[-1])) for batch in batches]
    return [
        survey_track("e", "prefill", prompts, machine.measure_prompt, pace),
        survey_track("e", "decode", steps, machine.measure_step, pace),
        places_track("e", "prefill_left_out", lengths, machine.measure_prompt, pace),
        places_track("e", "decode_left_out", places, machine.measure_step, pace),
    ]


@pytest.mark.parametrize(
    ("prompt_s", "step_s", "most_s"),
    [(tiny_prompt_s, tiny_step_s, 240.0), (gpu_prompt_s, gpu_step_s, 240.0), (bent_prompt_s, bent_step_s, 480.0)],
    ids=["tiny", "gpu", "bent"],
)
async def test_a_slow_machine_does_not_hide_an_engine(
    prompt_s: Callable[[int], float], step_s: Callable[[int, int], float], most_s: float, tmp_path: Path
) -> None:
    errors: list[list[float]] = [[], []]
    for seed in _SEEDS:
        machine = SlowMachine(prompt_s, step_s, _KV_TOKENS, random.Random(seed))
        for found, of_run in zip(errors, await run_errors(machine, seed, tmp_path), strict=True):
            found += of_run
        assert machine.now_s < most_s  # the whole run, in the machine's time
    assert [float(np.quantile(each, 0.9)) < 0.1 for each in errors] == [True, True]


async def run_errors(
    machine: SlowMachine, seed: int, folder: Path, *, has_pace: bool = True
) -> tuple[list[float], list[float]]:
    """Errors of the two curves of a run at the places that were left out."""
    rng = random.Random(seed)
    prompts, steps, lengths, places = tracks(machine, rng, has_pace=has_pace)
    points = Points(folder / f"{seed}_{has_pace}.jsonl", {})
    await measure_all([prompts, steps, lengths, places], points, rng, lambda text: None, apart_s=0.0)
    curve = prefill_curve(form_of(prompt_terms(_MAX_BATCH_TOKENS), prompts.times), _MAX_BATCH_TOKENS)
    surface = decode_surface(form_of(step_terms, steps.times))
    return (
        [abs(curve.seconds_for(place[0]) / machine.prompt_s(place[0]) - 1.0) for place in lengths.times],
        [abs(surface.seconds_for(*place) / machine.step_s(*place) - 1.0) for place in places.times],
    )


async def test_a_machine_that_becomes_slower_does_not_bend_the_curves(tmp_path: Path) -> None:
    errors: dict[bool, list[float]] = {True: [], False: []}
    for has_pace, found in errors.items():
        for seed in _SEEDS:
            machine = SlowMachine(tiny_prompt_s, tiny_step_s, _KV_TOKENS, random.Random(seed), slower_from_s=25.0)
            prompt_errors, step_errors = await run_errors(machine, seed, tmp_path, has_pace=has_pace)
            found += prompt_errors + step_errors
    assert float(np.quantile(errors[True], 0.9)) < 0.1
    assert float(np.quantile(errors[False], 0.9)) > 0.1  # what the pace is for


async def test_a_run_that_goes_on_measures_nothing_twice(tmp_path: Path) -> None:
    def machine() -> SlowMachine:
        return SlowMachine(tiny_prompt_s, tiny_step_s, _KV_TOKENS, random.Random(3))

    path, first, again = tmp_path / "points.jsonl", machine(), machine()
    before = tracks(first, random.Random(3))
    await measure_all(before, Points(path, {}), random.Random(3), lambda text: None, apart_s=0.0)
    after = tracks(again, random.Random(3))
    await measure_all(after, Points(path, {}), random.Random(4), lambda text: None, apart_s=0.0)
    assert again.now_s == 0.0
    assert [{place: sorted(each) for place, each in track.times.items()} for track in after] == [
        {place: sorted(each) for place, each in track.times.items()} for track in before
    ]


async def test_an_engine_that_ends_is_named_and_the_next_run_goes_on(tmp_path: Path) -> None:
    calls = 0

    async def dies(place: tuple[int, int]) -> float:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("EngineCore encountered an issue")
        return 0.01 * place[0]

    def track() -> Track:
        return places_track("decode", "decode", [(1, 64), (2, 64)], dies)

    path = tmp_path / "points.jsonl"
    message = (
        r"the decode engine failed at decode \d x 64 \(RuntimeError: EngineCore .*: run the command again, .* the 2"
    )
    with pytest.raises(MeasuringError, match=message):
        await measure_all([track()], Points(path, {}), random.Random(0), lambda text: None, apart_s=0.0)
    points = Points(path, {})
    await measure_all([again := track()], points, random.Random(0), lambda text: None, apart_s=0.0)
    assert points.reused == 2 and calls == 7  # of 2 x 3 rounds two were stored, one failed
    assert again.seconds((2, 64)) == 0.02


async def test_progress_has_the_number_of_measurements_and_the_time_left(tmp_path: Path) -> None:
    async def measure(place: tuple[int, int]) -> float:
        return 1.0

    told: list[str] = []
    track = places_track("link", "handoff", [(128, 0), (512, 0)], measure)
    await measure_all([track], Points(tmp_path / "p.jsonl", {}), random.Random(0), told.append, apart_s=0.0)
    assert len(told) == 6
    assert told[0].startswith("0 of at least 6 measurements: link, handoff ")
    assert told[-1].startswith("5 of at least 6 measurements, 0 s left: link, handoff ")


def test_repeats_of_a_place_are_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def measure(place: tuple[int, int]) -> float:
        return 1.0

    async def main() -> None:
        track = places_track("link", "handoff", [(128, 0), (512, 0)], measure)
        points = Points(tmp_path / "points.jsonl", {})
        await measure_all([track], points, random.Random(0), lambda text: None, apart_s=5.0)
        assert asyncio.get_running_loop().time() == 10.0  # three rounds of two places that take no time

    with virtual_time(monkeypatch, ("deployments.profiler.rounds",)) as run:
        run(main())
