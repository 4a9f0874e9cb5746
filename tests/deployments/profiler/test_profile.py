"""Which engines can be profiled; the profiler's measurements are in configs/profiles/cpu_tiny.json."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from autoscale.engines.profile import EngineProfile
from deployments.config import ModelConfig, ServiceConfig
from deployments.pool_config import GroupConfig
from kvtransfer.connector import ConnectorConfig
from kvtransfer.topology import Role

PROFILES = Path(__file__).parents[3] / "configs" / "profiles"


@pytest.mark.vllm
def test_an_emulated_engine_is_not_profiled(tmp_path: Path) -> None:
    from deployments.profiler.profile import profiles

    emulated = {"emulator": {"profile": str(PROFILES / "cpu_tiny.json")}}
    group = GroupConfig.model_validate({"name": "g0", "prefill": {}, "decode": emulated})
    service = ServiceConfig(model=ModelConfig(id="m", source="org/m"), groups=(group,))
    with pytest.raises(ValueError, match="give a config with real engines"):
        profiles(
            "x",
            service,
            group,
            kv_transfer=ConnectorConfig(),
            points=tmp_path / "points.jsonl",
            on_progress=lambda what: None,
        )


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
    from deployments.pool_config import RoleConfig
    from deployments.profiler import engines

    monkeypatch.setattr(engines, "os", SimpleNamespace(environ=(environ := dict(os.environ))))
    monkeypatch.setattr(engines, "CLAIMS", tmp_path)
    monkeypatch.setattr(engines, "CoreClaim", lambda *_, count, **__: SimpleNamespace(cores=list(range(count))))
    engine = SimpleNamespace(shutdown=lambda: None)
    monkeypatch.setattr(engines, "AsyncLLMEngine", SimpleNamespace(from_engine_args=lambda arguments: engine))
    pool = RoleConfig.model_validate({"tensor_parallel_size": 2, "cores_per_worker": 2})
    service = ServiceConfig(model=ModelConfig(id="m", source="org/m"), groups=(GroupConfig(name="g0", decode=pool),))
    kwargs = {"kv_transfer_config": ConnectorConfig().kv_transfer_config(Role.DECODE)}
    async with engines.engine(Role.DECODE, service, pool, kwargs):
        assert environ["VLLM_CPU_OMP_THREADS_BIND"] == "0,1|2,3"
