"""OpenAI's SDK: chat, completions, embeddings, models and errors. The Responses API is in ``openai_responses``."""

import asyncio
import json
from functools import partial
from typing import Any

import openai
from pydantic import BaseModel

from tests.lab.clients import openai_responses
from tests.lab.clients.checks import Checks, Server, raises

checks, server = Checks(), Server.load()
client = openai.OpenAI(base_url=server.base_url, api_key=server.key, max_retries=0, timeout=60)
QUESTION: list[Any] = [{"role": "user", "content": "What does the licence say of contributions? " * 5}]
PROMPT = "The licence grants the right to copy and to change the work. " * 4
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"raining": {"type": "boolean"}}, "required": ["raining"]},
    },
}
# A random model ends its JSON sooner if every allowed token is nearly as likely as another: greedy, it repeats blanks.
FREE: dict[str, Any] = {"temperature": 2, "seed": 1, "max_tokens": 500}
FORCED = {"type": "function", "function": {"name": "get_weather"}}


class Weather(BaseModel):
    """A structured answer that a random model can finish."""

    raining: bool


def chat(**more: Any) -> Any:
    """A chat answer, with short defaults."""
    return client.chat.completions.create(
        **{"model": server.model, "messages": QUESTION, "max_tokens": 8, "temperature": 0, **more}
    )


def complete(**more: Any) -> Any:
    """A completion, with short defaults."""
    return client.completions.create(
        **{"model": server.model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, **more}
    )


