"""JSON bodies that are wrong in one way or many, drawn from the schemas of vLLM's own request models."""

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

Body = dict[str, Any]
Schema = dict[str, Any]

_INT32, _INT64 = 2**31, 2**63
_INTS = [-_INT64 - 1, -_INT64, -_INT32 - 1, -2, -1, 0, 1, 2, 7, 20, 4096, 16384, _INT32, 2**32, _INT64 - 1, _INT64,
         10**30, 10**400, -(10**400)]  # fmt: skip
_FLOATS = [float("nan"), float("inf"), -float("inf"), -1.0, -0.0, 0.0, 5e-324, 1e-9, 0.5, 1.0, 1.5, 2.0, 1e38, 1e308]
_TEXTS = ["", " ", "\x00", "\r\n", "\x1b[31m", "\ufeff", "\u202e", "e\u0301", "👩‍👩‍👧", "A" * 5000,
          "{}", "null", "__proto__", "../../etc/passwd", "<|im_start|>system", "%s%n", "{{ 7 * 7 }}", "${x}",
          "data: [DONE]\n\n"]  # fmt: skip
_DEPTH = 4

_texts = st.sampled_from(_TEXTS) | st.text(max_size=20)
_scalars = st.none() | st.booleans() | st.sampled_from(_INTS) | st.sampled_from(_FLOATS) | st.integers() | _texts
junk = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_texts, inner, max_size=4), max_leaves=12
)

_REGEXES = ["(", "[", "a**", "(a+)+$", "(?=a)b", "(?<n>a)(?P=n)", "\\", "\\p{Foo}", "\\1", "^$", "", ".", ".*",
            "(((a{1,90}){1,90}){1,90}){1,90}", "a{100000}", "a{2,1}", "(?i)x", "\x00", "[\ud800]",
            "(" * 300 + ")" * 300, "|" * 999]  # fmt: skip
_GRAMMARS = ["", "root", "root ::=", "root ::= root", 'root ::= "a" | root root', "x ::= y", 'start: "a"', 'root ::= "',
             "root ::= [", 'root ::= ("a"*)*', 'root ::= "a"{1,100000}', "%import common.WORD", 'root ::= ""', "\x00",
             "# nothing"]  # fmt: skip
_JSON_SCHEMAS: list[Any] = [
    {}, True, False, None, 3, [], "", "{", "{}", "null", {"type": "nothing"}, {"type": ["object", "null"]}, {"type": 3},
    {"$ref": "#"}, {"$ref": "#/nowhere"}, {"$ref": "http://127.0.0.1:9/x"}, {"$defs": {"a": {"$ref": "#/$defs/a"}},
    "$ref": "#/$defs/a"},
    {"type": "string", "pattern": "("}, {"type": "string", "pattern": "(a+)+$"}, {"type": "string", "minLength": 10**9},
    {"type": "string", "minLength": 5, "maxLength": 1}, {"type": "string", "maxLength": 10**6}, {"type": "string",
    "format": "date"},
    {"type": "array", "minItems": 10**9}, {"type": "array", "maxItems": 2000, "items": {"type": "array",
    "maxItems": 2000}},
    {"type": "integer", "minimum": 10**30, "maximum": -(10**30)}, {"type": "integer", "multipleOf": 0},
    {"type": "number", "minimum": float("nan")},
    {"enum": []}, {"enum": [None, {}, []]}, {"const": "\ud800"}, {"anyOf": []}, {"allOf": [{"type": "string"},
    {"type": "integer"}]},
    {"not": {}}, {"type": "object", "required": ["a"], "properties": {}, "additionalProperties": False},
    {"type": "object", "properties": 3},
    {"type": "object", "properties": {str(n): {"type": "string"} for n in range(300)}}, {"type": "object",
    "patternProperties": {"(": {}}},
    {"type": "object", "minProperties": 10**9}, {"type": "object", "propertyNames": {"pattern": "["}},
]  # fmt: skip
_CHOICES: list[Any] = [[], [""], ["a"] * 3, ["\x00"], ["a", 3], [[]]]
_json_schemas = st.sampled_from(_JSON_SCHEMAS) | junk
_constraints = (
    st.builds(lambda value: {"regex": value}, st.sampled_from(_REGEXES) | junk)
    | st.builds(lambda value: {"grammar": value}, st.sampled_from(_GRAMMARS) | junk)
    | st.builds(lambda value: {"json": value}, _json_schemas)
    | st.builds(lambda value: {"choice": value}, st.sampled_from(_CHOICES) | junk)
    | st.builds(lambda value: {"structural_tag": value}, st.sampled_from(["", "{}", "[]",
        '{"type": "structural_tag"}']) | junk)
    | st.builds(lambda value: {"json_object": value}, junk)
    | st.dictionaries(st.sampled_from(["json", "regex", "grammar", "choice", "whitespace_pattern", "x"]), junk,
        max_size=4)
)  # fmt: skip
_formats = (
    st.builds(lambda s: {"type": "json_schema", "json_schema": {"name": "x", "schema": s}}, _json_schemas)
    | st.builds(lambda s: {"type": "json_schema", "json_schema": s}, junk)
    | st.builds(lambda kind: {"type": kind}, st.sampled_from(["json_object", "text", "structural_tag", "xml"]) | junk)
    | st.builds(lambda value: {"type": "structural_tag", "format": value, "structures": value, "triggers": value}, junk)
)
_names = st.sampled_from(["f", "", " ", "f" * 65, "a b", "\x00", "\ud800", "get_weather"]) | junk
_tools = st.lists(
    st.builds(
        lambda kind, name, parameters: {"type": kind, "function": {"name": name, "parameters": parameters}},
        st.sampled_from(["function"] * 6 + ["custom", ""]),
        _names,
        _json_schemas,
    )
    | junk,
    max_size=3,
)
_tool_choices = (
    st.sampled_from(["auto", "none", "required", "zzz"])
    | st.builds(lambda name: {"type": "function", "function": {"name": name}}, _names)
    | junk
)
_KINDS_OF_PART = ["text", "image_url", "input_audio", "audio_url", "video_url", "file", "refusal", "image_embeds",
    "thinking",
                  "image_pil", "prompt_embeds", "audio_embeds", "tool_reference", "zzz", "", None, 3]  # fmt: skip
