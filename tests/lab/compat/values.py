"""Right and wrong values of fields for which the schema alone tells too little.

A key is a field, or a route and a field; the latter comes first.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Fields:
    """A value with other fields that it needs; ``fields``: all of them."""

    fields: dict[str, Any]


FUNCTION = {
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 6}}, "required": ["city"]},
}
TOOL = {"type": "function", "function": FUNCTION}
_SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
_RESPONSE_TOOL = {"type": "function", "name": "get_weather", "parameters": FUNCTION["parameters"], "strict": False}
_ANTHROPIC_TOOL = {"name": "get_weather", "description": "x", "input_schema": FUNCTION["parameters"]}
_USER = {"role": "user", "content": "{name}: who may copy this work?"}
_CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Bonn"}'}}
_IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
_MESSAGES: list[Any] = [
    [{"role": "system", "content": "{name}: be brief"}, _USER],
    [{"role": "user", "content": [{"type": "text", "text": "{name}"}, {"type": "text", "text": "and more"}]}],
    [_USER, {"role": "assistant", "content": None, "tool_calls": [_CALL]},
     {"role": "tool", "tool_call_id": "c1", "content": "rain"}],
    [_USER, {"role": "assistant", "content": "You may", "reasoning": "hm"}, _USER],
    [{"role": "developer", "content": "{name}"}, _USER],
    [{"role": "user", "content": ["{name}"]}],
    [{"role": "user", "content": [{"type": "text", "text": "{name}"}, _IMAGE]}],
    [{"role": "poet", "content": "{name}"}],
    [],
]  # fmt: skip
# Values that the schema allows and Tandem must treat as vLLM does, whether vLLM accepts them or not.
VALUES: dict[str, list[Any]] = {
    "model": ["tiny", "unknown", ""],
    "messages": _MESSAGES,
    "/v1/messages messages": [
        [{"role": "user", "content": [{"type": "text", "text": "{name}"}]}],
        [_USER, {"role": "assistant", "content": "You may"}, _USER],
        [_USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "get_weather",
                                                   "input": {"city": "Bonn"}}]},
         {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "rain"}]}],
        [_USER, {"role": "assistant", "content": "You"}],
        [],
    ],
    "/v1/messages/count_tokens messages": [[{"role": "user", "content": [{"type": "text", "text": "{name}"}]}], []],
    "/v1/chat/completions/batch messages": [[[_USER], [_USER, {"role": "assistant", "content": "You"}, _USER]], [[]],
                                            []],
    "prompt": ["{name}: you may", ["{name}", "{name} two"], [*range(300, 360)], [[*range(300, 350)], [310, 311]], [],
               "", [[]], [99999], [-1], ["{name}", 5]],  # [1024], the size of the vocabulary, ends plain vLLM's engine
    "/v1/responses prompt": [{"id": "p1"}],
    "/tokenize prompt": ["{name}: you may", "", "é 漢字 🙂"],
    "input": [
        "{name}: you may",
        [{"role": "user", "content": "{name}"}],
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "{name}"}]}],
        [{"role": "system", "content": "{name}"}, {"role": "user", "content": "hm"},
         {"role": "assistant", "content": "yes"}, {"role": "user", "content": "and?"}],
        [{"role": "user", "content": "{name}"},
         {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": "{\"city\": \"Bonn\"}"},
         {"type": "function_call_output", "call_id": "c1", "output": "rain"}],
        [],
        "",
    ],
    "frequency_penalty": [0.5, 3.0],
    "presence_penalty": [-0.5, -3.0],
    "repetition_penalty": [1.3, 0.0, -1.0],
    "length_penalty": [0.5, Fields({"length_penalty": 0.5, "use_beam_search": True, "n": 2})],
    "early_stopping": [True],
    "logit_bias": [{"400": 50, "401": -100}, {"99999": 1}, {"x": 1}, {"400": 101}],
    "logprobs": [1, 0, 5, 21, -1],
    "/v1/chat/completions logprobs": [True, False, Fields({"logprobs": True, "top_logprobs": 2})],
    "/v1/chat/completions/batch logprobs": [True, Fields({"logprobs": True, "top_logprobs": 2})],
    "top_logprobs": [Fields({"logprobs": True, "top_logprobs": 3}), Fields({"logprobs": True, "top_logprobs": 21}), 2,
                     -1],
    "/v1/responses top_logprobs": [Fields({"top_logprobs": 2, "include": ["message.output_text.logprobs"]}), 2, 21],
    "prompt_logprobs": [1, 0, -1, -2, 21],
    "logprob_token_ids": [Fields({"logprobs": 1, "logprob_token_ids": [300, 400]}), [300], [99999]],
    "/v1/chat/completions logprob_token_ids": [Fields({"logprobs": True, "logprob_token_ids": [300, 400]}), [300]],
    "/v1/chat/completions/batch logprob_token_ids": [Fields({"logprobs": True, "logprob_token_ids": [300, 400]})],
    "allowed_token_ids": [[300, 301, 302], [], [99999]],
    "bad_words": [["the", " you"], [""]],
    "max_tokens": [1, 9, 0, -1, 100_000],
    "max_completion_tokens": [1, 9, 0, -1, 100_000],
    "max_output_tokens": [1, 9, 0, -1, 100_000],
    "max_tool_calls": [1],
    "n": [2, 1.0, 0, -1],
    "best_of": [2, 1, 0],
    "seed": [7, 0, -1, 2**63],
    "stop": ["e", ["e", " t"], [], "", ["a"] * 5],
    "stop_sequences": [["e"], []],
    "stop_token_ids": [[400, 401, 402], [], [99999]],
    "stream": [True, "true", 1],
    "stream_options": [{"include_usage": True},
                       *(Fields({"stream": True, "stream_options": options}) for options in (
                           {"include_usage": True}, {"include_usage": False}, {}, {"x": 1},
                           {"include_usage": True, "continuous_usage_stats": True}))],
    "stream_interval": [1, Fields({"stream": True, "stream_interval": 3})],
    "suffix": ["x", ""],
    "temperature": [0, Fields({"temperature": 0.8, "seed": 7}), 2.5, -0.1, 1e-9],
    "top_p": [Fields({"temperature": 0.8, "seed": 7, "top_p": 0.5}), 1.0, 0.0, 1.5],
    "top_k": [Fields({"temperature": 0.8, "seed": 7, "top_k": 5}), 0, -1, -2],
    "min_p": [Fields({"temperature": 0.8, "seed": 7, "min_p": 0.2}), 0.0, 1.5],
    "min_tokens": [Fields({"min_tokens": 3, "stop": ["e"]}), 3, 100],
    "truncate_prompt_tokens": [8, -1, 100_000],
    "truncation": ["auto", "disabled"],
    "truncation_side": [Fields({"truncation_side": "left", "truncate_prompt_tokens": 8}),
                        Fields({"truncation_side": "right", "truncate_prompt_tokens": 8}), "middle"],
    "use_beam_search": [True, Fields({"use_beam_search": True, "n": 2}),
                        Fields({"use_beam_search": True, "n": 2, "logprobs": True})],
    "echo": [True, Fields({"echo": True, "max_tokens": 0}), Fields({"echo": True, "logprobs": 1}),
             Fields({"echo": True, "max_tokens": 0, "logprobs": 1}), Fields({"echo": True, "n": 2})],
    "/v1/chat/completions echo": [True, Fields({"echo": True, "add_generation_prompt": False,
                                                "continue_final_message": True, "messages": [_USER]})],
    "continue_final_message": [True, Fields({"continue_final_message": True, "add_generation_prompt": False})],
    "prompt_embeds": ["AAAA", []],
    "tools": [[TOOL], [], [{"type": "function"}], [{"type": "function", "function": {"name": "a b"}}],
              [{"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}}]],
    "/v1/responses tools": [[_RESPONSE_TOOL], [], [{"type": "web_search"}], [{"type": "nonsense"}]],
    "/v1/messages tools": [[_ANTHROPIC_TOOL], [], [{"name": "x"}]],
    "/v1/messages/count_tokens tools": [[_ANTHROPIC_TOOL], []],
    "tool_choice": [
        Fields({"tools": [TOOL], "tool_choice": "auto"}), Fields({"tools": [TOOL], "tool_choice": "none"}),
        Fields({"tools": [TOOL], "tool_choice": "required", "max_tokens": 60}),
        Fields({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
                "max_tokens": 60}),
        Fields({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}}),
        "auto", "required", "none", "sometimes"],
    "/v1/responses tool_choice": [
        Fields({"tools": [_RESPONSE_TOOL], "tool_choice": "auto"}),
        Fields({"tools": [_RESPONSE_TOOL], "tool_choice": "required", "max_output_tokens": 60}),
        Fields({"tools": [_RESPONSE_TOOL], "tool_choice": {"type": "function", "name": "get_weather"},
                "max_output_tokens": 60}),
        "none", "required"],
    "/v1/messages tool_choice": [
        Fields({"tools": [_ANTHROPIC_TOOL], "tool_choice": {"type": "auto"}}),
        Fields({"tools": [_ANTHROPIC_TOOL], "tool_choice": {"type": "any"}, "max_tokens": 60}),
        Fields({"tools": [_ANTHROPIC_TOOL], "tool_choice": {"type": "tool", "name": "get_weather"}, "max_tokens": 60}),
        {"type": "any"}],
    "/v1/messages/count_tokens tool_choice": [
        Fields({"tools": [_ANTHROPIC_TOOL], "tool_choice": {"type": "auto"}})],
    "/v1/chat/completions/batch tool_choice": ["none", "auto"],
    "parallel_tool_calls": [Fields({"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False,
                                    "max_tokens": 60})],
    "/v1/responses parallel_tool_calls": [False],
    "response_format": [
        {"type": "text"}, {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA}},
        {"type": "json_schema"}, {"type": "nonsense"},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}],
    "structured_outputs": [
        {"regex": "[ab]{3}"}, {"choice": ["yes", "no"]}, {"json": _SCHEMA}, {"json_object": True},
        {"grammar": "root ::= \"yes\" | \"no\""}, {}, {"regex": "("}, {"regex": "a", "choice": ["b"]}, {"choice": []},
        {"grammar": "nonsense"}, {"json": "nonsense"}],
    "text": [{"format": {"type": "text"}},
             {"format": {"type": "json_schema", "name": "x", "schema": _SCHEMA, "strict": True}},
             {"format": {"type": "json_object"}}],
    "reasoning": [{"effort": "low"}, {"effort": "nonsense"}],
    "reasoning_effort": ["low", "none", "nonsense"],
    "include": [["message.output_text.logprobs"], ["reasoning.encrypted_content"], ["nonsense"]],
    "instructions": ["{name}: be brief"],
    "system": ["{name}: be brief", [{"type": "text", "text": "{name}: be brief"}]],
    "metadata": [{"user_id": "u1"}],
    "output_config": [{"format": {"type": "json_schema", "schema": _SCHEMA}}, {"effort": "low"}],
    "service_tier": ["default", "auto", "nonsense"],
    "store": [False, True],
    "background": [Fields({"background": True, "store": True}), Fields({"background": True, "store": False})],
    "previous_response_id": ["resp_unknown", "unknown"],
    "previous_input_messages": [[], [{"role": "user", "content": "x"}]],
    "documents": [[{"title": "a", "text": "b"}]],
    "chat_template": ["{% for m in messages %}{{ m.content }}|{% endfor %}", "{{ x", "{{ raise_exception('no') }}"],
    "chat_template_kwargs": [{"add_generation_prompt": False}, {"x": 1}],
    "media_io_kwargs": [{}, {"image": {"x": 1}}],
    "mm_processor_kwargs": [{}, {"x": 1}],
    "cache_salt": ["salt", ""],
    "kv_transfer_params": [{}, {"x": 1}],
    "ec_transfer_params": [{}, {"x": 1}],
    "vllm_xargs": [{}, {"x": 1}, {"x": {"y": 1}}],
    "repetition_detection": [{"max_pattern_size": 2, "min_count": 2}, {"max_pattern_size": 2}],
    "thinking_token_budget": [5, -1],
    "priority": [0, 1, 2**63],
    "request_id": ["mine", ""],
    "session_id": ["s1"],
    "routed_experts_prompt_start": [0, 1],
    "user": ["u1"],
    "guided_decoding_backend": ["auto"],
    "tokens": [[300, 301, 302], [], [99999], [-1]],
    "token_ids": [[*range(300, 360)], [], [99999], [-1]],
    "assistant_tokens_mask": [[1] * 60, [1]],
    "token_offsets": [[[0, 1]] * 60, [[0, 1]]],
    "features": [{"mm_hashes": {}, "mm_placeholders": {}}],
    "content_parts": [[], [{"type": "text", "text": "x"}]],
    "sampling_params": [{"max_tokens": 4, "temperature": 0}, {"max_tokens": 4, "temperature": 0, "logprobs": 2},
                        {"max_tokens": 4, "temperature": 0, "n": 2}, {"max_tokens": 0}, {"max_tokens": 4, "x": 1},
                        {"max_tokens": 4, "temperature": 0, "prompt_logprobs": 1}, {"max_tokens": 4, "temperature": -1},
                        {"max_tokens": 4, "temperature": 0.8, "seed": 3},
                        {"max_tokens": 4, "temperature": 0, "stop": ["e"]},
                        {"max_tokens": 4, "temperature": 0, "structured_outputs": {"choice": ["yes", "no"]}}],
    "add_special_tokens": [True, False],
    "return_tokens_as_token_ids": [True, Fields({"return_tokens_as_token_ids": True, "logprobs": 1})],
    "/v1/chat/completions return_tokens_as_token_ids": [
        Fields({"return_tokens_as_token_ids": True, "logprobs": True, "top_logprobs": 1})],
    "return_token_strs": [True, False],
    "ignore_eos": [True],
}  # fmt: skip
# Wrong types, where the usual one is right.
_OBJECTS = ("chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs", "kv_transfer_params",
            "ec_transfer_params", "vllm_xargs", "metadata", "logit_bias", "sampling_params")  # fmt: skip
WRONG: dict[str, Any] = dict.fromkeys(_OBJECTS, "wrong")
# What stands beside a field that is null or missing: without it an answer would be as long as the context.
_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
SHORT: dict[str, dict[str, Any]] = {field: {"stop": "e"} for field in _LENGTHS}
