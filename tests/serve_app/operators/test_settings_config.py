"""Fields of a config that settings change: read with vLLM's defaults, written, and as a JSON Patch."""

from typing import Any

import pytest

from autoscale.operators.gpu import GPUS
from autoscale.operators.step_times import EngineSettings
from deployments.config import ServiceConfig
from kvtransfer.topology import Role
from serve_app.operators.settings_config import RoleState, Setting, changed, json_patch, role_state, with_settings


def setting(role: Role | None, name: str, after: Any) -> Setting:
    return Setting(role=role, name=name, before=None, after=after, why="")


@pytest.mark.parametrize(
    ("gpu", "kwargs", "expected"),
    [
        ("H100", {}, (8192, 1024)),
        ("A100", {}, (2048, 256)),
        ("A100", {"max_num_seqs": 7}, (2048, 7)),
        ("H100", {"max_num_batched_tokens": 512, "max_num_seqs": 64}, (512, 64)),
    ],
)
def test_fields_that_are_left_out_have_the_values_of_vllm(
    gpu: str, kwargs: dict[str, int], expected: tuple[int, int]
) -> None:
    service = ServiceConfig.model_validate(
        {"model": {"id": "m", "source": "hub/m"}, "groups": [{"name": "g0", "decode": {"engine_kwargs": kwargs}}]}
    )
    engine = role_state(service, service.groups[0].decode, GPUS[gpu], 4096).engine
    assert (engine.max_batch_tokens, engine.max_running) == expected


def test_settings_change_the_engine_and_the_document_alike() -> None:
    document = {"applications": [{"args": {"groups": [{"name": "g0", "decode": {"replicas": 2}}], "autoscale": {}}}]}
    settings = [
        setting(Role.DECODE, "replicas", 3),
        setting(Role.DECODE, "tensor_parallel_size", 2),
        setting(Role.PREFILL, "max_num_seqs", 16),
        setting(Role.DECODE, "eplb_config", {"num_redundant_experts": 4}),
        setting(None, "autoscale.pd_ratio", "1:3"),
    ]
    whole = changed(document, settings)
    args = whole["applications"][0]["args"]
    kwargs = {"eplb_config": {"num_redundant_experts": 4}, "enable_eplb": True}
    assert args["groups"][0] == {
        "name": "g0",
        "decode": {"replicas": 3, "tensor_parallel_size": 2, "engine_kwargs": kwargs},
        "prefill": {"engine_kwargs": {"max_num_seqs": 16}},
    }
    assert args["autoscale"] == {"pd_ratio": "1:3"}
    assert document["applications"][0]["args"]["groups"][0]["decode"] == {"replicas": 2}
    before = RoleState(replicas=1, engine=EngineSettings(parallel=1))
    states = with_settings(dict.fromkeys(Role, before), settings)
    decode = states[Role.DECODE]
    assert (decode.replicas, decode.engine.parallel, decode.engine.redundant_experts) == (3, 2, 4)
    assert states[Role.PREFILL].engine.max_running == 16


def test_a_patch_has_one_operation_for_each_change() -> None:
    before = {"a": [{"b": 1, "c": 2}], "x/y": {"z~": 0}}
    after = {"a": [{"b": 1, "c": 3, "d": {"e": 4}}], "x/y": {"z~": 1}}
    assert json_patch(before, after) == [
        {"op": "replace", "path": "/a/0/c", "value": 3},
        {"op": "add", "path": "/a/0/d", "value": {"e": 4}},
        {"op": "replace", "path": "/x~1y/z~0", "value": 1},
    ]
    assert json_patch(before, before) == []
