"""A stream that is cut anywhere goes on from another engine without a difference, or ends with an error."""

import json
from typing import Any

import pytest

from deployments.wire.messages import DONE, Frame, SentFrames
from tests.engines.endpoint import prompt_ids

pytestmark = [pytest.mark.ray, pytest.mark.vllm]

COMPLETION: dict[str, Any] = {
    "model": "tiny",
    "prompt": prompt_ids(40, seed=5),
    "max_tokens": 24,
    "temperature": 0.0,
    "stream": True,
}
CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "You may obtain a copy of the License. " * 8}],
    "max_tokens": 24,
    "temperature": 0.0,
    "stream": True,
    "stream_options": {"include_usage": True},
}
WITH_USAGE = {"stream_options": {"include_usage": True}}
SCHEMA = {"type": "object", "properties": {"unit": {"enum": ["celsius", "kelvin"]}}, "required": ["unit"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
THINK, THOUGHT = 4, 5  # the tiny model's tokens around its reasoning

RESUMED: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy completion": ("completions", COMPLETION),
    "greedy chat with usage": ("chat", CHAT),
    "a prompt for remote prefill": ("completions", {**COMPLETION, "prompt": prompt_ids(300, seed=6)}),
    "logit bias": ("completions", {**COMPLETION, "logit_bias": {"500": 5.0}}),
    "at least a number of tokens": ("completions", {**COMPLETION, "min_tokens": 20, "logit_bias": {"1": 50.0}}),
    "greedy with penalties": ("completions", {**COMPLETION, "presence_penalty": 1.5, "repetition_penalty": 1.3}),
    "seeded": ("completions", {**COMPLETION, "temperature": 1.0, "seed": 7}),
    "seeded with penalties": ("chat", {**CHAT, "temperature": 1.0, "seed": 7, "frequency_penalty": 1.0}),
    "grammar": ("completions", {**COMPLETION, "structured_outputs": {"regex": "[a-f]{20}"}}),
    "JSON schema": (
        "chat",
        {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
    ),
    "bad words": ("completions", {**COMPLETION, "bad_words": ["the"]}),
    "ends where it repeats itself": (
        "completions",
        {
            **COMPLETION,
            "logit_bias": {"500": 100.0},
            "repetition_detection": {"max_pattern_size": 1, "min_count": 12},
        },
    ),
    "a logits processor's arguments": ("completions", {**COMPLETION, "vllm_xargs": {"mine": 1}}),
}
SAMPLED = {**COMPLETION, "temperature": 1.0}
RESUMED |= {
    f"{feature}, seeded": (endpoint, {**body, "temperature": 1.0, "seed": 7})
    for feature, (endpoint, body) in RESUMED.items()
    if feature
    in ("grammar", "JSON schema", "bad words", "ends where it repeats itself", "a logits processor's arguments")
}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "penalties without a seed": ("completions", {**SAMPLED, "presence_penalty": 1.5}, "seed"),
    "a grammar without a seed": ("completions", {**SAMPLED, "structured_outputs": {"regex": "[a-f]{20}"}}, "seed"),
    "a logits processor's arguments without a seed": ("completions", {**SAMPLED, "vllm_xargs": {"mine": 1}}, "seed"),
    "bad words without a seed": ("completions", {**SAMPLED, "bad_words": ["the"]}, "seed"),
    "an end where it repeats itself without a seed": (
        "completions",
        {**SAMPLED, "repetition_detection": {"max_pattern_size": 1, "min_count": 12}},
        "seed",
    ),
    "a JSON schema without a seed": ("chat", {**RESUMED["JSON schema"][1], "temperature": 1.0}, "seed"),
    "several answers": ("completions", {**SAMPLED, "n": 2}, "n = 2"),
    "several answers of a chat": ("chat", {**CHAT, "temperature": 1.0, "n": 2}, "n = 2"),
    "logprobs of a chat": ("chat", {**CHAT, "logprobs": True}, "logprobs"),
    "logprobs": ("completions", {**COMPLETION, "logprobs": 1}, "logprobs"),
    "several prompts": ("completions", {**COMPLETION, "prompt": [[300, 301], [302, 303]]}, "several prompts"),
}


def whole_of(ask: Any, endpoint: str, body: dict[str, Any]) -> list[Frame]:
    frames: list[Frame] = ask(endpoint, body)
    assert [frame.error for frame in frames] == [None] * len(frames)
    assert frames[-1].text == DONE
    return frames


def cut(frames: list[Frame], at: int) -> Any:
    """What the ingress knows after this number of frames."""
    sent = SentFrames()
    for frame in frames[:at]:
        sent.add(frame.text, frame.outputs, frame.usage)
    return sent.sent()


def read(frames: list[Frame]) -> tuple[list[int], dict[str, Any]]:
    """What a client reads from the frames: output ids, and each field of the answer, joined from its pieces."""
    fields: dict[str, Any] = {}
    for frame in frames:
        assert frame.error is None, frame
        if frame.text == DONE:
            continue
        event = json.loads(frame.text.removeprefix("data: "))
        fields |= {"id": event["id"], **({"usage": event["usage"]} if event.get("usage") else {})}
        for choice in event["choices"]:
            delta = choice.pop("delta", {})
            for name, value in {**choice, **delta}.items():
                if isinstance(value, str) and name in ("text", "content", "reasoning"):
                    fields[name] = fields.get(name, "") + value
                elif name == "tool_calls" and value:
                    fields[name] = with_call(fields.get(name, {}), value[0])
                elif value is not None:
                    fields[name] = value
    return [token for frame in frames for output in frame.outputs for token in output], fields


def with_call(call: dict[str, Any], piece: dict[str, Any]) -> dict[str, Any]:
    """A tool call with one more piece of it; ``id`` and ``name`` come in the first piece alone."""
    function = piece.get("function") or {}
    added = {"id": piece.get("id"), "name": function.get("name"), "arguments": function.get("arguments")}
    return {name: call.get(name, "") + (value or "") for name, value in added.items()}


def assert_goes_on(ask: Any, endpoint: str, body: dict[str, Any], frames: list[Frame]) -> None:
    for at in range(1, len(frames)):
        rest = ask(endpoint, body, cut(frames, at))
        assert read([*frames[:at], *rest]) == read(frames), at
        assert rest[-1].text == DONE, at


@pytest.mark.parametrize("feature", RESUMED)
def test_a_stream_goes_on_from_every_cut(ask: Any, feature: str) -> None:
    endpoint, body = RESUMED[feature]
    assert_goes_on(ask, endpoint, body, whole_of(ask, endpoint, body))


@pytest.mark.parametrize("feature", ["greedy chat with usage", "a prompt for remote prefill", "seeded", "grammar"])
def test_a_stream_goes_on_if_no_cache_holds_any_of_it(ask: Any, feature: str) -> None:
    endpoint, body = RESUMED[feature]
    frames = whole_of(ask, endpoint, body)
    for at in (1, 9, len(frames) - 2):
        rest = ask(endpoint, {**body, "cache_salt": f"{feature}-{at}"}, cut(frames, at))
        assert read([*frames[:at], *rest]) == read(frames), at


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_a_stream_goes_on_with_the_cached_tokens_and_times_that_its_client_would_have_got(
    ask: Any, endpoint: str
) -> None:
    body = {**(CHAT if endpoint == "chat" else {**COMPLETION, "prompt": prompt_ids(300, seed=61)}), **WITH_USAGE}
    frames = whole_of(ask, endpoint, {**body, "cache_salt": f"usage of {endpoint}"})
    usage, metrics = last_of(frames)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    # After the first frame, after the last token, and after the event with the usage.
    for at in (1, len(frames) - 2, len(frames) - 1):
        rest = ask(endpoint, {**body, "cache_salt": f"usage of {endpoint}"}, cut(frames, at))
        assert rest[-1].text == DONE, (at, rest[-1])
        if at == 1:
            again, late = last_of(rest)
            assert again == usage
            for name in ("queue_time_ms", "time_to_first_token_ms"):
                assert late[name] == metrics[name]
            assert late["generation_time_ms"] > metrics["generation_time_ms"]  # with the time of the cut
        else:
            assert [frame.text for frame in rest if frame.text] == [frame.text for frame in frames[at:]]


def last_of(frames: list[Frame]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The usage and the times in the last event before the end event."""
    event = json.loads(frames[-2].text.removeprefix("data: "))
    return event["usage"], event["metrics"]


def test_a_stream_cut_inside_a_character_repeats_and_loses_nothing(ask: Any) -> None:
    frames = whole_of(ask, "completions", {**COMPLETION, "max_tokens": 64})
    held = [at for at, frame in enumerate(frames) if frame.outputs and '"text":""' in frame.text]
    assert held  # tokens that end inside a character give no text yet
    assert_goes_on(ask, "completions", {**COMPLETION, "max_tokens": 64}, frames)


@pytest.mark.parametrize("is_included", [False, True])
def test_a_stream_cut_inside_a_stop_string_still_stops_there(ask: Any, is_included: bool) -> None:
    _, fields = read(whole_of(ask, "completions", COMPLETION))
    stop = fields["text"][30:38]  # over more than one token
    body = {**COMPLETION, "stop": [stop], "include_stop_str_in_output": is_included}
    frames = whole_of(ask, "completions", body)
    _, stopped = read(frames)
    assert stopped["finish_reason"] == "stop" and stopped["stop_reason"] == stop
    assert stopped["text"] == fields["text"][: 38 if is_included else 30]
    assert_goes_on(ask, "completions", body, frames)


def test_a_stream_cut_after_its_stop_token_has_ended(ask: Any) -> None:
    ids, _ = read(whole_of(ask, "completions", COMPLETION))
    body = {**COMPLETION, "stop_token_ids": [ids[10]]}
    frames = whole_of(ask, "completions", body)
    assert read(frames)[1]["stop_reason"] == ids[10]
    assert_goes_on(ask, "completions", body, frames)


@pytest.mark.parametrize("is_hidden", [False, True])
def test_a_stream_cut_inside_reasoning_keeps_the_state_of_the_parser(ask: Any, is_hidden: bool) -> None:
    body = {**CHAT, "chat_template_kwargs": {"thinking": True}, "include_reasoning": not is_hidden, "max_tokens": 32}
    for bias in range(8, 20):  # so that reasoning ends, but not at once
        body["logit_bias"] = {str(THOUGHT): bias / 2}
        frames = whole_of(ask, "chat", body)
        ids, fields = read(frames)
        if THOUGHT in ids[4:-4]:
            break
    assert THOUGHT in ids[4:-4]
    assert fields["content"] and bool(fields.get("reasoning")) is not is_hidden
    assert_goes_on(ask, "chat", body, frames)


def test_sampling_without_a_seed_goes_on_after_the_sampled_tokens(ask: Any) -> None:
    body = {**COMPLETION, "temperature": 1.0}
    frames = whole_of(ask, "completions", body)
    ids, _ = read([*frames[:9], *ask("completions", body, cut(frames, 9))])
    assert len(ids) == 24 and ids[:9] == read(frames)[0][:9]


@pytest.mark.parametrize("feature", REFUSED)
def test_a_stream_that_would_not_go_on_exactly_ends_with_an_error(ask: Any, feature: str) -> None:
    endpoint, body, why = REFUSED[feature]
    frames = whole_of(ask, endpoint, body)
    (last,) = ask(endpoint, body, cut(frames, 3))
    assert (last.error, last.status) == ("not_resumable", 503)
    assert why in json.loads(last.text)["error"]["message"]


@pytest.mark.parametrize("choice", [{"type": "function", "function": {"name": "get_weather"}}, "required"])
def test_a_tool_call_goes_on_with_its_id(ask: Any, choice: Any) -> None:
    body = {**CHAT, "tools": [TOOL], "tool_choice": choice, "max_tokens": 60, "temperature": 1.0, "seed": 1}
    frames = whole_of(ask, "chat", body)
    named = next(at for at, frame in enumerate(frames) if "tool_calls" in frame.text)
    call = read(frames)[1]["tool_calls"]
    assert call["name"] == "get_weather" and call["id"].startswith("chatcmpl-tool-") and call["arguments"]
    for at in (1, named, named + 1, named + 2, len(frames) // 2, len(frames) - 2):
        rest = ask("chat", body, cut(frames, at))
        assert read([*frames[:at], *rest]) == read(frames), at
        assert rest[-1].text == DONE, at


def test_a_stream_whose_sent_frames_do_not_come_again_ends_with_an_error(ask: Any) -> None:
    frames = whole_of(ask, "completions", COMPLETION)
    other = [frames[0]._replace(text=frames[0].text.replace('"index":0', '"index":1')), *frames[1:]]
    (last,) = ask("completions", COMPLETION, cut(other, 5))
    assert last.error == "not_resumable"
