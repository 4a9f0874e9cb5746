"""Values of the fields of bodies: hostile ones, and odd ones of the right type."""

from typing import Any

from hypothesis import strategies as st

from tests.lab.fuzz.hostile import hostile
from tests.lab.fuzz.routes import Body

Field = st.SearchStrategy[Any]

# Whole numbers at the bounds of what engines store, and the context lengths of the engines that are fuzzed.
_INTS = [-(2**63) - 1, -(2**63), -(2**31) - 1, -2, -1, 0, 1, 2, 7, 20, 4096, 16384, 2**31, 2**32, 2**63 - 1, 2**63,
         10**30, 10**400, -(10**400)]  # fmt: skip
_FLOATS = [float("nan"), float("inf"), -float("inf"), -1.0, -0.0, 0.0, 5e-324, 1e-9, 0.5, 1.0, 1.5, 2.0, 1e38, 1e308]
# Output length of the bodies that are mostly valid, in tokens.
OUTPUT_TOKENS = 4

NUMBERS = st.sampled_from(_INTS) | st.sampled_from(_FLOATS)
_texts = hostile("text") | st.text(max_size=20)
_scalars = st.none() | st.booleans() | NUMBERS | st.integers() | _texts
JUNK = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_texts, inner, max_size=4), max_leaves=12
)


def fixed(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Body]:
    """An object with just these fields."""
    return st.fixed_dictionaries(fields)


def _some_of(names: str) -> st.SearchStrategy[Body]:
    """Up to four of these keys, with anything as their values."""
    return st.dictionaries(st.sampled_from(names.split()), JUNK, max_size=4)


