"""Writes docs/configuration.md from the fields of the configuration classes: ``make docs``."""

import json
import re
import types
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from autoscale.engines.profile import EngineProfile
from autoscale.extension import Extension
from autoscale.ratio import PdRatio
from kvtransfer.topology import LinkTier
from serve_app.config import AppConfig, ServiceConfig

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"

HEADER = """\
# Configuration: every field

This page is generated from the configuration classes. Run `make docs` to write it again. A test keeps the two equal.

A Tandem application is a Ray Serve YAML with one application. The fields below stand under `applications[0].args`.
Tandem also needs these fields of Serve:

| Serve's field | value |
|---|---|
| `http_options.host`, `http_options.port` | where the API listens; 127.0.0.1 accepts this machine only |
| `applications[0].import_path` | `serve_app.app:build` |
| `applications[0].autoscaling_policy` | with `autoscale`: `{policy_function: autoscale.ray_policy:JointPolicy}` |

How to read the tables:

- A path without `services` belongs to one model. An application with several models has the same fields in each entry
  of `services`, and `kv_transfer`, `ingress`, `topology`, `start_hosts` and `keeps_settings` once, beside `services`.
- `[]` is each entry of a list. `*` is each key of a mapping. `policy(dopd)` is a policy whose `kind` is `dopd`.
- The unit is the last word of a name: `_s` seconds, `_frac` a share from 0 to 1, `_bytes`, `_tokens`, `_gpus`,
  `_replicas`.
- `engine_kwargs` takes arguments of vLLM. [engine_arguments.md](engine_arguments.md) lists them, and what to write
  instead of others.
- Unknown fields are refused. `tandem validate FILE` checks a file. `tandem schema` prints the same rules for an editor.
"""

# Sections that are given by the path of a file or by one text: their own fields are not listed.
_LEAVES = {EngineProfile: "path of an engine profile", PdRatio: "P:D in quotes, or a number"}
_NAMES = {str: "text", int: "whole number", float: "number", bool: "true or false", Path: "path", type(None): "null"}
_TABLE = "| field | type | default | bounds | meaning |\n|---|---|---|---|---|"
_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def page() -> str:
    """The whole page."""
    return "\n".join([HEADER, *sections()])


def sections() -> Iterator[str]:
    """One heading and one table for each class, in the order of the YAML."""
    paths: dict[type[BaseModel], list[str]] = {AppConfig: []}
    _collect(ServiceConfig, "", paths)
    for name, field in AppConfig.model_fields.items():
        if name != "services":
            _open(field, name, paths)
    titles = {section: _title(section, places) for section, places in paths.items()}
    for section, title in titles.items():
        yield f"## {title}\n\n{_summary(section)}\n\n{_TABLE}"
        for name, field in section.model_fields.items():
            if name != "kind":
                cells = (f"`{name}`", _type(field.annotation, titles), _default(field), _bounds(field), _meaning(field))
                yield "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"
        yield ""


def slug(heading: str) -> str:
    """The anchor that a heading gets on GitHub."""
    shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", shown.strip().lower()).replace(" ", "-")


def _title(section: type[BaseModel], places: list[str]) -> str:
    if not places:
        return "The application" if section is AppConfig else "One model"
    title = ", ".join(f"`{place}`" for place in places)
    return title if (kind := _kind(section)) is None else f"{title}, kind `{kind}`"


def _kind(section: type[BaseModel]) -> str | None:
    """The value of ``kind`` by which a configuration chooses this class among others."""
    if section is Extension:
        return "package.module:Class"
    field = section.model_fields.get("kind")
    return None if field is None else str(get_args(field.annotation)[0])


def _collect(section: type[BaseModel], path: str, paths: dict[type[BaseModel], list[str]]) -> None:
    places = paths.setdefault(section, [])
    if path and path not in places:
        places.append(path)
    if (kind := _kind(section)) is not None:
        path += f"({kind})"
    for name, field in section.model_fields.items():
        _open(field, f"{path}.{name}".lstrip("."), paths)


def _open(field: FieldInfo, path: str, paths: dict[type[BaseModel], list[str]]) -> None:
    for section, suffix in sections_in(field.annotation):
        _collect(section, path + suffix, paths)


def sections_in(annotation: Any, suffix: str = "") -> Iterator[tuple[type[BaseModel], str]]:
    """The configuration classes in an annotation, and the suffix of the path to each (``[]``, ``.*``)."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if annotation not in _LEAVES:
            yield annotation, suffix
        return
    arguments = get_args(annotation)
    origin = get_origin(annotation)
    if origin is tuple:
        yield from sections_in(arguments[0], suffix + "[]")
    elif origin is dict:
        yield from sections_in(arguments[1], suffix + ".*")
    elif origin is Annotated:
        yield from sections_in(arguments[0], suffix)
    elif origin in (Union, types.UnionType):
        for argument in arguments:
            yield from sections_in(argument, suffix)


def _type(annotation: Any, titles: Mapping[type[BaseModel], str]) -> str:
    """An annotation in the words of a YAML."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0], titles)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_type(argument, titles) for argument in arguments))
    if origin is tuple:
        return f"list of {_type(arguments[0], titles)}"
    if origin is dict:
        return f"mapping from {_type(arguments[0], titles)} to {_type(arguments[1], titles)}"
    if annotation in _LEAVES:
        return _LEAVES[annotation]
    if annotation is LinkTier:
        return ", ".join(f"`{tier.name.lower()}`" for tier in LinkTier)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return ", ".join(f"`{member.value}`" for member in annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"[{_kind(annotation) or 'section'}](#{slug(titles[annotation])})"
    return _NAMES.get(annotation, "any value")


def _meaning(field: FieldInfo) -> str:
    """A field's description; if it has none, the first line of its section's docstring."""
    sections = [section for section, _ in sections_in(field.annotation)]
    return " ".join((field.description or "").split()) or (_summary(sections[0]) if len(sections) == 1 else "")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return "its defaults"
    if value is None or value is PydanticUndefined:
        return "none"
    if isinstance(value, LinkTier):
        return f"`{value.name.lower()}`"
    if isinstance(value, Enum):
        return f"`{value.value}`"
    return f"`{json.dumps(value, default=str)}`"


def _bounds(field: FieldInfo) -> str:
    found = []
    for rule in field.metadata:
        found += [f"{sign} {getattr(rule, name):g}" for name, sign in _SIGNS.items() if hasattr(rule, name)]
        if getattr(rule, "min_length", None):
            found.append(f"at least {rule.min_length} long")
        if getattr(rule, "pattern", None):
            found.append(f"pattern `{rule.pattern}`")
    return ", ".join(found)


def _summary(section: type[BaseModel]) -> str:
    """The first line of a class's docstring."""
    return (section.__doc__ or "").strip().splitlines()[0]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
