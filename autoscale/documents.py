"""Reads YAML files of settings, and shows their first fault in one line (pure, but it reads files)."""

import textwrap
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError


class _Loader(yaml.SafeLoader):
    """Refuses a mapping with a repeated name: PyYAML would silently take the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for name in names:
            if names.count(name) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{name} stands there twice", node.start_mark)
        return super().construct_mapping(node, deep=deep)


def load_mapping(path: Path, expected: str) -> dict[str, Any]:
    """Read a YAML file that holds a mapping; ``expected``: its content in words, for the error message.

    Raises:
        ValueError: the file cannot be read, is not YAML, or holds no mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not a text file") from None
    try:
        document = yaml.load(text, _Loader)  # noqa: S506 (a SafeLoader)
    # PyYAML raises errors other than YAMLError for values such as 2024-13-45 or !!bool x, and for deep nesting.
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: not YAML: {textwrap.shorten(str(error), 300, placeholder=' ...')}") from None
    if not isinstance(document, dict):
        raise ValueError(f"{path}: expected {expected}, got {type(document).__name__}")
    return document


def first_fault(error: ValidationError) -> str:
    """The first fault that pydantic found, as ``field: message``."""
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}{': ' if where else ''}{first['msg'].removeprefix('Value error, ')}"
