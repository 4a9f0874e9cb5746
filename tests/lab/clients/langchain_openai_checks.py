"""LangChain's package for OpenAI's API: ``ChatOpenAI``, ``OpenAI`` and ``OpenAIEmbeddings``."""

from typing import Any

import openai
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel

from tests.lab.clients.checks import Checks, Server

checks, server = Checks(), Server.load()
QUESTION = "What does the licence say of contributions? " * 5
# A random model ends its JSON sooner if every allowed token is nearly as likely as another: greedy, it repeats blanks.
FREE: dict[str, Any] = {"temperature": 2, "seed": 1, "max_tokens": 500}
WHERE: dict[str, Any] = {"base_url": server.base_url, "api_key": server.key, "max_retries": 0, "timeout": 60}


class Weather(BaseModel):
    """A structured answer that a random model can finish."""

    raining: bool


def chat(**more: Any) -> Any:
    """A chat model."""
    return ChatOpenAI(**{"model": server.model, "max_tokens": 8, "temperature": 0, **WHERE, **more})


@checks.add
def invoke() -> None:
    """An answer with its usage and the reason of its end."""
    answer = chat().invoke([SystemMessage("Be short."), HumanMessage(QUESTION)])
    assert answer.content and answer.usage_metadata["output_tokens"] == 8
    assert answer.response_metadata["finish_reason"] == "length"


@checks.add
def stream() -> None:
    """A stream has the text of the whole answer, and its usage."""
    chunks = list(chat(stream_usage=True).stream(QUESTION))
    assert "".join(chunk.content for chunk in chunks) == chat().invoke(QUESTION).content
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) == 8


@checks.add
async def batches() -> None:
    """Four at a time, and asynchronous."""
    answers = chat().batch([QUESTION] * 4)
    others = await chat().abatch([QUESTION] * 4)
    assert len({answer.content for answer in [*answers, *others]}) == 1
    assert [chunk async for chunk in chat().astream(QUESTION)]


@checks.add
def logprobs_and_choices() -> None:
    """Log probabilities, and several choices."""
    answer = chat(logprobs=True, top_logprobs=2).invoke(QUESTION)
    assert len(answer.response_metadata["logprobs"]["content"]) == 8
    result = chat(n=2, temperature=1).generate([[HumanMessage(QUESTION)]])
    assert len(result.generations[0]) == 2


@checks.add
def tools() -> None:
    """A tool that the request names is called, whole and streamed, and its result goes back."""
    bound = chat(**FREE).bind_tools([Weather], tool_choice="Weather")
    call = bound.invoke(QUESTION).tool_calls[0]
    assert call["name"] == "Weather" and isinstance(call["args"]["raining"], bool)
    parts = list(bound.stream(QUESTION))
    whole = parts[0]
    for part in parts[1:]:
        whole = whole + part
    assert whole.tool_calls[0]["name"] == "Weather" and "raining" in whole.tool_calls[0]["args"]
    turns = [HumanMessage(QUESTION), AIMessage("", tool_calls=[call]), ToolMessage("rain", tool_call_id=call["id"])]
    assert chat().bind_tools([Weather]).invoke(turns).content


@checks.add
def structured_output() -> None:
    """An object of a class, through a JSON schema and through a tool."""
    for method in ("json_schema", "function_calling"):
        model = chat(**FREE).with_structured_output(Weather, method=method)
        assert isinstance(model.invoke(QUESTION), Weather), method


@checks.add
def json_mode() -> None:
    """The answer begins as an object, and is stopped there: a random model need not end it."""
    ends = {"stop": ["{"], "extra_body": {"include_stop_str_in_output": True}}
    model = chat(**ends).with_structured_output(Weather, method="json_mode", include_raw=True)
    assert model.invoke(f"{QUESTION} Answer in JSON.")["raw"].content.strip() == "{"


@checks.add
def responses_api() -> None:
    """``use_responses_api``: an answer, and a stream with the same text."""
    model = chat(use_responses_api=True)
    answer = model.invoke(QUESTION)
    assert answer.text and answer.usage_metadata["output_tokens"] == 8
    assert "".join(chunk.text for chunk in model.stream(QUESTION)) == answer.text


@checks.add
def responses_api_tools_and_output() -> None:
    """``use_responses_api``: a tool that the request names, and an object of a class."""
    free = {name: value for name, value in FREE.items() if name != "seed"}
    model = chat(use_responses_api=True, **free)
    call = model.bind_tools([Weather], tool_choice="Weather").invoke(QUESTION).tool_calls[0]
    assert call["name"] == "Weather" and isinstance(call["args"]["raining"], bool)
    assert isinstance(model.with_structured_output(Weather, method="json_schema").invoke(QUESTION), Weather)


@checks.add
def completions() -> None:
    """``OpenAI``: whole, streamed, in batches, and two choices of two."""
    values: dict[str, Any] = {"model": server.model, "max_tokens": 8, "temperature": 0, **WHERE}
    text = OpenAI(**values).invoke(QUESTION)
    assert text and "".join(OpenAI(**values).stream(QUESTION)) == text
    assert OpenAI(**values).batch([QUESTION] * 2) == [text] * 2


@checks.add
def best_of() -> None:
    """``OpenAI(n=2, best_of=2)``."""
    model = OpenAI(model=server.model, max_tokens=8, temperature=1, n=2, best_of=2, **WHERE)
    assert len(model.generate([QUESTION]).generations[0]) == 2


@checks.add
def embeddings_of_a_model_that_only_generates() -> None:
    """The error is one of the SDK's 4xx classes."""
    model = OpenAIEmbeddings(model=server.model, check_embedding_ctx_length=False, **WHERE)
    try:
        model.embed_query("Hello")
    except (openai.BadRequestError, openai.NotFoundError):
        return
    raise AssertionError("a model that only generates gave an embedding")


if __name__ == "__main__":
    checks.run()
