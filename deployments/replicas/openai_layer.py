"""Conversion around vLLM's OpenAI layer: bodies become its requests, and its answers and errors become frames."""

import logging
from collections.abc import Collection
from pickle import UnpicklingError
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.exceptions import GracefulHTTPError, VLLMClientError

from deployments.replicas.body_bounds import check_bounds
from deployments.replicas.generation import RequestTrace
from deployments.replicas.media_names import with_own_media_names
from deployments.vllm_seam.engine_types import EngineDeadError, EngineRefusal, error_event
from deployments.vllm_seam.load_report import load_headers
from deployments.wire.answer_limit import check_answers
from deployments.wire.messages import Frame, NotResumableError, failure, full
from deployments.wire.openai_errors import OpenAIError, field_at_fault, wrong_type
from deployments.wire.prompt_ids import PROMPT_IDS, TRANSFER_PARAMS, chat_prompt_ids

logger = logging.getLogger(__name__)

_MODELS: dict[str, type[ChatCompletionRequest] | type[CompletionRequest]] = {
    "chat": ChatCompletionRequest,
    "completions": CompletionRequest,
}

# Fields that no client may set. With them it could read the KV of other requests, end the engine with values that the
# engine cannot parse, or go first in an engine with `scheduling_policy: priority`, beyond its key's `highest_priority`.
# With `kv_cache_report_mode` an engine would report blocks as stored that it has already.
_INTERNAL = (TRANSFER_PARAMS, "ec_transfer_params", "request_id", "priority", "kv_cache_report_mode")
# What torch.load raises for bytes that are no saved tensor.
_UNREADABLE_TENSORS = (UnpicklingError, EOFError, RuntimeError, KeyError)
_TOKEN_IDS = TypeAdapter(list[Annotated[int, Field(ge=0, strict=True)]])

# Fields whose items vLLM copies to the same place as the fields themselves.
_INNER = ("vllm_xargs", "sampling_params", "extra_args")


def parse_request(endpoint: str, body: dict[str, Any], request_id: str) -> ChatCompletionRequest | CompletionRequest:
    """vLLM's request for a body.

    Fields that vLLM does not know are ignored, as it does: also those of OpenAI that no engine here implements, such as
    ``functions`` or ``best_of``.

    Raises OpenAIError: 400, a field is wrong, and the error names it. VLLMClientError: fields contradict each other.
    """
    fields = with_own_media_names(without_internal(body))
    if (ids := chat_prompt_ids(endpoint, body)) is not None:
        fields[TRANSFER_PARAMS] = {PROMPT_IDS: _checked_ids(ids)}
    _check_prompt(endpoint, fields)
    check_bounds(fields)
    model = _MODELS[endpoint]
    if ignored := fields.keys() - model.model_fields:
        logger.debug("request %s: ignored fields %s", request_id, sorted(ignored))
        for name in ignored:  # vLLM would keep them until the request has ended
            del fields[name]
    try:
        request = model.model_validate({**fields, "request_id": request_id})
    except ValidationError as error:
        raise wrong_type(error) from None
    # vLLM's own checks index and iterate the client's values before pydantic has checked their types.
    except (TypeError, AttributeError, LookupError) as error:
        raise OpenAIError(400, f"the body cannot be read: {error}") from None
    _check_answers(request)
    return request


def requested_max_tokens(request: ChatCompletionRequest | CompletionRequest) -> int | None:
    """The output limit that the client set, tokens."""
    fields = vars(request)  # read as an attribute, chat's max_tokens warns that it is deprecated
    limit = fields.get("max_completion_tokens")
    return fields["max_tokens"] if limit is None else limit


def _field_error(field: str, why: str) -> OpenAIError:
    return OpenAIError(400, why, param=field)


def without_internal(fields: dict[str, Any]) -> dict[str, Any]:
    """A body without the fields that no client may set, also in the objects whose items vLLM takes as fields."""
    kept = {key: value for key, value in fields.items() if key not in _INTERNAL}
    return {
        key: without_internal(value) if key in _INNER and isinstance(value, dict) else value
        for key, value in kept.items()
    }


