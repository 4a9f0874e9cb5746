"""Classes of vLLM that its public modules do not have, and failures that its OpenAI layer reports in a stream.

Needs: ``vllm.v1.engine.FinishReason``, ``vllm.v1.engine.exceptions.EngineDeadError`` and
``vllm.v1.metrics.stats.RequestStateStats``.
Without it: no replica starts; the error names the class.
"""

import json
from dataclasses import dataclass

from vllm.v1.engine import FinishReason
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.stats import RequestStateStats

__all__ = ["EngineDeadError", "EngineRefusal", "FinishReason", "RequestStateStats", "computed_s", "error_event"]
_ERROR_EVENT = 'data: {"error"'
# VLLMValidationError.parameter of a prompt that is longer than the model's context.
_CONTEXT_PARAMETERS = frozenset({"input_text", "input_tokens"})


def computed_s(metrics: RequestStateStats | None) -> float | None:
    """Seconds from an engine's first work on a prompt to the first token, by the engine's clock; ``None``: no token.

    Needs: ``scheduled_ts`` and ``first_token_ts`` of ``RequestStateStats``.
    Without it: prefill fails at its first prompt, and decode computes the prompts.
    """
    if metrics is None or not metrics.scheduled_ts or not metrics.first_token_ts:
        return None
    return metrics.first_token_ts - metrics.scheduled_ts


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRefusal:
    """A refusal by vLLM's OpenAI layer; ``parameter``: vLLM's name of the field at fault.

    Needs: the values ``input_text`` and ``input_tokens`` of ``VLLMValidationError.parameter``.
    Without it: the refusal of a prompt that is too long has no code ``context_length_exceeded``.
    """

    status: int
    message: str
    parameter: str | None

    @property
    def is_beyond_context(self) -> bool:
        """Whether the prompt is longer than the model's context."""
        return self.status == 400 and self.parameter in _CONTEXT_PARAMETERS


def error_event(chunk: str) -> EngineRefusal | None:
    """The failure that an event of a stream reports; ``None``: the event reports none.

    vLLM yields events as text alone.

    Needs: ``error`` as the first key of all events that report a failure, and of no other event.
    Without it: clients get vLLM's own error events, also for a request that another replica could answer.
    """
    if not chunk.startswith(_ERROR_EVENT):
        return None
    error = json.loads(chunk.removeprefix("data: "))["error"]
    return EngineRefusal(
        status=int(error.get("code") or 500), message=str(error.get("message")), parameter=error.get("param")
    )
