"""JSON bodies with wrong fields, drawn by schemathesis from the schemas of vLLM's own request models."""

import json
from typing import Any

import schemathesis
from hypothesis import strategies as st

from tests.lab.fuzz.hostile import HOSTILE, hostile

Body = dict[str, Any]
Schema = dict[str, Any]

# Whole numbers at the bounds of what engines store, and the context lengths of the engines that are fuzzed.
_INTS = [-(2**63) - 1, -(2**63), -(2**31) - 1, -2, -1, 0, 1, 2, 7, 20, 4096, 16384, 2**31, 2**32, 2**63 - 1, 2**63,
         10**30, 10**400, -(10**400)]  # fmt: skip
_FLOATS = [float("nan"), float("inf"), -float("inf"), -1.0, -0.0, 0.0, 5e-324, 1e-9, 0.5, 1.0, 1.5, 2.0, 1e38, 1e308]
# Output length of the bodies that are mostly valid, in tokens.
_OUTPUT_TOKENS = 4
# Long enough that the prompt is prefilled remotely.
_LONG_PROMPT = "You may obtain a copy. " * 60

_numbers = st.sampled_from(_INTS) | st.sampled_from(_FLOATS)
_texts = hostile("text") | st.text(max_size=20)
_scalars = st.none() | st.booleans() | _numbers | st.integers() | _texts
_junk = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_texts, inner, max_size=4), max_leaves=12
)


def _object(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Body]:
    return st.fixed_dictionaries(fields)


def _some_of(names: str) -> st.SearchStrategy[Body]:
    """Up to four of these keys, with anything as their values."""
    return st.dictionaries(st.sampled_from(names.split()), _junk, max_size=4)


_json_schemas = hostile("json") | _junk
_names = hostile("name") | _junk
_links = hostile("link") | _junk
_functions = _object(name=_names, parameters=_json_schemas)
_calls = _object(
    id=st.just("c"),
    type=st.just("function"),
    function=_object(name=_names, arguments=hostile("arguments") | _junk),
)
_content_values = _junk | _texts | _links | _object(url=_links, detail=st.just("auto"))
_content_parts = (
    hostile("part").flatmap(lambda kind: _object(type=st.just(kind), **{str(kind): _content_values}))
    | _object(type=st.just("input_audio"), input_audio=_object(data=_links, format=_texts))
    | _junk
)
_messages = (
    _object(role=hostile("role") | _junk, content=_texts | st.lists(_content_parts, max_size=3))
    | _object(role=st.just("assistant"), content=st.none(), tool_calls=st.lists(_calls | _junk, max_size=2))
    | _object(role=st.just("tool"), content=st.just("x"), tool_call_id=_texts | _junk)
    | _some_of("role content name tool_calls reasoning refusal")
    | _junk
)
# The tiny model has 1,024 tokens.
_token_ids = st.sampled_from([*_INTS, 300, 1023, 1024, 1025]) | st.integers(0, 1100)
_prompts = (
    _texts
    | st.lists(_token_ids | _texts | _junk, max_size=8)
    | st.lists(st.lists(_token_ids, max_size=4), max_size=4)
    | st.integers(1, 9000).map(lambda count: [300] * count)
    | _junk
)
_transfers = hostile("kv_transfer") | _object(prompt_token_ids=_prompts) | _junk
# One constraint alone may reach the engine; vLLM refuses several together.
_one_constraint: list[st.SearchStrategy[Any]] = [
    _object(**{name: hostile(name) | _junk}) for name in ("regex", "grammar", "json", "choice", "structural_tag")
]
# Values of fields for which most of what the schema allows is refused early, or does no harm.
_SPECIAL: dict[str, st.SearchStrategy[Any]] = {
    "messages": st.lists(_messages, max_size=4),
    "prompt": _prompts,
    "tools": st.lists(_object(type=st.sampled_from(["function", "custom"]), function=_functions) | _junk, max_size=3),
    "tool_choice": hostile("tool_choice") | _object(type=st.just("function"), function=_object(name=_names)) | _junk,
    "response_format": _object(
        type=st.just("json_schema"), json_schema=_object(name=st.just("x"), schema=_json_schemas) | _junk
    )
    | _object(type=hostile("format") | _junk)
    | _object(type=st.just("structural_tag"), format=_junk, structures=_junk, triggers=_junk),
    "structured_outputs": st.one_of(
        *_one_constraint, _some_of("json regex grammar choice json_object whitespace_pattern x")
    ),
    "kv_transfer_params": _transfers,
    "ec_transfer_params": _transfers,
    "vllm_xargs": _object(kv_transfer_params=_transfers)
    | _some_of("kv_transfer_params ec_transfer_params kv_cache_report_mode request_id x"),
    "logit_bias": st.dictionaries(_token_ids.map(str) | _texts, _numbers | _junk, max_size=4),
    "stop": st.lists(_texts, max_size=6) | _texts | _junk,
    "bad_words": st.lists(_texts, max_size=6) | _junk,
    "stop_token_ids": st.lists(_token_ids, max_size=6),
    "allowed_token_ids": st.lists(_token_ids, max_size=6),
    "logprob_token_ids": st.lists(_token_ids, max_size=6),
    "chat_template": hostile("chat_template"),
    "chat_template_kwargs": _some_of("chat_template messages tokenize x tools"),
    "stream_options": _some_of("include_usage continuous_usage_stats x"),
    "suffix": _texts,
    "best_of": _numbers,
    **dict.fromkeys(("model", "audio", "modalities", "functions"), _junk),
}


