"""Every shipped Serve YAML fits our schema, Serve's, and vLLM's own rules."""

from pathlib import Path
from typing import Any

import pytest

from autoscale.engines.profile import EngineProfile
from serve_app.checks.yaml_checks import load_serve_yaml, parse_app_config
from serve_app.config import AppConfig

ROOT = Path(__file__).parents[2]
PATHS = sorted((ROOT / "configs").glob("*.yaml"))
each_config = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


def applications(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = load_serve_yaml(path)["applications"]
    return found


def app_configs(path: Path) -> list[AppConfig]:
    return [parse_app_config(application["args"]) for application in applications(path)]


@each_config
def test_a_config_loads_through_our_schema(path: Path) -> None:
    assert app_configs(path)
    assert {application["import_path"] for application in applications(path)} == {"serve_app.app:build"}


@each_config
def test_a_config_listens_on_loopback_only(path: Path) -> None:
    assert load_serve_yaml(path)["http_options"]["host"] == "127.0.0.1"


@each_config
def test_decode_has_at_least_the_tensor_parallel_size_of_prefill(path: Path) -> None:
    """NIXL's pull mode reads no KV from a wider prefill whose heads are replicated."""
    for config in app_configs(path):
        for group in (group for group in config.groups if group.prefill is not None):
            assert group.decode.tensor_parallel_size >= group.prefill.tensor_parallel_size


@each_config
def test_batch_limits_fit_each_other(path: Path) -> None:
    """vLLM's own rules: a step has a token for each request, and no threshold is longer than a prompt."""
    for config in app_configs(path):
        for service in config.services:
            for pool in service.role_configs().values():
                if pool.emulator is not None:
                    EngineProfile.load(ROOT / pool.emulator.profile)
                    continue
                kwargs = {**service.engine_kwargs, **pool.engine_kwargs}
                assert kwargs["max_num_seqs"] <= kwargs["max_num_batched_tokens"]
                assert kwargs.get("long_prefill_token_threshold", 0) <= kwargs["max_model_len"]


def test_heterogeneous_pools_differ_in_gpu_and_share_a_switch() -> None:
    (path,) = [path for path in PATHS if path.stem == "heterogeneous"]
    (config,) = app_configs(path)
    for group in config.groups:
        prefill, decode = group.prefill.placement, group.decode.placement
        assert prefill.accelerator_type != decode.accelerator_type
        assert prefill.node_labels == decode.node_labels
        assert set(prefill.node_labels) == {"tandem.io/s1"}


@pytest.mark.ray
@each_config
def test_a_config_loads_through_serves_schema(path: Path) -> None:
    schema = pytest.importorskip("ray.serve.schema")
    schema.ServeDeploySchema.model_validate(load_serve_yaml(path))
