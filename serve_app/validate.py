"""Reads configurations and says in one line what is wrong with them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from autoscale.documents import load_mapping
from deployments.explain import explain
from serve_app.config import AppConfig


class ConfigError(ValueError):
    """A configuration that cannot be used, in one line for the user."""


def parse_app_config(args: Any) -> AppConfig:
    """Check an application's ``args``.

    Raises:
        ConfigError: the field, its value and the fix.
    """
    if not isinstance(args, dict):
        raise ConfigError(f"args must be a mapping with 'model' and 'groups', got {type(args).__name__}")
    try:
        return AppConfig.model_validate(args)
    except ValidationError as error:
        # Of the one service that an application has, its fields stand in args themselves.
        raise ConfigError(explain(error) if "services" in args else explain(error).replace("services.0.", "")) from None


def load_serve_yaml(path: Path) -> dict[str, Any]:
    """A Serve YAML as a mapping.

    Raises:
        ConfigError: it cannot be read, or is not a mapping.
    """
    try:
        return load_mapping(path, "a mapping with 'applications'")
    except ValueError as error:
        raise ConfigError(str(error)) from None


def sole_application(document: Mapping[str, Any]) -> dict[str, Any]:
    """The one application of a Serve YAML.

    Raises:
        ConfigError: there is none, or there are several.
    """
    applications = document.get("applications")
    if not isinstance(applications, list) or len(applications) != 1 or not isinstance(applications[0], dict):
        raise ConfigError("applications: expected a list with exactly one application; give each its own file")
    return applications[0]
