"""How files of settings are read, and what is wrong with them said in one line (pure)."""

from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError


class _Loader(yaml.SafeLoader):
    """YAML in which no name stands twice: PyYAML takes the last without a word, and one was a mistake."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for name in names:
            if names.count(name) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{name} stands there twice", node.start_mark)
        return super().construct_mapping(node, deep=deep)


def load_mapping(path: Path, expected: str) -> dict[str, Any]:
    """Read a YAML file that holds names and values.

    Args:
        path: the file.
        expected: what it should hold, for who gave another.

    Raises:
        ValueError: it cannot be read, is no YAML, or holds something else; names the file.
    """
    try:
        document = yaml.load(path.read_text(), _Loader)  # noqa: S506 (a SafeLoader)
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
