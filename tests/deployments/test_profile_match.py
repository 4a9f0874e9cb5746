"""A profile of another engine than the deployed one is named."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from autoscale.engines.profile import EngineProfile, Precision
from deployments.config import ServiceConfig
from deployments.profile_match import check_parallelism, differences

PROFILES = Path(__file__).parents[2] / "configs" / "profiles"
TP4 = EngineProfile.load(PROFILES / "h100_llama70b_fp8_tp4.json")
TINY = EngineProfile.load(PROFILES / "cpu_tiny.json")
H100 = {"accelerator_type": "H100"}


def service(profile: EngineProfile, model: str = TP4.model, **pool: Any) -> ServiceConfig:
    """A service whose policy sizes both roles by one profile."""
    return sized_by({"policy": {"kind": "default", "prefill": profile, "decode": profile}}, model, **pool)


def sized_by(autoscale: dict[str, Any], model: str = TP4.model, **pool: Any) -> ServiceConfig:
    placed = {"max_replicas": 4, **pool}
    return ServiceConfig.model_validate(
        {
            "model": {"id": model, "source": "org/m"},
            "groups": [{"name": "g0", "prefill": placed, "decode": placed}],
            "autoscale": autoscale,
        }
    )


def test_a_profile_of_the_deployed_engine_is_fine() -> None:
    assert TP4.gpu == "H100" and TP4.gpus == 4
    assert service(TP4, tensor_parallel_size=4, placement=H100).profile_differences() == []


def test_another_tensor_parallel_size_is_refused_with_both_numbers() -> None:
    message = (
        r"h100_llama70b_fp8_tp4 was measured on 4 GPUs, and a replica of prefill:g0 has 2 \(tensor_parallel_size 2"
    )
    with pytest.raises(ValidationError, match=message):
        service(TP4, tensor_parallel_size=2, placement=H100)


def test_the_profiles_of_a_ratio_that_follows_the_requests_are_checked_too() -> None:
    auto = {
        "pd_ratio": "auto",
        "auto_ratio": {"prefill": TP4, "decode": TP4},
        "policy": {"kind": "heteroscale", "target": 1},
    }
    (first, second) = sized_by(auto, "qwen", tensor_parallel_size=4, placement=H100).profile_differences()
    assert "prefill:g0 has qwen" in first and "decode:g0 has qwen" in second
    with pytest.raises(ValidationError, match="a replica of prefill:g0 has 2"):
        sized_by(auto, tensor_parallel_size=2, placement=H100)
    fixed = {**auto, "pd_ratio": "1:1"}  # the profiles have no effect
    assert sized_by(fixed, "qwen", tensor_parallel_size=2, placement=H100).profile_differences() == []


def test_the_own_profile_of_a_pool_beside_the_first_group_is_checked_too() -> None:
    pool = {"max_replicas": 4, "placement": H100, "profile": str(PROFILES / "h100_llama70b_fp8_tp4.json")}
    four = {**pool, "tensor_parallel_size": 4}
    groups = [{"name": "a", "prefill": four, "decode": four}, {"name": "b", "prefill": four, "decode": pool}]
    document = {
        "model": {"id": "m", "source": "org/m"},
        "groups": groups,
        "autoscale": {"policy": {"kind": "heteroscale", "target": 1}},
    }
    with pytest.raises(ValueError, match="a replica of decode:b has 1"):
        ServiceConfig.model_validate(document).worths()


def test_engines_on_cpus_and_emulated_ones_are_not_compared() -> None:
    service(TINY, tensor_parallel_size=2)
    emulated = {"profile": str(PROFILES / "cpu_tiny.json")}
    assert service(TP4, model="other", emulator=emulated).profile_differences() == []


def test_another_model_and_gpu_are_named_and_not_refused() -> None:
    first, *_ = found = service(
        TP4, model="qwen", tensor_parallel_size=4, placement={"accelerator_type": "A100"}
    ).profile_differences()
    assert len(found) == 4  # both roles
    assert first.startswith(f"profile {TP4.name} has model {TP4.model}, and prefill:g0 has qwen: ")
    assert "has GPU H100, and prefill:g0 has A100" in found[1]


def test_another_precision_is_named_if_it_is_configured() -> None:
    precise = TINY.model_copy(update={"precision": Precision(dtype="float32", quantization=None)})
    of_tiny = service(TINY, model=TINY.model)
    (key, pool), *_ = of_tiny.role_configs().items()

    def named(**kwargs: Any) -> list[str]:
        return differences(key, pool, TINY.model, kwargs, precise)

    assert named() == named(dtype="auto", kv_cache_dtype="auto") == named(dtype="float32") == []
    (sentence,) = named(dtype="bfloat16")
    assert "has dtype float32, and prefill:g0 has bfloat16: " in sentence
    (sentence,) = named(quantization="fp8")
    assert "has quantization none, and prefill:g0 has fp8" in sentence
    check_parallelism(key, pool, precise)