_links = st.sampled_from(["http://127.0.0.1:9/x", "file:///etc/passwd", "data:image/png;base64,", "data:,",
    "data:image/png;base64,!!!!",
                          "https://", "ftp://x", "\x00", ""]) | junk  # fmt: skip
_parts = (
    st.builds(
        lambda kind, value: {"type": kind, str(kind): value},
        st.sampled_from(_KINDS_OF_PART),
        junk | _texts | _links | st.builds(lambda url: {"url": url, "detail": "auto"}, _links),
    )
    | st.builds(
        lambda data, form: {"type": "input_audio", "input_audio": {"data": data, "format": form}}, _links, _texts
    )
    | junk
)
_roles = st.sampled_from(["user", "system", "assistant", "tool", "developer", "function", "root", ""]) | junk
_calls = st.builds(
    lambda name, arguments: {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}},
    _names,
    st.sampled_from(["{}", "{", "[]", "", "null"]) | junk,
)
_messages = st.lists(
    st.builds(lambda role, content: {"role": role, "content": content}, _roles, _texts | st.lists(_parts, max_size=3))
    | st.builds(lambda calls: {"role": "assistant", "content": None, "tool_calls": calls}, st.lists(_calls | junk,
        max_size=2))
    | st.builds(lambda key: {"role": "tool", "content": "x", "tool_call_id": key}, _texts | junk)
    | st.dictionaries(st.sampled_from(["role", "content", "name", "tool_calls", "reasoning", "refusal"]), junk,
        max_size=4)
    | junk,
    max_size=4,
)  # fmt: skip
# The tiny model has 1,024 tokens.
_ids = st.sampled_from([*_INTS, 0, 1, 300, 1023, 1024, 1025]) | st.integers(0, 1100)
_prompts = (
    _texts
    | st.lists(_ids, max_size=8)
    | st.lists(st.lists(_ids, max_size=4), max_size=4)
    | st.lists(_texts, max_size=4)
    | st.lists(junk, max_size=3)
    | st.integers(1, 9000).map(lambda n: [300] * n)
    | junk
)
_transfers: st.SearchStrategy[Any] = st.sampled_from(
    [
        {"do_remote_prefill": True, "remote_block_ids": [0, 1, 2], "remote_engine_id": "x", "remote_request_id": "x",
         "remote_host": "127.0.0.1", "remote_port": 9, "tp_size": 1},
        {"do_remote_decode": True}, {"do_remote_prefill": True}, {"do_remote_prefill": True,
        "do_remote_decode": True}, "x", [],
    ]
) | junk  # fmt: skip
_extras = st.dictionaries(
    st.sampled_from(["kv_transfer_params", "ec_transfer_params", "kv_cache_report_mode", "request_id", "x"]),
    _transfers,
    max_size=3,
)
# Where the schema alone would seldom say anything that gets far.
_SPECIAL: dict[str, st.SearchStrategy[Any]] = {
    "messages": _messages,
    "prompt": _prompts,
    "tools": _tools,
    "tool_choice": _tool_choices,
    "response_format": _formats,
    "structured_outputs": _constraints,
    "kv_transfer_params": _transfers,
    "ec_transfer_params": _transfers,
    "vllm_xargs": _extras,
    "logit_bias": st.dictionaries(_ids.map(str) | _texts, st.sampled_from(_FLOATS) | junk, max_size=4),
    "stop": st.lists(_texts, max_size=6) | _texts | junk,
    "bad_words": st.lists(_texts, max_size=6) | junk,
    "stop_token_ids": st.lists(_ids, max_size=6),
    "allowed_token_ids": st.lists(_ids, max_size=6),
    "logprob_token_ids": st.lists(_ids, max_size=6),
    "chat_template": st.sampled_from(["", "{{ 7 }}", "{% for x in range(10**9) %}x{% endfor %}", "{{ ''.__class__ }}"]),
    "chat_template_kwargs": st.dictionaries(st.sampled_from(["chat_template", "messages", "tokenize", "x", "tools"]),
    junk, max_size=3),
    "stream_options": st.dictionaries(st.sampled_from(["include_usage", "continuous_usage_stats", "x"]), junk,
    max_size=3),
    "model": junk,
    "suffix": _texts,
    "best_of": st.sampled_from(_INTS),
    "audio": junk,
    "modalities": junk,
    "functions": junk,
}  # fmt: skip
# Two fields that only meet each other.
_PAIRS: list[Body] = [
    {"stream": True, "stream_options": {"include_usage": True}},
    {"logprobs": True, "top_logprobs": 3},
    {"echo": True, "max_tokens": 1},
    {"use_beam_search": True, "n": 3},
    {"continue_final_message": True, "add_generation_prompt": False},
    {"ignore_eos": True, "min_tokens": 3, "max_tokens": 4},
    {"stream": True, "n": 3},
]
_TOKENS = 4
_LONG = "You may obtain a copy. " * 60


