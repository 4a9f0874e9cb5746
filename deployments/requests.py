"""An OpenAI request body -> vLLM's request model, or an error that names the field."""

import logging
from typing import Any

from pydantic import ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from deployments.openai_errors import OpenAIError

logger = logging.getLogger(__name__)

_MODELS: dict[str, type[ChatCompletionRequest] | type[CompletionRequest]] = {
    "chat": ChatCompletionRequest,
    "completions": CompletionRequest,
}

# Official fields that would change the answer and that no engine here implements: refused unless they are
# absent, null, or the value given, which asks for nothing.
_NOT_HONOURED: dict[str, dict[str, tuple[Any, str]]] = {
    "chat": {
        "audio": (None, "audio output is not supported"),
        "modalities": (["text"], "only text output is supported"),
        "functions": (None, "it is deprecated: use tools"),
        "function_call": (None, "it is deprecated: use tool_choice"),
        "web_search_options": (None, "there is no web search here"),
    },
    "completions": {
        "suffix": (None, "text after the completion is not supported"),
        "best_of": (1, "use n"),
    },
}

# More than anybody needs, and each takes a decode replica time in which it does nothing else. Of stop and bad_words
# vLLM itself takes few.
_MOST_ITEMS = {"messages": 10_000, "tools": 1000, "documents": 1000}
_MOST_PARTS = 10_000  # of all messages' contents
# Prompts times n: each is a request of its own to the engine. vLLM takes as many prompts, and more answers.
_MOST_ANSWERS = 1024
# Beam search divides by the sequence's length to this power: beyond it the longest contexts leave a float's range.
_MOST_LENGTH_PENALTY = 32.0

# Ours alone: a client that could set them could read other requests' KV, end the engine with what it cannot parse, or
# pass everybody else in an engine with `scheduling_policy: priority`, whatever its key's `highest_priority`.
_INTERNAL = ("kv_transfer_params", "ec_transfer_params", "request_id", "priority")


def parse_request(endpoint: str, body: dict[str, Any], request_id: str) -> ChatCompletionRequest | CompletionRequest:
    """Validate one request body for ``chat`` or ``completions``.

    Raises:
        OpenAIError: 400, naming the field.
        VLLMClientError: fields that contradict each other.
    """
    fields = _without_internal(body)
    if isinstance(fields.get("vllm_xargs"), dict):  # vLLM copies these to the same place
        fields["vllm_xargs"] = _without_internal(fields["vllm_xargs"])
    for name, (harmless, why) in _NOT_HONOURED[endpoint].items():
        value = fields.pop(name, None)
        if value is not None and value != harmless:
            raise OpenAIError(400, f"{name} cannot be honoured ({value!r} was asked for): {why}", param=name)
    _check_prompt(endpoint, fields)
    _check_max_tokens(fields)
    _check_counts(endpoint, fields)
    model = _MODELS[endpoint]
    ignored = [key for key in fields if key not in model.model_fields]
    if ignored:
        logger.debug("request %s: ignored fields %s", request_id, ignored)
        for name in ignored:  # vLLM would keep them until the request has ended
            del fields[name]
    try:
        request = model.model_validate({**fields, "request_id": request_id})
    except ValidationError as error:
        raise _from_pydantic(error) from None
    # vLLM's own checks index and iterate what the client sent before its types are checked.
    except (TypeError, AttributeError, LookupError) as error:
        raise OpenAIError(400, f"the body cannot be read: {error}") from None
    _check_beams(request)
    return request


def request_schema(endpoint: str) -> dict[str, Any]:
    """The JSON Schema of vLLM's request model of ``chat`` or ``completions``."""
    return _MODELS[endpoint].model_json_schema()


def requested_max_tokens(request: ChatCompletionRequest | CompletionRequest) -> int | None:
    """The output limit that the client asked for, tokens."""
    fields = vars(request)  # read as an attribute, chat's max_tokens warns that it is deprecated
    newer: int | None = fields.get("max_completion_tokens")
    return newer if newer is not None else fields["max_tokens"]


def _without_internal(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key not in _INTERNAL}


def _check_prompt(endpoint: str, fields: dict[str, Any]) -> None:
    name = "messages" if endpoint == "chat" else "prompt"
    value = fields.get(name)
    if value is None and fields.get("prompt_embeds") is None:
        raise OpenAIError(400, f"{name} is missing", param=name)
    if endpoint == "chat" and not (isinstance(value, list) and all(isinstance(part, dict) for part in value)):
        raise OpenAIError(400, "messages must be a list of objects", param="messages")
    if value in ("", []) or (isinstance(value, list) and any(part in ("", []) for part in value)):
        raise OpenAIError(
            400, f"{name} is empty: give at least one {'message' if endpoint == 'chat' else 'token'}", param=name
        )


def _check_max_tokens(fields: dict[str, Any]) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        value = fields.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value < 1:
            raise OpenAIError(400, f"{name} must be at least 1, got {value}", param=name)


def _check_counts(endpoint: str, fields: dict[str, Any]) -> None:
    for name, most in _MOST_ITEMS.items():
        value = fields.get(name)
        if isinstance(value, list) and len(value) > most:
            raise OpenAIError(400, f"{name} has {len(value)} items: give at most {most}", param=name)
    contents = [message.get("content") for message in fields["messages"]] if endpoint == "chat" else []
    if (parts := sum(len(content) for content in contents if isinstance(content, list))) > _MOST_PARTS:
        raise OpenAIError(400, f"the messages have {parts} content parts: give at most {_MOST_PARTS}", param="messages")
    prompt, n = fields.get("prompt") if endpoint == "completions" else None, fields.get("n")
    prompts = len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
    answers = prompts * n if isinstance(n, int) else prompts
    if answers > _MOST_ANSWERS:
        name = "n" if prompts == 1 else "prompt"
        raise OpenAIError(
            400, f"{answers} answers were asked for in one request: ask for at most {_MOST_ANSWERS}", param=name
        )


def _check_beams(request: ChatCompletionRequest | CompletionRequest) -> None:
    penalty = request.length_penalty
    if not abs(penalty) <= _MOST_LENGTH_PENALTY:  # nor is NaN
        raise OpenAIError(
            400, f"length_penalty must be within +-{_MOST_LENGTH_PENALTY:g}, got {penalty:g}", param="length_penalty"
        )
    has_echo = isinstance(request, CompletionRequest) and request.echo and request.logprobs is not None
    if request.use_beam_search and has_echo:
        raise OpenAIError(
            400, "a beam search has no logprobs of the prompt: leave out echo or logprobs", param="logprobs"
        )


def _from_pydantic(error: ValidationError) -> OpenAIError:
    first = error.errors(include_url=False)[0]
    path = [str(part) for part in first["loc"]]
    # A union's branches add their type names to the location; the client knows only its own field.
    param = path[0] if path else None
    cause = first.get("ctx", {}).get("error")
    param = getattr(cause, "parameter", None) or param
    message = str(first["msg"]).removeprefix("Value error, ")
    value = first.get("input")
    shown = f" (got {value!r:.100})" if path and not isinstance(value, dict) else ""
    return OpenAIError(400, f"{'.'.join(path) + ': ' if path else ''}{message}{shown}", param=param)
