"""Adapters in a configuration, and the engine arguments that follow from them."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from deployments.adapters_config import AdapterConfig, adapter_arguments
from deployments.config import ServiceConfig
from tests.lab.stand.tiny_adapter import build_adapter

RED, BLUE = {"id": "red", "path": "/adapters/red"}, {"id": "blue", "path": "/adapters/blue"}


def service(make_app_args: Any, *, model: dict[str, Any], **pool: Any) -> ServiceConfig:
    args = make_app_args()
    args["groups"][0]["decode"] |= pool
    return ServiceConfig.model_validate(
        {"model": args["model"] | model, "groups": args["groups"], "engine_kwargs": args["engine_kwargs"]}
    )


@pytest.mark.parametrize(
    ("model", "pool", "why"),
    [
        ({"adapters": [RED, RED]}, {}, "the name 'red' is used twice"),
        ({"adapters": [{"id": "tiny", "path": "/x"}]}, {}, "the name 'tiny' is used twice"),
        ({"adapters": [{"id": "red", "path": "red"}]}, {}, "path red is relative"),
        ({"adapters_folder": "adapters"}, {}, "adapters_folder adapters is relative"),
        ({"adapters": [RED]}, {"emulator": {"profile": "x"}}, "emulated engines have no adapters"),
        ({"adapters": [RED]}, {"engine_sleep": {}}, "are not kept over an engine's sleep"),
        ({"adapters": [RED]}, {"engine_kwargs": {"enable_lora": True}}, "set model.adapters or model.adapters_folder"),
        (
            {"adapters": [RED]},
            {"engine_kwargs": {"lora_modules": []}},
            "set model.adapters or model.adapters_folder instead",
        ),
    ],
)
def test_what_does_not_work_with_adapters_is_refused(
    make_app_args: Any, model: dict[str, Any], pool: dict[str, Any], why: str
) -> None:
    with pytest.raises(ValidationError, match=why):
        service(make_app_args, model=model, **pool)


def test_two_services_may_not_share_a_name(make_app_args: Any) -> None:
    from serve_app.config import AppConfig

    args = make_app_args()
    one = {name: args.pop(name) for name in ("model", "engine_kwargs", "groups", "router")}
    two = {"model": {"id": "red", "source": "./models/tiny"}, "groups": [{"name": "g1"}]}
    one["model"]["adapters"] = [RED]
    with pytest.raises(ValidationError, match="the adapter 'red' is used twice"):
        AppConfig.model_validate(args | {"services": [one, two]})


def adapters(*names: str, folder: Path = Path("/adapters")) -> list[AdapterConfig]:
    return [AdapterConfig(id=name, path=folder / name) for name in names]


@pytest.mark.vllm
def test_engines_have_a_slot_for_each_adapter_and_room_for_those_that_come() -> None:
    two = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 2, "max_lora_rank": 16}
    assert adapter_arguments([], None, {}) == {}
    assert adapter_arguments(adapters("red", "blue"), None, {}) == two
    assert adapter_arguments(adapters("red", "blue"), Path("/adapters"), {}) == two | {"max_cpu_loras": 18}
    assert adapter_arguments([], Path("/adapters"), {}) == two | {"max_loras": 1, "max_cpu_loras": 16}
    many = adapter_arguments(adapters(*map(str, range(20))), None, {})
    assert (many["max_loras"], many["max_cpu_loras"]) == (8, 20)


@pytest.mark.vllm
def test_what_a_user_sets_stays(tmp_path: Path) -> None:
    build_adapter(tmp_path / "red", seed=1, rank=20)
    assert adapter_arguments(adapters("red", folder=tmp_path), None, {})["max_lora_rank"] == 32
    own = {"max_loras": 3, "max_lora_rank": 64}
    assert adapter_arguments(adapters("red", folder=tmp_path), None, own) == {"enable_lora": True, "max_cpu_loras": 3}
