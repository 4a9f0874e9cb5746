"""Which services have a pooling model, and what their groups and policies must be."""

from typing import Any

import pytest
from pydantic import ValidationError

from deployments.config import ServiceConfig
from deployments.pooling_config import is_pooling

POOLING = {"runner": "pooling"}
GROUP = {"name": "e0", "prefill": None}


def service(**fields: Any) -> ServiceConfig:
    return ServiceConfig.model_validate(
        {"model": {"id": "e", "source": "./e"}, "engine_kwargs": POOLING, "groups": [GROUP], **fields}
    )


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({}, False),
        ({"runner": "pooling"}, True),
        ({"convert": "embed"}, True),
        ({"convert": "none"}, False),
        ({"runner": "generate", "convert": "embed"}, False),
    ],
)
def test_runner_and_convert_make_a_pooling_model(kwargs: dict[str, Any], expected: bool) -> None:
    assert is_pooling(kwargs) is expected


def scaled(policy: dict[str, Any]) -> dict[str, Any]:
    return {
        "groups": [{**GROUP, "decode": {"max_replicas": 2}}],
        "autoscale": {"pd_ratio": "0:1", "policy": policy},
    }


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"groups": [{"name": "e0"}]}, "group 'e0' has a prefill pool, .* set prefill of the group to null"),
        ({"groups": [{**GROUP, "decode": {"emulator": {"profile": "x"}}}]}, "emulated engines only generate"),
        (
            {"groups": [GROUP, {**GROUP, "name": "e1", "decode": {"engine_kwargs": {"runner": "generate"}}}]},
            "by its engine_kwargs decode:e0 has a pooling model, and decode:e1 has none",
        ),
        ({"model": {"id": "e", "source": "./e", "adapters_folder": "/a"}}, "takes no adapters here"),
        ({"router": {"policy": "prefix"}}, "choose the policy least_tokens"),
        (
            scaled({"kind": "heteroscale", "signal": "decode_tps", "target": 400}),
            "policy 'heteroscale' sizes decode by the tokens of answers, .*: take one of queue_depth, static, wva, or",
        ),
        ({"long_prompts": {"least_tokens": 9, "groups": [{"name": "e1"}]}}, "group 'e1' has a prefill pool"),
    ],
)
def test_what_a_pooling_model_cannot_have_is_refused(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        service(**fields)


@pytest.mark.parametrize(
    "policy",
    [
        {"kind": "wva"},
        {"kind": "queue_depth", "decode_requests_per_s": 50},
        {"kind": "static", "prefill": 0, "decode": 1},
    ],
)
def test_policies_of_queues_size_a_pooling_model(policy: dict[str, Any]) -> None:
    assert service(**scaled(policy)).is_pooling
