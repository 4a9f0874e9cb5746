"""What a trace asks of prefill and of decode in each window of time (pure)."""

from collections.abc import Sequence
from dataclasses import dataclass

from autoscale.operators.demand import PlanError
from autoscale.traces.trace import TraceRequest

# More are a fault of the trace or of the window: a day of windows of 10 s has 8,640.
MOST_WINDOWS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowDemand:
    """Means of one window.

    Attributes:
        start_s: its start.
        passes_per_s: prompts per second (prefill), or output tokens per second (decode).
        length_tokens: mean length of a prompt, or mean context over the tokens; 0: there are no passes.
        arrivals_s: arrival times of the requests that are counted in this window.
    """

    start_s: float
    passes_per_s: float
    length_tokens: float
    arrivals_s: tuple[float, ...]


def prefill_demands(trace: Sequence[TraceRequest], window_s: float) -> tuple[WindowDemand, ...]:
    """Prompts by the window of their arrival, from time 0 to the last request.

    Raises:
        PlanError: the trace has no request or too many windows, or the window is not above 0.
    """
    by_window = _by_window(trace, window_s)
    return tuple(
        WindowDemand(
            start_s=number * window_s,
            passes_per_s=len(requests) / window_s,
            length_tokens=_mean([float(max(one.input_tokens, 1)) for one in requests]),
            arrivals_s=tuple(one.at_s for one in requests),
        )
        for number, requests in enumerate(by_window)
    )


def decode_demands(trace: Sequence[TraceRequest], window_s: float, tpot_s: float) -> tuple[WindowDemand, ...]:
    """Output tokens by the window in which they come, each request's one by one, ``tpot_s`` apart.

    A context is the prompt and half of the output. Windows after the last arrival are left out, with their tokens.

    Raises:
        PlanError: the trace has no request or too many windows, or a time is not above 0.
    """
    if not tpot_s > 0.0:
        raise PlanError(f"tpot_s is {tpot_s}: give a number of seconds above 0")
    by_window = _by_window(trace, window_s)
    tokens, contexts = [0.0] * len(by_window), [0.0] * len(by_window)
    for one in trace:
        end_s = one.at_s + one.output_tokens * tpot_s
        for number in range(int(one.at_s / window_s), min(int(end_s / window_s), len(by_window) - 1) + 1):
            overlap_s = min(end_s, (number + 1) * window_s) - max(one.at_s, number * window_s)
            tokens[number] += overlap_s / tpot_s
            contexts[number] += overlap_s / tpot_s * (one.input_tokens + one.output_tokens / 2.0)
    return tuple(
        WindowDemand(
            start_s=number * window_s,
            passes_per_s=tokens[number] / window_s,
            length_tokens=contexts[number] / tokens[number] if tokens[number] > 0.0 else 0.0,
            arrivals_s=tuple(one.at_s for one in requests),
        )
        for number, requests in enumerate(by_window)
    )


def _by_window(trace: Sequence[TraceRequest], window_s: float) -> list[list[TraceRequest]]:
    if not window_s > 0.0:
        raise PlanError(f"window_s is {window_s}: give a number of seconds above 0")
    if not trace:
        raise PlanError("the trace has no request: give one with a request or more")
    last_s = max(one.at_s for one in trace)
    if last_s / window_s >= MOST_WINDOWS:
        raise PlanError(
            f"the last request comes at {last_s:.10g} s, and {MOST_WINDOWS:,} windows of {window_s:g} s end before it: "
            "give longer windows, or a part of the trace"
        )
    windows: list[list[TraceRequest]] = [[] for _ in range(int(last_s / window_s) + 1)]
    for one in trace:
        windows[int(one.at_s / window_s)].append(one)
    return windows


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
