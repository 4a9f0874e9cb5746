"""Reads configurations and says in one line what is wrong with them."""

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
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a text file") from None
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a mapping with 'applications', got {type(data).__name__}")
    return data


def _one_line(error: ValidationError) -> str:
    problems = []
    for item in error.errors(include_url=False):
        where = ".".join(str(part) for part in item["loc"]) or "args"
        message = str(item["msg"]).removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            message = "no such field; remove it or check its spelling"
        elif item["type"] == "missing":
            message = "is required; add it"
        elif not isinstance(item["input"], dict):
            message = f"{message}, got {item['input']!r:.80}"
        problems.append(f"{where}: {message}")
    return "; ".join(problems)
