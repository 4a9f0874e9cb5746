"""Anthropic's SDK: messages, streams, tools, counts and errors."""

from typing import Any

import anthropic

from tests.lab.clients.checks import Checks, Server, raises

checks, server = Checks(), Server.load()
client = anthropic.Anthropic(base_url=server.url, api_key=server.key, max_retries=0, timeout=60)
QUESTION: list[Any] = [{"role": "user", "content": "Tell me of the licence. " * 10}]
GREEDY: dict[str, Any] = {"extra_body": {"temperature": 0}}
# A random model ends its JSON sooner if every allowed token is nearly as likely as another: greedy, it repeats blanks.
FREE: dict[str, Any] = {"max_tokens": 500, "extra_body": {"temperature": 2, "seed": 1}}
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather of a city",
    "input_schema": {"type": "object", "properties": {"raining": {"type": "boolean"}}, "required": ["raining"]},
}


def create(**more: Any) -> Any:
    """A message, with short defaults."""
    return client.messages.create(**{"model": server.model, "max_tokens": 8, "messages": QUESTION, **more})


def input_of(message: Any) -> int:
    """Tokens of the input, which Anthropic counts apart from those that a cache had."""
    usage = message.usage
    return int(usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0))


@checks.add
def message() -> None:
    """Text, usage and the reason of the end."""
    answer = create()
    assert answer.type == "message" and answer.role == "assistant" and answer.model == server.model
    assert [block.type for block in answer.content] == ["text"] and answer.content[0].text
    assert answer.stop_reason == "max_tokens" and answer.usage.output_tokens == 8
    assert input_of(answer) > 50


@checks.add
def stream() -> None:
    """The events of a stream are those of Anthropic's API, and its text is the one of the whole answer."""
    text = create(**GREEDY).content[0].text
    with client.messages.stream(model=server.model, max_tokens=8, messages=QUESTION, **GREEDY) as events:
        kinds = [event.type for event in events]
        last = events.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop", kinds
    assert "content_block_delta" in kinds and "message_delta" in kinds, kinds
    assert last.content[0].text == text and last.usage.output_tokens == 8 and last.stop_reason == "max_tokens"


@checks.add
async def asynchronous_stream() -> None:
    """The asynchronous client reads a raw stream."""
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key=server.key, max_retries=0) as other:
        events = await other.messages.create(model=server.model, max_tokens=4, messages=QUESTION, stream=True)
        kinds = [event.type async for event in events]
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop", kinds


@checks.add
def system_prompt() -> None:
    """A system prompt, as text and as blocks, counts among the input."""
    plain = input_of(create())
    long = "Answer in short sentences. " * 5
    as_text = input_of(create(system=long))
    as_blocks = input_of(create(system=[{"type": "text", "text": long}]))
    assert as_text == as_blocks > plain + 10


@checks.add
def content_blocks_and_turns() -> None:
    """Blocks of text, and an earlier answer."""
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": "there"}]},
        {"role": "assistant", "content": "Good day"},
        {"role": "user", "content": "And now?"},
    ]
    assert create(messages=turns).content[0].text


@checks.add
def sampling_and_stop_sequences() -> None:
    """A stop sequence ends the answer and is named."""
    words = create(max_tokens=16, **GREEDY).content[0].text
    stop = words[len(words) // 2 :][:3]
    answer = create(max_tokens=16, stop_sequences=[stop], extra_body={"temperature": 0, "top_k": 5, "top_p": 0.9})
    assert answer.stop_reason == "stop_sequence" and answer.stop_sequence == stop, answer


@checks.add
def forced_tool() -> None:
    """A tool that the request names is called with arguments that fit its schema."""
    answer = create(tools=[WEATHER], tool_choice={"type": "tool", "name": "get_weather"}, **FREE)
    calls = [block for block in answer.content if block.type == "tool_use"]
    assert [call.name for call in calls] == ["get_weather"] and isinstance(calls[0].input["raining"], bool), answer
    # vLLM ends a call that the request forces as a whole answer.
    assert answer.stop_reason in ("tool_use", "end_turn") and calls[0].id


@checks.add
def streamed_tool() -> None:
    """A tool call arrives in parts and is put together."""
    choice = {"type": "tool", "name": "get_weather"}
    with client.messages.stream(
        model=server.model, messages=QUESTION, tools=[WEATHER], tool_choice=choice, **FREE
    ) as events:
        last = events.get_final_message()
    calls = [block for block in last.content if block.type == "tool_use"]
    assert [call.name for call in calls] == ["get_weather"] and isinstance(calls[0].input["raining"], bool), last


@checks.add
def tool_result() -> None:
    """The result of a tool goes back to the model."""
    turns = [
        *QUESTION,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "get_weather", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "rain"}]},
    ]
    assert create(messages=turns, tools=[WEATHER]).content


@checks.add
def count_tokens() -> None:
    """The count is the one that a message reports, with and without a system prompt and tools."""
    for more in ({}, {"system": "Be short."}, {"tools": [WEATHER]}):
        count = client.messages.count_tokens(model=server.model, messages=QUESTION, **more).input_tokens
        assert count == input_of(create(**more)), more


@checks.add
def unknown_model() -> None:
    """A model that is not served is a NotFoundError."""
    raised = raises(anthropic.NotFoundError, lambda: create(model="absent"))
    assert raised.body["type"] == "error" and "absent" in raised.body["error"]["message"], raised.body


@checks.add
def bad_request() -> None:
    """A limit of no tokens, a wrong role and a prompt that is too long are BadRequestErrors."""
    raised = raises(anthropic.BadRequestError, lambda: create(max_tokens=-1))
    assert raised.body["error"]["message"], raised.body
    raises(anthropic.BadRequestError, lambda: create(messages=[{"role": "nobody", "content": "Hello"}]))
    raises(anthropic.BadRequestError, lambda: create(messages=[{"role": "user", "content": "word " * 50_000}]))


if __name__ == "__main__":
    checks.run()
