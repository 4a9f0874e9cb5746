"""Instructor: objects of a class, through tools, JSON schemas and the Responses API."""

from typing import Any

import instructor
import openai
from instructor.core import InstructorRetryException
from pydantic import BaseModel

from tests.lab.clients.checks import Checks, Server, raises

checks, server = Checks(), Server.load()
QUESTION: list[Any] = [{"role": "user", "content": "What does the licence say of contributions? " * 5}]
# A random model ends its JSON sooner if every allowed token is nearly as likely as another: greedy, it repeats blanks.
FREE: dict[str, Any] = {"temperature": 2, "seed": 1, "max_tokens": 500}
WHERE: dict[str, Any] = {"base_url": server.base_url, "api_key": server.key, "max_retries": 0, "timeout": 60}


class Weather(BaseModel):
    """A structured answer that a random model can finish."""

    raining: bool


def patched(mode: Any) -> Any:
    """A client in a mode."""
    return instructor.from_openai(openai.OpenAI(**WHERE), mode=mode)


def create(client: Any, **more: Any) -> Any:
    """An object of the class."""
    values = {"model": server.model, "messages": QUESTION, "response_model": Weather, "max_retries": 0, **FREE, **more}
    return client.create(**values)


@checks.add
def tools() -> None:
    """Through a tool, with the answer that it came from."""
    client = patched(instructor.Mode.TOOLS)
    assert isinstance(create(client), Weather)
    values: dict[str, Any] = {"model": server.model, "messages": QUESTION, "response_model": Weather, **FREE}
    weather, answer = client.create_with_completion(**values)
    assert isinstance(weather, Weather) and answer.choices[0].message.tool_calls


@checks.add
def json_schema() -> None:
    """Through a JSON schema."""
    assert isinstance(create(patched(instructor.Mode.JSON_SCHEMA)), Weather)


@checks.add
def partial_objects() -> None:
    """A stream of objects that grow."""
    values: dict[str, Any] = {"model": server.model, "messages": QUESTION, "response_model": Weather, **FREE}
    parts = list(patched(instructor.Mode.JSON_SCHEMA).create_partial(**values))
    assert isinstance(parts[-1].raining, bool)


@checks.add
async def asynchronous_tools() -> None:
    """The asynchronous client."""
    client = instructor.from_openai(openai.AsyncOpenAI(**WHERE), mode=instructor.Mode.TOOLS)
    assert isinstance(await create(client), Weather)


@checks.add
def provider() -> None:
    """``from_provider`` with the URL."""
    client = instructor.from_provider(f"openai/{server.model}", base_url=server.base_url, api_key=server.key)
    assert isinstance(create(client), Weather)


@checks.add
def responses_api() -> None:
    """Through a tool of the Responses API."""
    client = patched(instructor.Mode.RESPONSES_TOOLS)
    weather = client.create(model=server.model, messages=QUESTION, response_model=Weather, max_retries=0, temperature=2)
    assert isinstance(weather, Weather)


@checks.add
def errors() -> None:
    """A model that is not served is an error that names it."""
    error = raises(
        InstructorRetryException,
        lambda: create(patched(instructor.Mode.TOOLS), model="absent"),
    )
    assert "absent" in str(error)


if __name__ == "__main__":
    checks.run()
