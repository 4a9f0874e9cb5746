"""Shapes for every field of vLLM's request models: a right value, a value of a wrong type, null, and a value too low.

The fields come from the models themselves, so a new version of vLLM brings its new fields into the test.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any
from zlib import crc32

from tests.lab.compat.shape import Shape, post
from tests.lab.compat.values import SHORT, VALUES, WRONG, Fields

# Stands for a prompt of token ids, which the name of a shape makes unique.
PROMPT_IDS = "{ids}"

Schema = dict[str, Any]
Body = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A request model of vLLM.

    Attributes:
        name: name of its class, for the names of the shapes.
        route: the route that takes it.
        schema: its JSON schema.
        base: a valid body, with ``{name}`` where the name of the shape makes the prompt unique.
        streams: whether every right value is also sent with ``stream: true``.
    """

    name: str
    route: str
    schema: Schema
    base: Body
    streams: bool = False


def schema_shapes(model: Model) -> Iterator[Shape]:
    """The shapes of every field of a model, in the order of its fields."""
    fields = model.schema["properties"]
    for field, part in fields.items():
        for kind, change in _changes(model, field, part):
            streamed = (False, True) if model.streams and kind.startswith("right") else (False,)
            for is_streamed in streamed:
                name = f"{model.name} {field} {kind}{' streamed' if is_streamed else ''}"
                body = named(model.base, name) | ({"stream": True} if is_streamed else {}) | change
                yield post(name, model.route, body, is_determined=is_determined(body, fields))
        body = {key: value for key, value in named(model.base, f"{model.name} {field}").items() if key != field}
        body |= SHORT.get(field, {})
        if field in model.base:
            yield post(
                f"{model.name} {field} missing",
                model.route,
                body,
                is_determined=is_determined(body, fields),
            )


def is_determined(body: Body, fields: Collection[str]) -> bool:
    """Whether a body leaves nothing to chance: it is greedy, or it has a seed that the model reads.

    ``fields``: names of the fields that vLLM's model has; it ignores others.
    """
    sampling = body.get("sampling_params")
    if sampling is None:
        has_seed = "seed" in fields and body.get("seed") is not None
        return has_seed or body.get("temperature") == 0
    return not isinstance(sampling, dict) or sampling.get("temperature") == 0 or sampling.get("seed") is not None


def named(base: Any, name: str) -> Any:
    """The body with the name of its shape: no two prompts begin alike, so none finds the KV of another."""
    if base == PROMPT_IDS:
        draw = Random(name)
        return [draw.randrange(300, 360) for _ in range(60)]
    if isinstance(base, str):
        return base.replace("{name}", f"{crc32(name.encode())} {name}")
    if isinstance(base, Mapping):
        return {key: named(value, name) for key, value in base.items()}
    return [named(each, name) for each in base] if isinstance(base, list) else base


def _changes(model: Model, field: str, part: Schema) -> Iterator[tuple[str, Body]]:
    """The kind of each value of a field, with the fields to change."""
    for number, value in enumerate(_right(model, field, part)):
        # A value that needs other fields beside it is a mapping of all of them.
        change = value.fields if isinstance(value, Fields) else {field: value}
        yield f"right{number or ''}", named(change, f"{model.name} {field} right{number or ''}")
    yield "wrong type", {field: WRONG.get(field, {"wrong": [1.5]})}
    yield "null", {field: None, **SHORT.get(field, {})}
    if (lowest := _lowest(part)) is not None:
        yield "too low", {field: lowest - 1}


def _right(model: Model, field: str, part: Schema) -> list[Any]:
    by_route = VALUES.get(f"{model.route} {field}", VALUES.get(field))
    return [_from_schema(part, model.schema)] if by_route is None else by_route


def _options(part: Schema) -> list[Schema]:
    return part.get("anyOf", [part])


def _lowest(part: Schema) -> int | None:
    """The least whole number that the schema allows; ``None``: it has no bound."""
    bounds = [option["minimum"] for option in _options(part) if option.get("type") == "integer" and "minimum" in option]
    return int(bounds[0]) if bounds else None


def _from_schema(part: Schema, whole: Schema) -> Any:
    """A value that a plain field allows, and that is not its default."""
    option = _options(part)[0]
    if "$ref" in option:
        option = whole["$defs"][option["$ref"].rpartition("/")[2]]
    if "enum" in option:
        return next(value for value in option["enum"] if value != part.get("default"))
    if "const" in option:
        return option["const"]
    kinds = {
        "boolean": not part.get("default", False),
        "integer": max(1, int(option.get("minimum", 1))),
        "number": 0.5,
        "string": "x",
        "array": [],
        "object": {},
    }
    return kinds[option["type"]]
