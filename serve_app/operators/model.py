"""The model that an operator command is about: the config.json that a name, a file or a folder stands for."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serve_app.checks.yaml_checks import ConfigError
from serve_app.local.shipped import shipped


def model_config(model: str) -> dict[str, Any]:
    """The config.json of a shipped model's name, a config.json, or a folder with one.

    Raises:
        ConfigError: the model is not known, or its file cannot be read or is no JSON object.
    """
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    elif not path.exists() and "/" not in model and not model.endswith(".json"):
        folder = shipped("operators/models")
        path = folder / f"{model.lower()}.json"
        if not path.exists():
            names = ", ".join(sorted(each.stem for each in folder.glob("*.json")))
            raise ConfigError(f"model {model!r} is not known: give a config.json, or one of {names}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: expected the fields of a config.json, got {type(config).__name__}")
    return config


def longest_tokens(config: Mapping[str, Any]) -> int | None:
    """The longest sequence that a model takes; None: its config does not say."""
    most = config.get("max_position_embeddings")
    return most if isinstance(most, int) else None
