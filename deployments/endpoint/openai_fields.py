"""The fields of any route's body as those of a chat or a completion with the same prompts (pure).

The endpoint estimates a request's tokens from them, and finds the replica that has the prompt's beginning. vLLM reads
the body itself. Values of any type pass: vLLM refuses them on decode.
"""

import json
from collections.abc import Callable
from typing import Any

from deployments.endpoint.routes import Route, Work

Fields = dict[str, Any]


def openai_fields(route: Route, body: Fields) -> tuple[str, Fields]:
    """``chat`` or ``completions``, and the fields of that route; none if the body's ``route`` needs no engine."""
    if route.work is Work.NONE:
        return "completions", {}
    convert = _CONVERSIONS.get(route.name)
    return (route.name, body) if convert is None else convert(body)


def _responses(body: Fields) -> tuple[str, Fields]:
    items = body.get("input")
    messages = [{"role": "system", "content": body.get("instructions")}] if body.get("instructions") else []
    if isinstance(items, list):
        messages += [_item(item) for item in items]
    else:
        messages.append({"role": "user", "content": items if isinstance(items, str) else None})
    return "chat", {
        **_with(body, "stream", "tools", "cache_salt"),
        "messages": messages,
        **_limit(body, "max_output_tokens"),
    }


def _messages(body: Fields) -> tuple[str, Fields]:
    system, messages = body.get("system"), body.get("messages")
    first = [] if not system else [{"role": "system", "content": _parts(system)}]
    rest = [_item(message) for message in messages] if isinstance(messages, list) else []
    return "chat", {
        **_with(body, "stream", "tools", "cache_salt", "chat_template_kwargs"),
        "messages": first + rest,
        **_limit(body, "max_tokens"),
    }


def _batch(body: Fields) -> tuple[str, Fields]:
    """Conversations are estimated from their texts together, as prompts of one completion."""
    conversations = body.get("messages")
    prompts = [_text(one) for one in conversations] if isinstance(conversations, list) else None
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    return "completions", {**_with(body, "stream", "n"), "prompt": prompts, "max_tokens": limit}


def _generate(body: Fields) -> tuple[str, Fields]:
    sampling = body.get("sampling_params")
    sampling = sampling if isinstance(sampling, dict) else {}
    return "completions", {
        **_with(body, "stream", "cache_salt"),
        **_with(sampling, "n", "max_tokens"),
        "prompt": body.get("token_ids"),
    }


def _scoring(body: Fields) -> tuple[str, Fields]:
    query, items = body.get("query"), body.get("items")
    count = len(items) if isinstance(items, list) else 1
    return "completions", {"prompt": [_text([query, items])], "n": count, "max_tokens": 1}


def _invocation(body: Fields) -> tuple[str, Fields]:
    """vLLM takes the first kind of body whose fields fit."""
    if "messages" in body:
        return "chat", body
    if "prompt" in body:
        return "completions", body
    return _generate(body) if "token_ids" in body else _pooled(body)


def _pooled(body: Fields) -> tuple[str, Fields]:
    """Texts or token ids of a pooling model's request, under any of the names that vLLM gives them."""
    if (messages := body.get("messages")) is not None:
        fields = {"messages": messages, "max_tokens": 1}
        is_batch = isinstance(messages, list) and any(isinstance(one, list) for one in messages)
        return _batch(fields) if is_batch else ("chat", fields)
    names = ("input", "texts", "inputs", "text_1", "text_2", "queries", "query", "documents", "items", "data", "data_1")
    given = [body[name] for name in (*names, "data_2") if name in body]
    texts = [one for value in given for one in (value if isinstance(value, list) else [value])]
    prompt = given[0] if len(given) == 1 else [_text(one) for one in texts]  # each is a request to the engine
    return "completions", {"prompt": prompt, "max_tokens": 1}


_CONVERSIONS: dict[str, Callable[[Fields], tuple[str, Fields]]] = {
    "responses": _responses,
    "messages": _messages,
    "chat_batch": _batch,
    "generate": _generate,
    "generative_scoring": _scoring,
    "invocations": _invocation,
    **dict.fromkeys(("embeddings", "embed", "pooling", "classify"), _pooled),
    **dict.fromkeys(("score", "v1_score", "rerank", "v1_rerank", "v2_rerank"), _pooled),
}


def _item(item: Any) -> Any:
    """An item of a conversation as a chat message; a tool call or its result counts by its text."""
    if not isinstance(item, dict):
        return item
    if "content" in item:
        return {"role": item.get("role"), "content": _parts(item["content"])}
    return {"role": item.get("type"), "content": _text(item)}


def _parts(content: Any) -> Any:
    """A message's content with each text part in the form of a chat's."""
    if not isinstance(content, list):
        return content
    return [
        {"type": "text", "text": part["text"]} if isinstance(part, dict) and isinstance(part.get("text"), str) else part
        for part in content
    ]


def _with(body: Fields, *names: str) -> Fields:
    return {name: body[name] for name in names if name in body}


def _limit(body: Fields, name: str) -> Fields:
    return {"max_tokens": body[name]} if name in body else {}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), ensure_ascii=False)
