"""How files of settings are read, and what is wrong with them said in one line (pure)."""

from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError


def load_mapping(path: Path, expected: str) -> dict[str, Any]:
    """Read a YAML file that holds names and values.

    Args:
        path: the file.
        expected: what it should hold, for who gave another.

    Raises:
        ValueError: it cannot be read, is no YAML, or holds something else; names the file.
    """
    try:
        document = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(document, dict):
        raise ValueError(f"{path}: expected {expected}")
    return document


def first_fault(error: ValidationError) -> str:
    """The first thing that pydantic refuses, as ``field: message``."""
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}{': ' if where else ''}{first['msg'].removeprefix('Value error, ')}"