def middle_of(text: str) -> str:
    """Three characters of a text, to stop at."""
    return text[len(text) // 2 :][:3]


def text_of(chunks: Any) -> str:
    """The text of a stream of chat chunks."""
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


@checks.add
def models() -> None:
    """The model is listed, with the fields that other clients read."""
    card = next(card for card in client.models.list() if card.id == server.model)
    assert card.object == "model" and card.created > 0 and card.owned_by
    assert card.root and card.permission and card.max_model_len > 0


@checks.add
def one_model() -> None:
    """The card of the model can be read alone."""
    card = client.models.retrieve(server.model)
    assert card.id == server.model and card.object == "model"
    raises(openai.NotFoundError, lambda: client.models.retrieve("absent"))


@checks.add
def chat_completion() -> None:
    """Text, usage and the reason of the end."""
    answer = chat()
    assert answer.object == "chat.completion" and answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content and answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8


@checks.add
def chat_stream() -> None:
    """A stream has the text of the whole answer, and its usage at the end."""
    chunks = list(chat(stream=True, stream_options={"include_usage": True}))
    assert text_of(chunks) == chat().choices[0].message.content
    assert chunks[-1].usage.completion_tokens == 8 and not chunks[-1].choices


@checks.add
def chat_stream_helper() -> None:
    """The SDK's helper puts a stream together."""
    stop = middle_of(chat(max_tokens=16).choices[0].message.content)  # the helper raises if an answer is cut off
    with client.chat.completions.stream(
        model=server.model, messages=QUESTION, max_tokens=16, temperature=0, stop=stop
    ) as events:
        text = "".join(event.delta for event in events if event.type == "content.delta")
        whole = events.get_final_completion()
    assert text == whole.choices[0].message.content == chat(max_tokens=16, stop=stop).choices[0].message.content


@checks.add
async def asynchronous_chats_at_once() -> None:
    """Eight asynchronous streams at the same time have the same text."""
    async with openai.AsyncOpenAI(base_url=server.base_url, api_key=server.key, max_retries=0) as other:

        async def one() -> str:
            stream: Any = await other.chat.completions.create(
                model=server.model, messages=QUESTION, max_tokens=8, temperature=0, stream=True
            )
            return text_of([chunk async for chunk in stream])

        texts = await asyncio.gather(*(one() for _ in range(8)))
    assert len(set(texts)) == 1 and texts[0]


@checks.add
def chat_choices() -> None:
    """``n`` choices, numbered."""
    answer = chat(n=3, temperature=1, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1
    seen = {choice.index for chunk in chat(n=2, stream=True, temperature=1) for choice in chunk.choices}
    assert seen == {0, 1}


@checks.add
def chat_logprobs() -> None:
    """The log probability of each token, with the two most likely ones."""
    content = chat(logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert len(content) == 8 and all(len(token.top_logprobs) == 2 and token.logprob <= 0 for token in content)
    streamed = [chunk.choices[0].logprobs for chunk in chat(logprobs=True, top_logprobs=2, stream=True)]
    found = [token.logprob for part in streamed if part for token in part.content]
    expected = [token.logprob for token in content]
    # vLLM streams none for a token that is a part of a character.
    assert len(found) >= 5 and all(min(abs(a - b) for b in expected) < 1e-3 for a in found), (found, expected)


@checks.add
def chat_sampling() -> None:
    """The sampling parameters are taken; a seed gives the same text again."""
    sampling = {"temperature": 0.8, "top_p": 0.9, "seed": 7, "presence_penalty": 0.5, "frequency_penalty": 0.5}
    assert chat(**sampling).choices[0].message.content == chat(**sampling).choices[0].message.content
    text = chat(max_completion_tokens=5, max_tokens=openai.omit).usage.completion_tokens
    assert text == 5
    assert chat(extra_body={"top_k": 3, "min_tokens": 2, "ignore_eos": True}).choices
    biased = chat(logit_bias={"100": 100}, max_tokens=3, logprobs=True).choices[0].logprobs.content
    assert len({token.token for token in biased}) == 1


@checks.add
def chat_stop() -> None:
    """A stop text ends the answer and is not part of it."""
    stop = middle_of(chat(max_tokens=16).choices[0].message.content)
    answer = chat(max_tokens=16, stop=[stop]).choices[0]
    assert answer.finish_reason == "stop" and stop not in answer.message.content


@checks.add
def forced_tool() -> None:
    """A tool that the request names is called with arguments that fit its schema."""
    answer = chat(tools=[TOOL], tool_choice=FORCED, **FREE).choices[0]
    call = answer.message.tool_calls[0]
    assert call.function.name == "get_weather" and call.id
    assert isinstance(json.loads(call.function.arguments)["raining"], bool)


@checks.add
def required_tool_and_stream() -> None:
    """``required`` calls some tool; a streamed call is put together by the SDK's helper."""
    answer = chat(tools=[TOOL], tool_choice="required", **FREE).choices[0]
    assert answer.message.tool_calls[0].function.name == "get_weather"
    with client.chat.completions.stream(
        model=server.model, messages=QUESTION, tools=[TOOL], tool_choice=FORCED, **FREE
    ) as events:
        call = events.get_final_completion().choices[0].message.tool_calls[0]
    assert call.function.name == "get_weather" and "raining" in json.loads(call.function.arguments)


@checks.add
def automatic_tools_and_results() -> None:
    """Tools that the model may call, and the result of an earlier call."""
    assert chat(tools=[TOOL], tool_choice="auto").choices
    assert not chat(tools=[TOOL], tool_choice="none").choices[0].message.tool_calls
    function = {"name": "get_weather", "arguments": '{"raining": true}'}
    turns = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "t1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "t1", "content": "rain"},
    ]
    assert chat(messages=turns, tools=[TOOL]).choices[0].message.content


@checks.add
def structured_output() -> None:
    """``parse`` gives an object of the class; a JSON schema and ``json_object`` give JSON."""
    parsed = client.chat.completions.parse(model=server.model, messages=QUESTION, response_format=Weather, **FREE)
    assert isinstance(parsed.choices[0].message.parsed, Weather)
    schema = {"name": "weather", "strict": True, "schema": Weather.model_json_schema()}
    answer = chat(response_format={"type": "json_schema", "json_schema": schema}, **FREE)
    assert isinstance(json.loads(answer.choices[0].message.content)["raining"], bool)
    words = chat(extra_body={"structured_outputs": {"choice": ["rain", "sun"]}}).choices[0].message.content
    assert words in ("rain", "sun")
    assert chat(response_format={"type": "json_object"}).choices[0].message.content.lstrip().startswith("{")


@checks.add
def chat_with_parts_and_names() -> None:
    """Messages of parts, a system message, a developer message and names."""
    turns = [
        {"role": "system", "content": "Be short."},
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "name": "ann", "content": [{"type": "text", "text": "Hello"}]},
    ]
    assert chat(messages=turns, user="ann", metadata={"a": "b"}, store=False).choices[0].message.content


@checks.add
def headers_and_raw_answers() -> None:
    """A raw answer shows its headers; more headers and query parameters do no harm."""
    raw = client.chat.completions.with_raw_response.create(
        model=server.model, messages=QUESTION, max_tokens=2, extra_headers={"X-Request-Id": "abc"}, extra_query={"a": 1}
    )
    assert raw.headers["content-type"].startswith("application/json") and raw.parse().choices


@checks.add
def completion() -> None:
    """Text, usage and the reason of the end; a stream has the same text."""
    answer = complete()
    assert answer.object == "text_completion" and answer.choices[0].finish_reason == "length"
    chunks = list(complete(stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == answer.choices[0].text
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens == 8


@checks.add
def completion_of_several_prompts() -> None:
    """Several texts, token ids, and lists of them; two choices for each."""
    assert len(complete(prompt=[PROMPT, "Hello"], n=2, temperature=1).choices) == 4
    ids = list(range(100, 160))
    alone = complete(prompt=ids).choices[0].text
    both = complete(prompt=[ids, list(range(200, 230))]).choices
    assert [choice.index for choice in both] == [0, 1] and both[0].text == alone


@checks.add
def completion_logprobs() -> None:
    """Log probabilities of the answer's tokens, with the two most likely ones."""
    logprobs = complete(logprobs=2).choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 8
    assert logprobs.text_offset[0] == 0 and all(value <= 0 for value in logprobs.token_logprobs)


@checks.add
def echo_without_new_tokens() -> None:
    """A prompt is scored: ``echo`` with ``max_tokens`` 0 and ``logprobs``."""
    answer = complete(prompt=[list(range(100, 140))], echo=True, max_tokens=0, logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert len(logprobs.token_logprobs) == 40 and logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    longer = complete(prompt=[list(range(100, 140))], echo=True, max_tokens=1, logprobs=1).choices[0].logprobs
    pairs = zip(logprobs.token_logprobs[1:], longer.token_logprobs[1:40], strict=True)
    assert all(abs(a - b) < 1e-3 for a, b in pairs)
    assert complete(echo=True, max_tokens=2).choices[0].text.startswith(PROMPT)


@checks.add
def embeddings_of_a_model_that_only_generates() -> None:
    """The error is one of the SDK's 4xx classes and says that the model does not support embeddings."""
    try:
        client.embeddings.create(model=server.model, input="Hello")
    except (openai.BadRequestError, openai.NotFoundError) as error:
        assert error.body, error
        return
    raise AssertionError("a model that only generates gave an embedding")


@checks.add
def unknown_model() -> None:
    """A model that is not served is a NotFoundError with OpenAI's fields."""
    for call in (lambda: chat(model="absent"), lambda: complete(model="absent")):
        error = raises(openai.NotFoundError, call)
        assert "absent" in error.message and error.body["param"] == "model", error.body


@checks.add
def bad_requests() -> None:
    """Values out of range, wrong types and prompts that are too long are BadRequestErrors that name the cause."""
    wrong: list[dict[str, Any]] = [
        {"temperature": -1},
        {"top_p": 2},
        {"n": 0},
        {"max_tokens": "many"},
        {"messages": "Hello"},
        {"messages": [{"role": "user", "content": "word " * 50_000}]},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "absent"}}},
        {"response_format": {"type": "json_schema"}},
    ]
    for values in wrong:
        error = raises(openai.BadRequestError, partial(chat, **values))
        assert error.body["message"] and error.body["type"], (values, error.body)
    raises(openai.BadRequestError, lambda: complete(prompt=""))
    raises(openai.NotFoundError, lambda: client.post("/absent", cast_to=object, body={}))


@checks.add
def client_leaves() -> None:
    """A client that closes a stream in the middle leaves a server that answers."""
    stream = chat(stream=True, max_tokens=500, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    assert chat().choices[0].message.content


openai_responses.add_to(checks, client, server)

if __name__ == "__main__":
    checks.run()
