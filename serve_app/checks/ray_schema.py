"""Checks a whole Serve YAML: Serve's own fields, the one application's args, and its engine arguments."""

import copy
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from autoscale.types import PoolKey
from deployments.adapters_config import adapter_arguments
from deployments.config import ServiceConfig
from deployments.explain import did_you_mean, explain
from deployments.pool_config import RoleConfig
from deployments.vllm_seam.engine_arguments import PoolArguments, engine_complaint
from serve_app.checks.yaml_checks import ConfigError, load_serve_yaml, parse_app_config, sole_application
from serve_app.config import AppConfig

# Longest cause of an error in a message, characters.
_CAUSE_CHARS = 300
IMPORT_PATH = "serve_app.app:build"
# The policy that sizes all services together. Serve reads it beside args. Its settings are in args.autoscale and not in
# policy_kwargs, since a change of policy_kwargs restarts every replica.
JOINT_POLICY = {"policy_function": "autoscale.ray_policy:JointPolicy"}


def read_application(source: Path | str | Mapping[str, Any]) -> tuple[dict[str, Any], AppConfig]:
    """A Serve YAML or mapping, completed for Serve on this machine, and its checked ``args``.

    Raises:
        ConfigError: as ``single_app_config``, or the file cannot be read.
    """
    document = load_serve_yaml(Path(source)) if isinstance(source, (str, Path)) else copy.deepcopy(dict(source))
    config = single_app_config(document)
    # Serve's own default host is every interface.
    document["http_options"] = {"host": "127.0.0.1", "port": 8000, **(document.get("http_options") or {})}
    args = document["applications"][0]["args"]
    sections = args.get("services", [args])  # args themselves are the section of an only service
    for service, section in zip(config.services, sections, strict=True):
        if service.model.folder is not None:  # a path relative to this process means nothing to Serve's tasks
            section["model"]["source"] = str(service.model.folder)
    return document, config


def single_app_config(document: Mapping[str, Any]) -> AppConfig:
    """The checked ``args`` of the one application of a Serve YAML.

    Raises:
        ConfigError: no or several applications, another import path, a field that Serve does not have, or wrong args.
    """
    from ray.serve.schema import HTTPOptionsSchema, ServeApplicationSchema, ServeDeploySchema

    application = sole_application(document)
    path = application.get("import_path")
    if path != IMPORT_PATH:
        raise ConfigError(f"applications.0.import_path: expected {IMPORT_PATH}, got {path!r}")
    config = parse_app_config(application.get("args"))
    http = document.get("http_options")
    _check_names(document, ServeDeploySchema, "")
    _check_names(application, ServeApplicationSchema, "applications.0.")
    if isinstance(http, dict):
        _check_names(http, HTTPOptionsSchema, "http_options.")
        if http.get("request_timeout_s") is not None:
            raise ConfigError(
                "http_options.request_timeout_s: Serve would cut streams without an error; use the application's "
                "ingress.request_timeout_s"
            )
    _check_policy(application.get("autoscaling_policy"), config.is_autoscaled)
    if document.get("proxy_location") == "Disabled":
        raise ConfigError("proxy_location: Disabled leaves no endpoint; use HeadOnly or EveryNode")
    try:
        ServeDeploySchema.model_validate(dict(document))
    except ValueError as error:
        short = textwrap.shorten(str(error), _CAUSE_CHARS, placeholder=" ...")
        cause = explain(error) if isinstance(error, ValidationError) else short
        raise ConfigError(f"not a Serve config: {cause}") from None
    return config


def _check_policy(policy: Any, is_autoscaled: bool) -> None:
    """Check the policy, which Serve reads beside ``args``; without it Serve sizes each deployment alone."""
    if is_autoscaled and policy != JOINT_POLICY:
        raise ConfigError(
            f"applications.0.autoscaling_policy: args.autoscale needs {JOINT_POLICY} here, got {policy!r:.100}"
        )
    if not is_autoscaled and policy is not None:
        raise ConfigError(
            "applications.0.autoscaling_policy: there is no args.autoscale; add it, or leave the policy out"
        )


def check_engines(config: AppConfig) -> None:
    """Check every pool's engine arguments with vLLM, which takes some seconds. Raises ConfigError: vLLM refuses one."""
    for service in config.services:
        complaint = engine_complaint([_arguments(service, key, pool) for key, pool in service.role_configs().items()])
        if complaint is not None:
            raise ConfigError(complaint)


def _arguments(service: ServiceConfig, key: PoolKey, pool: RoleConfig) -> PoolArguments:
    """The engine arguments of a pool, to be checked.

    Names are checked for every pool, values only for engines on CPU whose model folder is on this machine.
    """
    folder, kwargs = service.model.folder, service.engine_kwargs_of(pool)
    can_check_values = pool.placement.accelerator_type is None and folder is not None and folder.is_dir()
    return PoolArguments(
        where=f"groups.{key.group}.{key.role}",
        kwargs={**kwargs, **adapter_arguments(service.model.adapters, service.model.adapters_folder, kwargs)},
        model=str(folder) if can_check_values else None,
        sizes={
            "tensor_parallel_size": pool.tensor_parallel_size,
            "pipeline_parallel_size": pool.pipeline_parallel_size,
        },
    )


def _check_names(fields: Mapping[str, Any], schema: type[BaseModel], where: str) -> None:
    """Refuse unknown fields. Serve ignores them, and with a misspelt http_options it listens on every interface."""
    for name in fields:
        if name not in schema.model_fields:
            raise ConfigError(f"{where}{name}: Serve has no such field{did_you_mean(str(name), schema.model_fields)}")


def serve_yaml_schema() -> dict[str, Any]:
    """The JSON schema of a Serve YAML with one application; Serve's own fields are listed by name, without values."""
    from ray.serve.schema import HTTPOptionsSchema, ServeApplicationSchema, ServeDeploySchema

    args = _args_schema()
    definitions = args.pop("$defs")
    application = _names(ServeApplicationSchema) | {
        "import_path": {"const": IMPORT_PATH},
        "autoscaling_policy": {"const": JOINT_POLICY, "description": "Required by args.autoscale."},
        "args": args,
    }
    document = _names(ServeDeploySchema)
    document["http_options"] = _object(_names(HTTPOptionsSchema))
    required = {"required": ["import_path", "args"]}
    document["applications"] = {"type": "array", "minItems": 1, "maxItems": 1, "items": _object(application) | required}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$defs": definitions,
        **_object(document),
        "required": ["applications"],
    }


def _args_schema() -> dict[str, Any]:
    """The JSON schema of an application's ``args``, in which fields of one service may stand beside ``ingress``."""
    whole = AppConfig.model_json_schema()
    definitions = whole["$defs"]
    service = definitions["ServiceConfig"]
    inventory = definitions["TopologyConfig"]["properties"]
    inventory["inventory"] = {"anyOf": [inventory["inventory"], {"type": "string"}]}  # or the path of a file
    return {
        "$defs": definitions,
        **_object({**service["properties"], **whole["properties"]}),
        # In a JSON schema False means that the field may not be there.
        "oneOf": [
            {"required": service["required"], "properties": {"services": False}},
            {"required": ["services"], "properties": dict.fromkeys(service["properties"], False)},
        ],
    }


def _names(schema: type[BaseModel]) -> dict[str, Any]:
    """The fields of one of Serve's schemas as JSON schema; each may have any value."""
    return {name: {"description": field.description or ""} for name, field in schema.model_fields.items()}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema of a mapping with these fields and no others."""
    return {"type": "object", "properties": properties, "additionalProperties": False}
