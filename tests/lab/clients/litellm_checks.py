"""LiteLLM through its providers ``openai``, ``hosted_vllm`` and ``anthropic``."""

import json
from typing import Any

import litellm

from tests.lab.clients.checks import Checks, Server, raises

checks, server = Checks(), Server.load()
QUESTION = [{"role": "user", "content": "What does the licence say of contributions? " * 5}]
SHORT: dict[str, Any] = {"max_tokens": 8, "temperature": 0}
# A random model ends its JSON sooner if every allowed token is nearly as likely as another: greedy, it repeats blanks.
FREE: dict[str, Any] = {"max_tokens": 500, "temperature": 2, "seed": 1}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"raining": {"type": "boolean"}}, "required": ["raining"]},
    },
}


def chat(provider: str, **more: Any) -> Any:
    """A chat answer through a provider; Anthropic's takes the URL without ``/v1``."""
    url = server.url if provider == "anthropic" else server.base_url
    values = {"messages": QUESTION, "timeout": 60, "num_retries": 0, **SHORT, **more}
    return litellm.completion(model=f"{provider}/{server.model}", api_base=url, api_key=server.key, **values)


def text_of(chunks: Any) -> str:
    """The text of a stream."""
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def chat_and_stream(provider: str) -> None:
    """An answer, and a stream with the same text."""
    answer = chat(provider)
    assert answer.choices[0].message.content and answer.usage.completion_tokens == 8
    assert answer.choices[0].finish_reason == "length"
    assert text_of(chat(provider, stream=True)) == answer.choices[0].message.content


def forced_tool(provider: str) -> None:
    """A tool that the request names is called with arguments that fit its schema."""
    choice = {"type": "function", "function": {"name": "get_weather"}}
    message = chat(provider, tools=[TOOL], tool_choice=choice, **FREE).choices[0].message
    assert message.tool_calls[0].function.name == "get_weather"
    assert isinstance(json.loads(message.tool_calls[0].function.arguments)["raining"], bool)


@checks.add
def openai() -> None:
    """``openai/``, as ``chat_and_stream``."""
    chat_and_stream("openai")


@checks.add
def openai_tool() -> None:
    """``openai/``, as ``forced_tool``."""
    forced_tool("openai")


@checks.add
def hosted_vllm() -> None:
    """``hosted_vllm/``, as ``chat_and_stream``."""
    chat_and_stream("hosted_vllm")


@checks.add
def hosted_vllm_tool() -> None:
    """``hosted_vllm/``, as ``forced_tool``."""
    forced_tool("hosted_vllm")


@checks.add
def hosted_vllm_parameters() -> None:
    """vLLM's own parameters pass."""
    answer = chat("hosted_vllm", extra_body={"top_k": 3, "structured_outputs": {"choice": ["rain", "sun"]}})
    assert answer.choices[0].message.content in ("rain", "sun")


@checks.add
def anthropic() -> None:
    """``anthropic/``, as ``chat_and_stream``."""
    chat_and_stream("anthropic")


@checks.add
def anthropic_tool() -> None:
    """``anthropic/`` with a tool that the request names."""
    choice = {"type": "function", "function": {"name": "get_weather"}}
    settings = {name: value for name, value in FREE.items() if name != "seed"}
    calls = chat("anthropic", tools=[TOOL], tool_choice=choice, **settings).choices[0].message.tool_calls
    assert [call.function.name for call in calls] == ["get_weather"]


@checks.add
def text_completion() -> None:
    """Completions, whole and streamed."""

    def complete(**more: Any) -> Any:
        return litellm.text_completion(
            model=f"text-completion-openai/{server.model}",
            prompt="The licence grants the right to copy the work. " * 4,
            **{"api_base": server.base_url, "api_key": server.key, **SHORT, **more},
        )

    answer = complete()
    assert answer.choices[0].text and answer.usage.completion_tokens == 8
    assert "".join(chunk.choices[0].text or "" for chunk in complete(stream=True)) == answer.choices[0].text


@checks.add
async def asynchronous_chat() -> None:
    """The asynchronous call, streamed."""
    stream = await litellm.acompletion(
        model=f"openai/{server.model}",
        **{"messages": QUESTION, "api_base": server.base_url, "api_key": server.key, "stream": True, **SHORT},
    )
    assert text_of([chunk async for chunk in stream])


@checks.add
def responses() -> None:
    """The Responses API, whole and streamed."""

    def respond(**more: Any) -> Any:
        return litellm.responses(
            model=f"openai/{server.model}",
            input=QUESTION[0]["content"],
            **{"api_base": server.base_url, "api_key": server.key, "max_output_tokens": 8, "temperature": 0, **more},
        )

    answer = respond()
    text = answer.output[0].content[0].text
    assert text and answer.usage.output_tokens == 8
    deltas = [event.delta for event in respond(stream=True) if event.type == "response.output_text.delta"]
    assert "".join(deltas) == text


@checks.add
def errors() -> None:
    """A model that is not served, and a value out of range, are LiteLLM's own errors for them."""
    for provider in ("openai", "hosted_vllm"):
        values = {"messages": QUESTION, "api_base": server.base_url, "api_key": server.key, "num_retries": 0}
        raises(litellm.NotFoundError, lambda: litellm.completion(model=f"{provider}/absent", **values))  # noqa: B023
        raises(litellm.BadRequestError, lambda: chat(provider, top_p=7))  # noqa: B023


if __name__ == "__main__":
    checks.run()
