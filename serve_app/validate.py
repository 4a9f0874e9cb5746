"""Reads configurations and says in one line what is wrong with them."""

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

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
        raise ConfigError(explain(error)) from None


def load_serve_yaml(path: Path) -> dict[str, Any]:
    """A Serve YAML as a mapping.

    Raises:
        ConfigError: it cannot be read, or is not a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a text file") from None
    try:
        data = yaml.safe_load(text)
    # PyYAML lets through what its constructors raise for a value such as 2024-13-45 or !!bool x, and deep nesting.
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path}: not YAML: {textwrap.shorten(str(error), 300, placeholder=' ...')}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a mapping with 'applications', got {type(data).__name__}")
    return data


def sole_application(document: Mapping[str, Any]) -> dict[str, Any]:
    """The one application of a Serve YAML.

    Raises:
        ConfigError: there is none, or there are several.
    """
    applications = document.get("applications")
    if not isinstance(applications, list) or len(applications) != 1 or not isinstance(applications[0], dict):
        raise ConfigError("applications: expected a list with exactly one application; give each its own file")
    return applications[0]
