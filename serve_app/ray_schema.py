"""Checks a whole Serve YAML: Serve's own fields, the one application's args, and its engine arguments."""

import textwrap
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from ray.serve.schema import HTTPOptionsSchema, ServeApplicationSchema, ServeDeploySchema

from deployments.engine_arguments import did_you_mean, engine_complaint
from deployments.explain import explain
from serve_app.config import AppConfig
from serve_app.validate import ConfigError, parse_app_config, sole_application

_CAUSE_CHARS = 300
# As Serve wants it beside args. Its configuration is args.autoscale: changed policy_kwargs restart everything.
JOINT_POLICY = {"policy_function": "autoscale.ray_policy:JointPolicy"}


def single_app_config(document: Mapping[str, Any]) -> AppConfig:
    """The checked ``args`` of the one application of a Serve YAML.

    Raises:
        ConfigError: no or several applications, another import path, a field that Serve does not have, or wrong args.
    """
    application = sole_application(document)
    path = application.get("import_path")
    if path != "serve_app.app:build":
        raise ConfigError(f"applications.0.import_path: expected serve_app.app:build, got {path!r}")
    config = parse_app_config(application.get("args"))
    http = document.get("http_options")
    _check_names(document, ServeDeploySchema, "")
    _check_names(application, ServeApplicationSchema, "applications.0.")
    if isinstance(http, dict):
        _check_names(http, HTTPOptionsSchema, "http_options.")
        if http.get("request_timeout_s") is not None:
            raise ConfigError(
                "http_options.request_timeout_s: Serve would cut streams without a word; use the application's "
                "ingress.request_timeout_s"
            )
    _check_policy(application, config)
    if document.get("proxy_location") == "Disabled":
        raise ConfigError("proxy_location: Disabled leaves no endpoint; use HeadOnly or EveryNode")
    try:
        ServeDeploySchema.model_validate(dict(document))
    except ValidationError as error:
        raise ConfigError(f"not a Serve config: {explain(error)}") from None
    except ValueError as error:
        cause = textwrap.shorten(str(error), _CAUSE_CHARS, placeholder=" ...")
        raise ConfigError(f"not a Serve config: {cause}") from None
    return config


def _check_policy(application: Mapping[str, Any], config: AppConfig) -> None:
    """Serve reads the policy from beside ``args``, and would size each deployment by its own without it."""
    policy = application.get("autoscaling_policy")
    if config.is_autoscaled and policy != JOINT_POLICY:
        raise ConfigError(
            f"applications.0.autoscaling_policy: args.autoscale needs {JOINT_POLICY} here, got {policy!r:.100}"
        )
    if not config.is_autoscaled and policy is not None:
        raise ConfigError(
            "applications.0.autoscaling_policy: there is no args.autoscale; add it, or leave the policy out"
        )


def check_engines(config: AppConfig) -> None:
    """Ask vLLM about every pool's engine arguments; takes some seconds.

    Raises:
        ConfigError: what vLLM has against them.
    """
    for service in config.services:
        complaint = engine_complaint(service.model, service.groups, service.engine_kwargs)
        if complaint is not None:
            raise ConfigError(complaint)


def _check_names(given: Mapping[str, Any], schema: type[BaseModel], where: str) -> None:
    """Serve ignores what it does not know; a misspelt http_options would then listen on every interface."""
    for name in given:
        if name not in schema.model_fields:
            raise ConfigError(f"{where}{name}: Serve has no such field{did_you_mean(str(name), schema.model_fields)}")