def bodies(endpoint: str, schema: Schema, model: str, *, is_deep: bool = False) -> st.SearchStrategy[Body]:
    """Bodies for ``chat`` or ``completions``: a valid one with some fields changed, or most fields drawn.

    Args:
        endpoint: ``chat`` or ``completions``.
        schema: JSON Schema of vLLM's request model.
        model: the name that the endpoint serves.
        is_deep: few changes and most of the right type, so that more bodies reach the engine.
    """
    fields = _fields(schema)
    short, long = (
        {"model": model, "max_tokens": _OUTPUT_TOKENS} | _prompt(endpoint, text) for text in ("x", _LONG_PROMPT)
    )
    bases = st.sampled_from([short, short, long, *(short | pair for pair in HOSTILE["pairs"])])
    names = st.sampled_from(sorted(fields))
    changes = names.flatmap(lambda name: _object(**{name: fields[name]}))
    if is_deep:
        return st.builds(_merged, bases, st.lists(changes, min_size=1, max_size=2))
    wrong_types = names.flatmap(lambda name: _object(**{name: _junk}))
    changed = st.builds(_merged, bases, st.lists(changes | wrong_types, min_size=1, max_size=3))
    drawn = st.builds(_merged, st.just(short), st.lists(changes, min_size=6, max_size=20))
    missing = st.builds(_without, changed, st.sampled_from([*short]))
    return st.sampled_from([changed] * 6 + [drawn, missing]).flatmap(lambda kind: kind)


def _fields(schema: Schema) -> dict[str, st.SearchStrategy[Any]]:
    """Values of each field: the special ones, else those of the schema, with numbers at the bounds as well."""
    parts = {name: part for name, part in schema["properties"].items() if name not in _SPECIAL}
    # schemathesis draws bodies of an API's operations: here one operation per field, whose body has that field alone.
    paths = {f"/{name}": {"post": _operation(name, part)} for name, part in parts.items()}
    info = {"title": "fields of one request model", "version": "1"}
    api = {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schema.get("$defs", {})}}
    text = json.dumps(api).replace("#/$defs/", "#/components/schemas/")
    operations = schemathesis.openapi.from_dict(json.loads(text))
    fields = dict(_SPECIAL)
    for name, part in parts.items():
        cases = operations[f"/{name}"]["POST"].as_strategy(generation_mode=schemathesis.GenerationMode.POSITIVE)
        fields[name] = cases.map(_only_value)
        if '"integer"' in (of_part := json.dumps(part)) or '"number"' in of_part:
            fields[name] |= _numbers
    return fields


def _only_value(case: Any) -> Any:
    (value,) = case.body.values()
    return value


def _operation(name: str, part: Schema) -> Body:
    body = {"type": "object", "properties": {name: part}, "required": [name], "additionalProperties": False}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": body}}}, "responses": {}}


def _prompt(endpoint: str, text: str) -> Body:
    return {"messages": [{"role": "user", "content": text}]} if endpoint == "chat" else {"prompt": text}


def _merged(base: Body, changes: list[Body]) -> Body:
    merged = dict(base)
    for change in changes:
        merged |= change
    return merged


def _without(body: Body, name: str) -> Body:
    return {key: value for key, value in body.items() if key != name}
