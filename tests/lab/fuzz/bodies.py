"""JSON bodies with wrong fields, drawn by schemathesis from the schemas of vLLM's own request models."""

import json
from collections.abc import Mapping
from typing import Any

import schemathesis
from hypothesis import strategies as st

from tests.lab.fuzz.hostile import HOSTILE
from tests.lab.fuzz.routes import Body, valid_body
from tests.lab.fuzz.schemas import Schema
from tests.lab.fuzz.values import CLIENTS, JUNK, NUMBERS, OUTPUT_TOKENS, SPECIAL, Field, fixed

# Long enough that the prompt is prefilled remotely.
_LONG_PROMPT = "You may obtain a copy. " * 60


def bodies(route: str, fields: Mapping[str, Field], model: str, *, is_deep: bool = False) -> st.SearchStrategy[Body]:
    """Bodies for a route: a valid one with some fields changed, or most fields drawn.

    Args:
        route: its path.
        fields: values of each field of its body (see ``field_values``).
        model: the name that the endpoint serves.
        is_deep: few changes and most of the right type, so that more bodies reach the engine.
    """
    short, long = (valid_body(route, model, text, OUTPUT_TOKENS) for text in ("x", _LONG_PROMPT))
    bases = st.sampled_from([short, short, long, *(short | pair for pair in HOSTILE["pairs"])])
    names = st.sampled_from(sorted(fields))
    changes = names.flatmap(lambda name: fixed(**{name: fields[name]}))
    if is_deep:
        return st.builds(_merged, bases, st.lists(changes, min_size=1, max_size=2))
    wrong_types = names.flatmap(lambda name: fixed(**{name: JUNK}))
    changed = st.builds(_merged, bases, st.lists(changes | wrong_types, min_size=1, max_size=3))
    drawn = st.builds(_merged, st.just(short), st.lists(changes, min_size=6, max_size=20))
    missing = st.builds(_without, changed, st.sampled_from([*short]))
    return st.sampled_from([changed] * 6 + [drawn, missing]).flatmap(lambda kind: kind)


def field_values(schemas: Mapping[str, Schema]) -> dict[str, dict[str, Field]]:
    """Values of the fields of each body: the special ones, else those of the schema, with numbers at the bounds.

    ``schemas``: of the bodies, by route.
    """
    # schemathesis draws bodies of an API's operations: here one operation per field, whose body has that field alone.
    # Fields that several bodies have are drawn from one operation.
    places: dict[str, str] = {}
    definitions: Schema = {}
    for schema in schemas.values():
        definitions |= schema.get("$defs", {})
        for name, part in schema["properties"].items():
            places.setdefault(_text(name, part), f"/{len(places)}")
    paths = {place: {"post": _operation(*json.loads(text))} for text, place in places.items()}
    info = {"title": "fields of vLLM's request models", "version": "1"}
    api = {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": definitions}}
    operations = schemathesis.openapi.from_dict(
        json.loads(json.dumps(api).replace("#/$defs/", "#/components/schemas/"))
    )
    drawn = {text: _values(text, operations[place]["POST"]) for text, place in places.items()}
    return {
        route: {name: drawn[_text(name, part)] for name, part in schema["properties"].items()} | CLIENTS
        for route, schema in schemas.items()
    }


def _text(name: str, part: Schema) -> str:
    return json.dumps([name, part])


def _values(text: str, operation: Any) -> Field:
    name, _ = json.loads(text)
    if name in SPECIAL:
        return SPECIAL[name]
    values: Field = operation.as_strategy(generation_mode=schemathesis.GenerationMode.POSITIVE).map(_only_value)
    return values | NUMBERS if '"integer"' in text or '"number"' in text else values


def _only_value(case: Any) -> Any:
    (value,) = case.body.values()
    return value


def _operation(name: str, part: Schema) -> Body:
    body = {"type": "object", "properties": {name: part}, "required": [name], "additionalProperties": False}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": body}}}, "responses": {}}


def _merged(base: Body, changes: list[Body]) -> Body:
    merged = dict(base)
    for change in changes:
        merged |= change
    return merged


def _without(body: Body, name: str) -> Body:
    return {key: value for key, value in body.items() if key != name}
