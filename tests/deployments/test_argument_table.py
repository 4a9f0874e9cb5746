"""Which of vLLM's arguments ``engine_kwargs`` takes, and what a refusal says."""

import sys
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from deployments.argument_table import INSTEAD, OF_ENGINE, OF_SERVER
from deployments.pool_config import EngineKwargs, RoleConfig
from serve_app.checks.yaml_checks import ConfigError, parse_app_config


def test_an_argument_is_in_one_list_once() -> None:
    names = [*INSTEAD, *OF_SERVER, *OF_ENGINE]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("name", INSTEAD)
def test_every_other_argument_is_refused_with_what_to_do(name: str) -> None:
    with pytest.raises(ValidationError, match=f"engine argument '{name}' may not be set here: ") as caught:
        TypeAdapter(EngineKwargs).validate_python({name: 1})
    assert any(what in str(caught.value) for what in ("instead", "leave it out"))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("api_key", ["s3cret"], "set ingress.api_keys_file instead, and make keys with `tandem key`"),
        ("ssl_certfile", "/c.pem", "put a proxy that ends TLS in front instead"),
        ("allowed_origins", ["*"], "set ingress.cors.allowed_origins instead"),
        ("middleware", ["a.b"], "put a proxy with it in front instead"),
        ("root_path", "/llm", "set route_prefix of the application instead"),
        ("port", 9000, "set http_options.host and http_options.port of Serve instead"),
        ("enable_server_load_tracking", True, "GET /load always answers"),
    ],
)
def test_an_application_with_an_argument_of_vllms_own_server_is_refused(
    make_app_args: Any, name: str, value: Any, said: str
) -> None:
    with pytest.raises(ConfigError, match=r"^engine_kwargs: ") as caught:
        parse_app_config(make_app_args(engine_kwargs={name: value}))
    assert said in str(caught.value)


def test_vllms_variable_for_keys_is_refused_like_its_argument() -> None:
    with pytest.raises(ValidationError, match=r"VLLM_API_KEY may not be set here: set ingress\.api_keys_file instead"):
        RoleConfig(env={"VLLM_API_KEY": "s3cret"})
    assert RoleConfig(env={"OTHER": "x"}).env == {"OTHER": "x"}


def test_arguments_that_act_pass() -> None:
    kwargs = dict.fromkeys([*OF_SERVER, *OF_ENGINE], 1)
    assert TypeAdapter(EngineKwargs).validate_python(kwargs) == kwargs


def test_the_table_needs_no_vllm(run_python: Any) -> None:
    script = "import json, sys, deployments.argument_table; print(json.dumps('vllm' in sys.modules))"
    assert run_python(script, env={"PATH": "", "PYTHONPATH": ":".join(filter(None, sys.path))}) is False
