"""Classes of vLLM that its public modules do not have, and failures that its OpenAI layer reports in a stream.

Needs: ``vllm.v1.engine.FinishReason``, ``vllm.v1.engine.exceptions.EngineDeadError`` and
``vllm.v1.metrics.stats.RequestStateStats``.
Without it: no replica starts; the error names the class.
"""

import json
from dataclasses import dataclass, replace
from typing import Any

from vllm.v1.engine import FinishReason
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.stats import RequestStateStats

from deployments.wire.messages import Times

__all__ = [
    "EngineDeadError",
    "EngineRefusal",
    "FinishReason",
    "RequestStateStats",
    "computed_s",
    "error_event",
    "times_of",
    "with_arrival",
    "with_times",
]
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


def with_arrival(prompt: Any, arrived_at_s: float) -> Any:
    """A copy of a rendered prompt that arrived at this wall-clock time; another prompt unchanged.

    Needs: the key ``arrival_time`` of rendered prompts, from which ``InputProcessor.process_inputs`` takes the arrival.
    Without it: vLLM's histograms of TTFT and of whole requests on decode engines leave out the time at the endpoint.
    """
    return {**prompt, "arrival_time": arrived_at_s} if isinstance(prompt, dict) and "type" in prompt else prompt


def times_of(metrics: RequestStateStats | None, clock_s: float) -> Times | None:
    """The times that an engine noted of a request; ``None``: it has no token.

    ``clock_s``: wall-clock time at which this node's monotonic clock was zero.

    Needs: ``queued_ts``, ``scheduled_ts``, ``first_token_ts`` and ``last_token_ts`` of ``RequestStateStats``, by the
    monotonic clock.
    Without it: requests fail at their first token.
    """
    if metrics is None or not metrics.first_token_ts:
        return None
    return Times(
        queued_s=metrics.queued_ts,
        scheduled_s=metrics.scheduled_ts,
        first_token_s=metrics.first_token_ts,
        last_token_s=metrics.last_token_ts,
        clock_s=clock_s,
    )


def with_times(metrics: RequestStateStats | None, times: Times) -> RequestStateStats:
    """A copy of an engine's figures of a request, with other times; ``None``: no engine has figures of it.

    It is a copy, since the engine's own histograms read the original.

    Needs: ``build_per_request_timing_metrics`` of vLLM's serving classes computes ``metrics`` of an answer from the
    four times alone.
    Without it: with ``enable_per_request_metrics``, answers report the decode engine's times without prefill.
    """
    return replace(
        metrics or RequestStateStats(),
        queued_ts=times.queued_s,
        scheduled_ts=times.scheduled_s,
        first_token_ts=times.first_token_s,
        last_token_ts=times.last_token_s,
    )


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
