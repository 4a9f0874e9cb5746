"""The profile of an engine whose speed is known is that engine's profile."""

import random
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autoscale.engines.profile import EngineProfile

pytestmark = pytest.mark.vllm

PROFILES = Path(__file__).parents[3] / "configs" / "profiles"
# Of the emulated engine: it is as fast as the H100's profile says, and has room for a small batch.
_MAX_RUNNING, _KV_TOKENS, _LONGEST_TOKENS = 4, 4096, 1024


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


@pytest.fixture(name="bench")
async def _bench(engine: EngineProfile, tmp_path: Path) -> AsyncIterator[Any]:
    from deployments.emulated.client import EmulatedClient
    from deployments.pool_config import EmulatorConfig
    from deployments.profiler.curves import Bench
    from deployments.profiler.points import Points

    config = EmulatorConfig.model_validate({"profile": str(PROFILES / "cpu_tiny.json"), "chunk_s": 0.0})
    client: Any = EmulatedClient(engine, config, max_model_len=_LONGEST_TOKENS)
    client.vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(get_vocab_size=lambda: 1000, max_model_len=_LONGEST_TOKENS),
        cache_config=SimpleNamespace(num_gpu_blocks=_KV_TOKENS // 16, block_size=16),
        scheduler_config=SimpleNamespace(max_num_seqs=_MAX_RUNNING, max_num_batched_tokens=2048),
    )
    client.start()
    points = Points(tmp_path / "points.jsonl", {})
    yield Bench(client, "decode", points, random.Random(0), lambda text: None)
    client._task.cancel()


async def test_prompts_take_the_times_of_the_engine(bench: Any, engine: EngineProfile) -> None:
    curve = await bench.prefill_curve()
    for tokens in (20, 100, 400, 1000):
        assert curve.seconds_for(tokens) == pytest.approx(engine.prefill.seconds_for(tokens), rel=0.25)
    assert len(await bench.left_out_prefill(curve)) == 5


async def test_steps_take_the_times_of_the_engine(bench: Any, engine: EngineProfile) -> None:
    surface = await bench.decode_surface()
    assert surface.batch[0] == 1 and surface.batch[-1] == _MAX_RUNNING
    for batch, context in ((1, 100), (2, 500), (4, 800)):
        assert surface.seconds_for(batch, context) == pytest.approx(engine.decode.seconds_for(batch, context), rel=0.25)


async def test_a_prompt_costs_the_streams_beside_it_what_the_engine_takes(bench: Any, engine: EngineProfile) -> None:
    frac = await bench.mixed_prefill_frac(engine.prefill, 200)
    assert frac == pytest.approx(engine.mixed_prefill_frac, rel=0.3)


async def test_handoffs_are_a_line(bench: Any, engine: EngineProfile, tmp_path: Path) -> None:
    from deployments.profiler.curves import handoff
    from deployments.profiler.points import Points

    line = await handoff(bench, bench, Points(tmp_path / "handoff.jsonl", {}), 1000.0)
    assert line.seconds_for(800) == pytest.approx(engine.handoff.seconds_for(800), rel=0.4)