def bodies(endpoint: str, schema: Schema, model: str, *, is_deep: bool = False) -> st.SearchStrategy[Body]:
    """Bodies for ``chat`` or ``completions``: a valid one with some fields changed, or all of it drawn.

    Args:
        endpoint: ``chat`` or ``completions``.
        schema: JSON Schema of vLLM's request model.
        model: the name that the endpoint serves.
        is_deep: few changes and most of the right type, so that more of them reach the engine.
    """
    of_schema = _Drawn(schema)
    fields = {name: of_schema.strategy(part) for name, part in schema["properties"].items()} | _SPECIAL
    short: Body = {"model": model, "max_tokens": _TOKENS}
    short |= {"messages": [{"role": "user", "content": "x"}]} if endpoint == "chat" else {"prompt": "x"}
    long = {"messages": [{"role": "user", "content": _LONG}]} if endpoint == "chat" else {"prompt": _LONG}
    bases = st.sampled_from([short, short, short | long, *(short | pair for pair in _PAIRS)])
    names = st.sampled_from(sorted(fields))
    changes = names.flatmap(lambda name: fields[name].map(lambda value: {name: value}))
    wrong_types = st.builds(lambda name, value: {name: value}, names, junk)
    if is_deep:
        return st.builds(_merged, bases, st.lists(changes, min_size=1, max_size=2))
    changed = st.builds(_merged, bases, st.lists(changes | wrong_types, min_size=1, max_size=3))
    drawn = st.builds(_merged, st.just(short), st.lists(changes, min_size=6, max_size=20))
    missing = st.builds(
        lambda body, gone: {name: value for name, value in body.items() if name != gone},
        changed,
        st.sampled_from([*short]),
    )
    return st.sampled_from([changed] * 6 + [drawn, missing]).flatmap(lambda kind: kind)


def _merged(base: Body, changes: list[Body]) -> Body:
    merged = dict(base)
    for change in changes:
        merged |= change
    return merged


class _Drawn:
    """JSON Schema -> values that obey it, at their bounds where there are any."""

    def __init__(self, schema: Schema) -> None:
        self._definitions = schema.get("$defs", {})

    def strategy(self, schema: Schema, depth: int = 0) -> st.SearchStrategy[Any]:
        """Values of one schema; ``depth`` counts what lies around it."""
        if depth > _DEPTH:
            return _scalars
        if "$ref" in schema:
            return self.strategy(self._definitions[schema["$ref"].rpartition("/")[2]], depth + 1)
        for union in ("anyOf", "oneOf"):
            if union in schema:
                return st.one_of([self.strategy(part, depth) for part in schema[union]])
        if "const" in schema or "enum" in schema:
            return st.sampled_from([schema["const"]] if "const" in schema else schema["enum"])
        draw: dict[str, Callable[[], st.SearchStrategy[Any]]] = {
            "string": lambda: _texts,
            "integer": lambda: st.sampled_from(_INTS),
            "number": lambda: st.sampled_from(_FLOATS) | st.sampled_from(_INTS),
            "boolean": st.booleans,
            "null": st.none,
            "array": lambda: st.lists(self.strategy(schema.get("items") or {}, depth + 1), max_size=3),
            "object": lambda: self._object(schema, depth),
        }
        return draw[schema["type"]]() if schema.get("type") in draw else junk

    def _object(self, schema: Schema, depth: int) -> st.SearchStrategy[Any]:
        properties = schema.get("properties")
        if not properties:
            inner = schema.get("additionalProperties")
            values = self.strategy(inner, depth + 1) if isinstance(inner, dict) else junk
            return st.dictionaries(_texts | _ids.map(str), values, max_size=3)
        parts = {name: self.strategy(part, depth + 1) for name, part in properties.items()}
        required = set(schema.get("required", ()))
        return st.fixed_dictionaries(
            {name: part for name, part in parts.items() if name in required},
            optional={name: part for name, part in parts.items() if name not in required},
        )
