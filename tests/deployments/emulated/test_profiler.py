"""Which engines can be profiled; the profiler's measurements are in configs/profiles/cpu_tiny.json."""

import asyncio
import os
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autoscale.engines.profile import EngineProfile
from deployments.config import ModelConfig, ServiceConfig
from deployments.pool_config import GroupConfig
from kvtransfer.connector import ConnectorConfig
from kvtransfer.topology import Role

PROFILES = Path(__file__).parents[3] / "configs" / "profiles"


@pytest.mark.vllm
def test_an_emulated_engine_is_not_profiled() -> None:
    from deployments.emulated.profiler import profile

    emulated = {"emulator": {"profile": str(PROFILES / "cpu_tiny.json")}}
    group = GroupConfig.model_validate({"name": "g0", "prefill": {}, "decode": emulated})
    service = ServiceConfig(model=ModelConfig(id="m", source="org/m"), groups=(group,))
    with pytest.raises(ValueError, match="give a config with real engines"):
        profile("x", service, group, kv_transfer=ConnectorConfig(), on_progress=lambda what: None)


def test_the_tiny_models_profile_is_measured_and_fits_its_config() -> None:
    profile = EngineProfile.load(PROFILES / "cpu_tiny.json")
    assert (profile.kv_tokens, profile.max_running, profile.block_tokens) == (32_768, 32, 32)
    # Keys and values of four layers with two heads of 64, float32 (serve_app/local/tiny_model.py).
    assert profile.handoff.kv_bytes_per_token == 4096
    assert {source.kind for source in profile.sources if source.part in ("prefill", "decode", "handoff")} == {
        "measured"
    }


@pytest.mark.vllm
async def test_each_worker_of_an_engine_on_cpus_has_cores_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from deployments.emulated import profiler
    from deployments.pool_config import RoleConfig

    monkeypatch.setattr(profiler, "os", SimpleNamespace(environ=(environ := dict(os.environ))))
    monkeypatch.setattr(profiler, "CLAIMS", tmp_path)
    monkeypatch.setattr(profiler, "CoreClaim", lambda *_, count, **__: SimpleNamespace(cores=list(range(count))))
    engine = SimpleNamespace(shutdown=lambda: None)
    monkeypatch.setattr(profiler, "AsyncLLMEngine", SimpleNamespace(from_engine_args=lambda arguments: engine))
    pool = RoleConfig.model_validate({"tensor_parallel_size": 2, "cores_per_worker": 2})
    service = ServiceConfig(model=ModelConfig(id="m", source="org/m"), groups=(GroupConfig(name="g0", decode=pool),))
    kwargs = {"kv_transfer_config": ConnectorConfig().kv_transfer_config(Role.DECODE)}
    async with profiler._engine(Role.DECODE, service, pool, kwargs):
        assert environ["VLLM_CPU_OMP_THREADS_BIND"] == "0,1|2,3"


class Engine:
    """A decode engine with little KV memory for each request of its largest batch; ``prompts``: prompt lengths."""

    model_config = SimpleNamespace(
        max_model_len=300,
        dtype=SimpleNamespace(itemsize=2),
        get_num_layers=lambda parallel: 1,
        get_num_kv_heads=lambda parallel: 1,
        get_head_size=lambda: 64,
    )
    vllm_config = SimpleNamespace(
        model_config=model_config,
        parallel_config=SimpleNamespace(pipeline_parallel_size=1, tensor_parallel_size=1),
        scheduler_config=SimpleNamespace(max_num_seqs=2, max_num_batched_tokens=64),
    )

    def __init__(self) -> None:
        self.prompts: list[int] = []

    async def generate(self, prompt: Any, sampling: Any, request_id: str) -> AsyncIterator[Any]:
        self.prompts.append(len(prompt["prompt_token_ids"]))
        for token in range(sampling.max_tokens):
            await asyncio.sleep(0)
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[token])], kv_transfer_params={})


@pytest.fixture(name="profiler")
def _profiler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The profiler with a clock that moves on at each reading, each time by less."""
    from deployments.emulated import profiler

    ticks = count()
    monkeypatch.setattr(profiler, "time", SimpleNamespace(perf_counter=lambda: next(ticks) ** 0.5))
    return profiler


@pytest.mark.vllm
async def test_every_measured_context_has_a_prompt_though_kv_memory_is_small(profiler: Any) -> None:
    engine = Engine()
    await profiler._decode_surface(engine, lambda tokens: [1] * tokens, 400, lambda progress: None)
    assert min(engine.prompts) > 0


@pytest.mark.vllm
async def test_handoffs_of_two_lengths_or_more_are_measured_though_the_context_is_short(profiler: Any) -> None:
    engine = Engine()
    await profiler._handoff(Engine(), engine, lambda tokens: [1] * tokens)
    assert set(engine.prompts) == {128, 292}
