"""Reads configurations and says in one line what is wrong with them."""

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

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
        raise ConfigError(_one_line(error)) from None


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


def _one_line(error: ValidationError) -> str:
    items = error.errors(include_url=False)
    problems = []
    for item in items:
        loc = item["loc"]
        # pydantic also counts a list's valid items only: one wrong group would make the list "too short".
        if item["type"] == "too_short" and any(other["loc"][: len(loc)] == loc for other in items if other is not item):
            continue
        where = ".".join(str(part) if str(part).isprintable() else repr(part) for part in loc) or "args"
        message = str(item["msg"]).removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            message = "no such field; remove it or check its spelling"
        elif item["type"] == "missing":
            message = "is required; add it"
        elif not isinstance(item["input"], dict) or item["type"].endswith("_type"):
            message = f"{message}, got {_shown(item['input'])}"
        problems.append(f"{where}: {message}")
    return "; ".join(problems)


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.80}"
    except (RecursionError, ValueError):  # nested too deeply, or an integer of more than 4300 digits
        return f"an unprintable {type(value).__name__}"