_json_schemas = hostile("json") | JUNK
_names = hostile("name") | JUNK
_links = hostile("link") | JUNK
_functions = fixed(name=_names, parameters=_json_schemas)
_calls = fixed(
    id=st.just("c"),
    type=st.just("function"),
    function=fixed(name=_names, arguments=hostile("arguments") | JUNK),
)
_content_values = JUNK | _texts | _links | fixed(url=_links, detail=st.just("auto"))
_content_parts = (
    hostile("part").flatmap(lambda kind: fixed(type=st.just(kind), **{str(kind): _content_values}))
    | fixed(type=st.just("input_audio"), input_audio=fixed(data=_links, format=_texts))
    | JUNK
)
# Parts of the Responses API and of Anthropic's.
_typed_parts = hostile("typed_part").flatmap(
    lambda kind: fixed(
        type=st.just(kind),
        text=_texts,
        source=JUNK | fixed(type=st.sampled_from(["base64", "url"]), data=_links, url=_links, media_type=_texts),
        image_url=_links,
        id=_texts,
        tool_use_id=_texts,
        name=_names,
        input=JUNK,
        content=JUNK,
        thinking=_texts,
        signature=_texts,
    )
)
_content_parts |= _typed_parts
_messages = (
    fixed(role=hostile("role") | JUNK, content=_texts | st.lists(_content_parts, max_size=3))
    | fixed(role=st.just("assistant"), content=st.none(), tool_calls=st.lists(_calls | JUNK, max_size=2))
    | fixed(role=st.just("tool"), content=st.just("x"), tool_call_id=_texts | JUNK)
    | _some_of("role content name tool_calls reasoning refusal")
    | JUNK
)
_items = (
    _messages
    | fixed(type=st.just("message"), role=hostile("role"), content=_texts | st.lists(_content_parts, max_size=3))
    | fixed(type=st.just("function_call"), call_id=_texts, name=_names, arguments=hostile("arguments") | JUNK)
    | fixed(type=st.just("function_call_output"), call_id=_texts | JUNK, output=_texts | JUNK)
    | fixed(type=st.just("reasoning"), id=_texts, summary=st.lists(JUNK, max_size=2), content=JUNK)
    | fixed(type=hostile("typed_part") | JUNK, id=_texts)
)
# The tiny model has 1,024 tokens.
_token_ids = st.sampled_from([*_INTS, 300, 1023, 1024, 1025]) | st.integers(0, 1100)
_prompts = (
    _texts
    | st.lists(_token_ids | _texts | JUNK, max_size=8)
    | st.lists(st.lists(_token_ids, max_size=4), max_size=4)
    | st.integers(1, 9000).map(lambda count: [300] * count)
    | JUNK
)
_transfers = hostile("kv_transfer") | fixed(prompt_token_ids=_prompts) | JUNK
_hidden = fixed(kv_transfer_params=_transfers) | _some_of(
    "kv_transfer_params ec_transfer_params kv_cache_report_mode request_id x"
)
# One constraint alone may reach the engine; vLLM refuses several together.
_one_constraint: list[st.SearchStrategy[Any]] = [
    fixed(**{name: hostile(name) | JUNK}) for name in ("regex", "grammar", "json", "choice", "structural_tag")
]
_tools = (
    fixed(type=st.sampled_from(["function", "custom"]), function=_functions)
    | fixed(type=st.just("function"), name=_names, parameters=_json_schemas, strict=JUNK)
    | fixed(name=_names, input_schema=_json_schemas)
    | fixed(type=hostile("built_in_tool"))
    | JUNK
)
_token_lists = st.lists(_token_ids, max_size=8) | st.integers(1, 9000).map(lambda count: [300] * count) | JUNK
_generated = fixed(
    choices=st.lists(
        fixed(index=_token_ids, token_ids=_token_lists, finish_reason=hostile("finish") | JUNK, logprobs=JUNK),
        max_size=3,
    )
    | JUNK,
    usage=JUNK,
    kv_transfer_params=_transfers,
)
_ranked = _texts | st.lists(_texts | _content_parts | _token_lists, max_size=4) | JUNK
_sampling = (
    st.builds(
        lambda base, more: base | more,
        st.just({"max_tokens": OUTPUT_TOKENS}),
        st.dictionaries(hostile("sampling_field"), NUMBERS | _token_lists | JUNK, max_size=3)
        | fixed(extra_args=_hidden)
        | fixed(structured_outputs=st.one_of(*_one_constraint)),
    )
    | JUNK
)
# Values of fields for which most of what the schema allows is refused early, or does no harm.
SPECIAL: dict[str, st.SearchStrategy[Any]] = {
    "messages": st.lists(_messages, max_size=4) | st.lists(st.lists(_messages, max_size=2), max_size=3),
    "prompt": _prompts,
    "tools": st.lists(_tools, max_size=3),
    "tool_choice": hostile("tool_choice")
    | fixed(type=st.just("function"), function=fixed(name=_names))
    | fixed(type=hostile("tool_choice") | st.just("tool"), name=_names)
    | JUNK,
    "input": _prompts | st.lists(_items, max_size=4),
    "instructions": _texts | JUNK,
    "system": _texts | st.lists(_content_parts, max_size=3) | JUNK,
    "previous_response_id": hostile("id") | JUNK,
    "token_ids": _token_lists,
    "tokens": _token_lists,
    "label_token_ids": _token_lists,
    "generate_response": _generated,
    "generate_responses": st.lists(_generated, max_size=3),
    "generate_chunk": _generated,
    **dict.fromkeys(("query", "queries", "items", "documents", "text_1", "text_2", "data_1", "data_2"), _ranked),
    "response_format": fixed(
        type=st.just("json_schema"), json_schema=fixed(name=st.just("x"), schema=_json_schemas) | JUNK
    )
    | fixed(type=hostile("format") | JUNK)
    | fixed(type=st.just("structural_tag"), format=JUNK, structures=JUNK, triggers=JUNK),
    "structured_outputs": st.one_of(
        *_one_constraint, _some_of("json regex grammar choice json_object whitespace_pattern x")
    ),
    "kv_transfer_params": _transfers,
    "ec_transfer_params": _transfers,
    "vllm_xargs": _hidden,
    "sampling_params": _sampling,
    "logit_bias": st.dictionaries(_token_ids.map(str) | _texts, NUMBERS | JUNK, max_size=4),
    "stop": st.lists(_texts, max_size=6) | _texts | JUNK,
    "bad_words": st.lists(_texts, max_size=6) | JUNK,
    "stop_token_ids": st.lists(_token_ids, max_size=6),
    "allowed_token_ids": st.lists(_token_ids, max_size=6),
    "logprob_token_ids": st.lists(_token_ids, max_size=6),
    "chat_template": hostile("chat_template"),
    "chat_template_kwargs": _some_of("chat_template messages tokenize x tools"),
    "stream_options": _some_of("include_usage continuous_usage_stats x"),
    "suffix": _texts,
    "model": JUNK,
}
# The fields in which a client may hide others, and those of OpenAI's that no engine has: every body may have them.
CLIENTS: dict[str, Field] = {
    "best_of": NUMBERS,
    **dict.fromkeys(("audio", "modalities", "functions", "model"), JUNK),
    **{name: SPECIAL[name] for name in ("kv_transfer_params", "ec_transfer_params", "vllm_xargs")},
}
