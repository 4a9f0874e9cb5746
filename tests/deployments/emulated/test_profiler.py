"""What can be profiled; that it measures is seen in configs/profiles/cpu_tiny.json, which it wrote."""

from pathlib import Path

import pytest

from autoscale.engines.profile import EngineProfile
from deployments.config import ModelConfig, ServiceConfig
from deployments.pool_config import GroupConfig
from kvtransfer.connector import ConnectorConfig

PROFILES = Path(__file__).parents[3] / "configs" / "profiles"


@pytest.mark.vllm
def test_an_emulated_engine_is_not_profiled() -> None:
    from deployments.emulated.profiler import profile

    emulated = {"emulator": {"profile": str(PROFILES / "cpu_tiny.json")}}
    group = GroupConfig.model_validate({"name": "g0", "prefill": {}, "decode": emulated})
    service = ServiceConfig(model=ModelConfig(id="m", source="org/m"), groups=(group,))
    with pytest.raises(ValueError, match="give a config with real engines"):
        profile("x", service, group, kv_transfer=ConnectorConfig(), on_progress=lambda what: None)


def test_the_tiny_models_profile_is_measured_and_of_its_config() -> None:
    profile = EngineProfile.load(PROFILES / "cpu_tiny.json")
    assert (profile.kv_tokens, profile.max_running, profile.block_tokens) == (32_768, 32, 32)
    # Keys and values of four layers with two heads of 64, float32 (serve_app/local/tiny_model.py).
    assert profile.handoff.kv_bytes_per_token == 4096
    assert {source.kind for source in profile.sources if source.part in ("prefill", "decode", "handoff")} == {
        "measured"
    }
