"""The profile of an engine whose speed is known is that engine's profile."""

import random
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autoscale.engines.profile import EngineProfile
from tests.deployments.profiler.virtual_loop import virtual_time

pytestmark = pytest.mark.vllm

Run = Callable[[Coroutine[Any, Any, None]], None]
PROFILES = Path(__file__).parents[3] / "configs" / "profiles"
_FORM_FRAC = 0.06  # the form may miss the engine by its tolerance, and a line between its points by little
# Of the emulated engine: it is as fast as the H100's profile says, and has room for a small batch.
_MAX_RUNNING, _KV_TOKENS, _LONGEST_TOKENS = 2, 4096, 1024


@pytest.fixture(name="run")
def _run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    with virtual_time(monkeypatch) as run:
        yield run


@pytest.fixture(name="engine")
def _engine() -> EngineProfile:
    profile = EngineProfile.load(PROFILES / "h200_llama8b_fp8_tp1.json")
    document = profile.model_dump() | {
        "max_running": _MAX_RUNNING,
        "kv_tokens": _KV_TOKENS,
        "block_tokens": 16,
        "max_batch_tokens": 2048,
        "mixed_prefill_frac": 1.5,
        "handoff": {"base_s": 0.01, "kv_bytes_per_token": 1000.0, "bytes_per_s": 2e7},
    }
    return EngineProfile.model_validate(document)


def bench(engine: EngineProfile, max_running: int = _MAX_RUNNING) -> Any:
    """An emulated engine to be measured."""
    from deployments.emulated.client import EmulatedClient
    from deployments.pool_config import EmulatorConfig
    from deployments.profiler.bench import Bench

    config = EmulatorConfig.model_validate({"profile": str(PROFILES / "cpu_tiny.json"), "chunk_s": 0.0})
    client: Any = EmulatedClient(engine, config, max_model_len=_LONGEST_TOKENS)
    client.vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(get_vocab_size=lambda: 1000, max_model_len=_LONGEST_TOKENS),
        cache_config=SimpleNamespace(num_gpu_blocks=_KV_TOKENS // 16, block_size=16),
        scheduler_config=SimpleNamespace(max_num_seqs=max_running, max_num_batched_tokens=2048),
    )
    client.start()
    return Bench(client, "decode", random.Random(0))


async def measured(tracks: list[Any], path: Path) -> None:
    from deployments.profiler.points import Points
    from deployments.profiler.rounds import measure_all

    await measure_all(tracks, Points(path, {}), random.Random(0), lambda text: None, apart_s=0.0)


def test_the_curves_are_those_of_the_engine(engine: EngineProfile, tmp_path: Path, run: Run) -> None:
    async def main() -> None:
        from deployments.profiler.curves import EngineTracks
        from deployments.profiler.points import Timing

        alone = bench(engine)
        await alone.warm_up()
        found = EngineTracks.of(alone, alone)
        await measured([found.prompts, found.steps, found.beside], tmp_path / "points.jsonl")
        curve, surface = found.prefill_curve(), found.decode_surface()
        for tokens in (20, 100, 400, 1000):
            assert curve.seconds_for(tokens) == pytest.approx(engine.prefill.seconds_for(tokens), rel=_FORM_FRAC)
        assert surface.batch[0] == 1 and surface.batch[-1] == _MAX_RUNNING
        for batch, context in ((1, 100), (2, 500), (2, 800)):
            assert surface.seconds_for(batch, context) == pytest.approx(
                engine.decode.seconds_for(batch, context), rel=_FORM_FRAC
            )
        assert found.mixed_prefill_frac(engine.prefill) == pytest.approx(engine.mixed_prefill_frac, rel=0.1)
        # Ten places of each curve, at which the engine takes 0.8 to 0.9 of the curve's time, and twice as long once.
        for number, tokens in enumerate(range(100, 1100, 100)):
            factor = 0.5 if number == 9 else 0.8 + 0.01 * number
            found.prompts_left_out.timings[tokens, 0] = [
                Timing(9.0),
                Timing(curve.seconds_for(tokens) / (1.0 + factor)),
            ]
            found.steps_left_out.timings[2, tokens] = [Timing(surface.seconds_for(2, tokens) / 1.2), Timing(9.0)]
        left_out = found.left_out(curve, surface)
        assert left_out.points == 20

    run(main())


def test_an_engine_for_one_request_is_measured(engine: EngineProfile, tmp_path: Path, run: Run) -> None:
    async def main() -> None:
        from deployments.profiler.curves import EngineTracks

        alone = bench(engine.model_copy(update={"max_running": 1}), max_running=1)
        await measured([(tracks := EngineTracks.of(alone, alone)).steps, tracks.beside], tmp_path / "points.jsonl")
        surface = tracks.decode_surface()
        assert surface.batch == (1,)
        assert surface.seconds_for(1, 300) == pytest.approx(engine.decode.seconds_for(1, 300), rel=_FORM_FRAC)

    run(main())


def test_handoffs_and_transfers_are_lines(engine: EngineProfile, tmp_path: Path, run: Run) -> None:
    async def main() -> None:
        from deployments.profiler.curves import LinkTracks

        alone = bench(engine)
        links = LinkTracks(alone, alone, alone.client.stats)
        await links.warm_up()
        await measured([links.handoffs, links.pulls], tmp_path / "points.jsonl")
        kv_bytes = engine.handoff.kv_bytes_per_token
        assert links.handoff(kv_bytes).seconds_for(800) == pytest.approx(engine.handoff.seconds_for(800), rel=0.1)
        # The emulated engine reports the time without the base.
        assert links.link(kv_bytes).bytes_per_s == pytest.approx(engine.handoff.bytes_per_s, rel=0.01)
        assert links.link(kv_bytes).base_s == pytest.approx(0.0, abs=1e-3)

    run(main())


def test_a_prompt_whose_kv_was_not_pulled_is_an_error(engine: EngineProfile, run: Run) -> None:
    async def main() -> None:
        from deployments.profiler.engines import pull_s

        alone = bench(engine)
        silent = SimpleNamespace(load=SimpleNamespace(pull_s=0.0))
        with pytest.raises(RuntimeError, match="reports no pull of KV"):
            await pull_s(alone.client, alone.client, silent, alone.prompt(64))

    run(main())


def test_requests_that_do_not_decode_together_are_an_error(engine: EngineProfile, run: Run) -> None:
    async def main() -> None:
        from deployments.profiler.engines import step_s

        alone = bench(engine.model_copy(update={"max_running": 1}))
        with pytest.raises(RuntimeError, match="2 requests did not decode together"):
            await step_s(alone.client, [alone.prompt(64), alone.prompt(64)])

    run(main())


def test_the_context_is_met_in_the_middle_and_a_longer_one_begins_as_a_shorter_one(
    engine: EngineProfile, run: Run
) -> None:
    async def main() -> None:
        alone = bench(engine)
        short, long = alone._prompts(2, 100), alone._prompts(2, 500)
        assert [len(each) for each in (*short, *long)] == [76, 76, 476, 476]  # 48 steps are measured
        assert [each[:76] for each in long] == short
        assert short[0] != short[1]

    run(main())
