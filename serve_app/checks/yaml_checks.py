"""Reads configurations and says in one line what is wrong with them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from autoscale.documents import load_mapping
from deployments.explain import explain
from serve_app.config import AppConfig


class ConfigError(ValueError):
    """A configuration that cannot be used, in one line for the user."""


@contextmanager
def config_errors(place: str = "") -> Iterator[None]:
    """Turn a ValueError of a block, or of a decorated command, into a ConfigError with ``place`` before its message."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"{place}{error}") from None


def parse_app_config(args: Any) -> AppConfig:
    """Check an application's ``args``; raises ConfigError with the field, its value and the fix."""
    if not isinstance(args, dict):
        raise ConfigError(f"args must be a mapping with 'model' and 'groups', got {type(args).__name__}")
    try:
        return AppConfig.model_validate(args)
    except ValidationError as error:
        # Without services, args themselves have the fields of the one service: its errors are shown without the prefix.
        hidden_prefix = () if "services" in args else ("services", 0)
        raise ConfigError(explain(error, hidden_prefix)) from None


@config_errors()
def load_serve_yaml(path: Path) -> dict[str, Any]:
    """A Serve YAML; raises ConfigError if it cannot be read or is no mapping."""
    return load_mapping(path, "a mapping with 'applications'")


def sole_application(document: Mapping[str, Any]) -> dict[str, Any]:
    """The one application of a Serve YAML; raises ConfigError if it has none, or several."""
    applications = document.get("applications")
    if not isinstance(applications, list) or len(applications) != 1 or not isinstance(applications[0], dict):
        raise ConfigError("applications: expected a list with exactly one application; give each its own file")
    return applications[0]