def _check_prompt(endpoint: str, fields: dict[str, Any]) -> None:
    name = "messages" if endpoint == "chat" else "prompt"
    value = fields.get(name)
    if value is None and fields.get("prompt_embeds") is None:
        raise _field_error(name, f"{name} is missing")
    if endpoint == "chat" and not (isinstance(value, list) and all(isinstance(part, dict) for part in value)):
        raise _field_error("messages", "messages must be a list of objects")
    if value in ("", []) or (isinstance(value, list) and any(part in ("", []) for part in value)):
        item = "message" if endpoint == "chat" else "token"
        raise _field_error(name, f"{name} is empty: give at least one {item}")


def _checked_ids(value: Any) -> list[int]:
    """A chat's prompt ids. vLLM does not check them: its engine would fail."""
    try:
        return _TOKEN_IDS.validate_python(value)
    except ValidationError as error:
        raise _field_error(TRANSFER_PARAMS, f"{TRANSFER_PARAMS}.{PROMPT_IDS}: {wrong_type(error).message}") from None


def _check_answers(request: ChatCompletionRequest | CompletionRequest) -> None:
    prompt = request.prompt if isinstance(request, CompletionRequest) else None
    prompts = 1
    if isinstance(prompt, list) and not isinstance(prompt[0], int):  # a list of token ids is one prompt
        prompts = len(prompt)
    check_answers(prompts * (request.n or 1), "n" if prompts == 1 else "prompt")


def answer_frame(chunk: Any, trace: RequestTrace, fields: Collection[str]) -> Frame:
    """The frame of an event, a whole response, or an error response; ``fields``: names of the fields in the body."""
    if isinstance(chunk, str):
        refusal = error_event(chunk)
        if refusal is None:
            return Frame(chunk, *trace.drain(), route=trace.take_route(), usage=trace.take_usage())
        # The event has only the error's message; the trace has the error itself.
        frame = None if trace.error is None else _replica_failure(trace.error)
        return frame or refusal_frame(refusal, fields)
    error = getattr(chunk, "error", None)
    if error is not None:
        refusal = EngineRefusal(status=int(error.code or 500), message=error.message, parameter=error.param)
        return refusal_frame(refusal, fields)
    return Frame(
        chunk.model_dump_json(), *trace.drain(), route=trace.take_route(), headers=load_headers(trace.http_headers)
    )


def failure_frame(error: Exception, request_id: str, fields: Collection[str]) -> Frame:
    """The frame of an error that ended a request; logs an unexpected error."""
    if (frame := _replica_failure(error)) is not None:
        return frame
    if isinstance(error, OpenAIError):
        return Frame(error.body(), status=error.status, error="invalid_request")
    if isinstance(error, (VLLMClientError, ValueError)):  # such as a grammar that does not compile
        refusal = EngineRefusal(status=400, message=str(error), parameter=getattr(error, "parameter", None))
        return refusal_frame(refusal, fields)
    if "prompt_embeds" in fields and isinstance(error, _UNREADABLE_TENSORS):
        message = f"prompt_embeds is no tensor ({type(error).__name__}): give what torch.save writes, in base64"
        return refusal_frame(EngineRefusal(status=400, message=message, parameter="prompt_embeds"), fields)
    logger.error("request %s failed", request_id, exc_info=error)
    return failure(500, f"internal error; request {request_id} is in the decode replica's log", "internal")


def _replica_failure(error: Exception) -> Frame | None:
    """The frame of an error that is not the request's fault; ``None``: it may be the request's fault."""
    if isinstance(error, GracefulHTTPError):  # the engine's own limits, such as max_num_queued_reqs
        return full(error.message)
    if isinstance(error, EngineDeadError):
        return failure(503, "the decode engine has died; the request may be sent again", "engine_dead")
    if isinstance(error, NotResumableError):
        message = f"the decode replica was lost, and no other replica can continue this stream: {error}"
        return failure(503, message, "not_resumable")
    return None


def refusal_frame(refusal: EngineRefusal, fields: Collection[str]) -> Frame:
    """The frame of a refusal by vLLM; ``fields``: names of the fields in the body."""
    error = OpenAIError(
        refusal.status,
        refusal.message,
        param=field_at_fault(refusal.message, refusal.parameter, fields),
        code="context_length_exceeded" if refusal.is_beyond_context else None,
    )
    return Frame(error.body(), status=error.status, error="invalid_request" if error.status < 500 else "engine")
