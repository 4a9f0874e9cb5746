"""OpenAI's Agents SDK: its default model, which is the Responses API, and the one of chat completions."""

from typing import Any

import openai
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_default_openai_client
from pydantic import BaseModel

from tests.lab.clients.checks import Checks, Server

checks, server = Checks(), Server.load()
QUESTION = "What does the licence say of contributions? " * 5
# The SDK takes no answer that is cut off, and a random model ends none, so each ends at one of these texts. No call of
# the tool has them.
_ENDS = {"stop": [".", "b", "d", "v"], "include_stop_str_in_output": True, "seed": 1}
# A random model ends its JSON sooner if every allowed token is nearly as likely as another: greedy, it repeats blanks.
FREE: dict[str, Any] = {"max_tokens": 500, "temperature": 2.0, "extra_body": _ENDS}


class Weather(BaseModel):
    """A structured answer that a random model can finish."""

    raining: bool


def client() -> Any:
    """A client for one event loop."""
    return openai.AsyncOpenAI(base_url=server.base_url, api_key=server.key, max_retries=0, timeout=60)


def agent(*, is_chat: bool, **more: Any) -> Any:
    """An agent on one of the two models."""
    other = client()
    set_default_openai_client(other, use_for_tracing=False)
    model = OpenAIChatCompletionsModel(server.model, other) if is_chat else server.model
    return Agent(**{"name": "clerk", "model": model, "model_settings": ModelSettings(**FREE), **more})


def calling_agent(*, is_chat: bool) -> tuple[Any, list[bool]]:
    """An agent that must call a tool first, and the arguments with which the tool was called."""
    calls: list[bool] = []

    @function_tool
    def get_weather(raining: bool) -> str:
        """The weather of a city."""
        calls.append(raining)
        return "rain"

    settings = ModelSettings(**FREE, tool_choice="required")
    return agent(is_chat=is_chat, tools=[get_weather], model_settings=settings), calls


async def run_agent(*, is_chat: bool) -> None:
    """An answer with instructions, and a second turn on the first one."""
    clerk = agent(is_chat=is_chat, instructions="Be short.")
    first = await Runner.run(clerk, QUESTION)
    assert first.final_output and first.raw_responses[0].usage.output_tokens > 0
    second = await Runner.run(clerk, [*first.to_input_list(), {"role": "user", "content": "And then?"}])
    assert second.final_output


async def stream_agent(*, is_chat: bool) -> None:
    """A stream of events whose text is the final output."""
    run = Runner.run_streamed(agent(is_chat=is_chat), QUESTION)
    events = [event async for event in run.stream_events()]
    raw = [event.data for event in events if event.type == "raw_response_event"]
    text = "".join(event.delta for event in raw if event.type == "response.output_text.delta")
    assert text and text == run.final_output


async def run_tools(*, is_chat: bool) -> None:
    """The tool is called, its result goes back, and the model answers."""
    clerk, calls = calling_agent(is_chat=is_chat)
    result = await Runner.run(clerk, QUESTION, max_turns=3)
    assert calls and isinstance(calls[0], bool) and len(result.raw_responses) == 2 and result.final_output


async def parse_output(*, is_chat: bool) -> None:
    """An output of a class."""
    clerk = agent(is_chat=is_chat, output_type=Weather)
    assert isinstance((await Runner.run(clerk, QUESTION)).final_output, Weather)


@checks.add
async def default_model() -> None:
    """The default model, as ``run_agent``."""
    await run_agent(is_chat=False)


@checks.add
async def default_model_stream() -> None:
    """The default model, as ``stream_agent``."""
    await stream_agent(is_chat=False)


@checks.add
async def default_model_tools() -> None:
    """The default model, as ``run_tools``."""
    await run_tools(is_chat=False)


@checks.add
async def default_model_tool_stream() -> None:
    """The default model streams a tool call."""
    clerk, calls = calling_agent(is_chat=False)
    run = Runner.run_streamed(clerk, QUESTION, max_turns=3)
    assert [event async for event in run.stream_events()] and calls and run.final_output


@checks.add
async def default_model_output_type() -> None:
    """The default model, as ``parse_output``."""
    await parse_output(is_chat=False)


@checks.add
async def chat_model() -> None:
    """The model of chat completions, as ``run_agent``."""
    await run_agent(is_chat=True)


@checks.add
async def chat_model_stream() -> None:
    """The model of chat completions, as ``stream_agent``."""
    await stream_agent(is_chat=True)


@checks.add
async def chat_model_tools() -> None:
    """The model of chat completions, as ``run_tools``."""
    await run_tools(is_chat=True)


@checks.add
async def chat_model_output_type() -> None:
    """The model of chat completions, as ``parse_output``."""
    await parse_output(is_chat=True)


if __name__ == "__main__":
    checks.run()
