"""Request traces: when requests arrive and how long they are (pure; the benchmark's and the simulator's input)."""

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One arrival: seconds from the start of the trace, prompt length, output length."""

    at_s: float
    input_tokens: int
    output_tokens: int


def load_trace(path: Path) -> tuple[TraceRequest, ...]:
    """Read a CSV with the columns ``timestamp_s``, ``input_tokens``, ``output_tokens``, in order of time.

    Raises:
        ValueError: the file cannot be read, a column is missing, a value is no number, or the times run backwards.
    """
    try:
        with path.open(newline="") as lines:
            rows = list(csv.DictReader(lines))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
    requests = []
    for number, row in enumerate(rows, start=2):
        try:
            requests.append(
                TraceRequest(
                    at_s=float(row["timestamp_s"]),
                    input_tokens=int(row["input_tokens"]),
                    output_tokens=int(row["output_tokens"]),
                )
            )
        except KeyError as error:
            raise ValueError(f"{path}: no column {error}: expected timestamp_s, input_tokens, output_tokens") from None
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: line {number}: {error}") from None
        if len(requests) > 1 and requests[-1].at_s < requests[-2].at_s:
            raise ValueError(f"{path}: line {number}: time runs backwards ({requests[-1].at_s} s)")
    if not requests:
        raise ValueError(f"{path}: no requests")
    return tuple(requests)


def scale_trace(
    requests: Iterable[TraceRequest],
    *,
    time_factor: float = 1.0,
    length_factor: float = 1.0,
    max_total_tokens: int | None = None,
    limit: int | None = None,
) -> tuple[TraceRequest, ...]:
    """The first ``limit`` requests, slowed down and shortened.

    Args:
        requests: a trace.
        time_factor: multiplies arrival times; 2 halves the rate.
        length_factor: multiplies both lengths; they stay at least 1.
        max_total_tokens: a prompt is cut so that prompt and output together fit into this many tokens.
        limit: keep at most this many requests.
    """
    scaled = []
    for request in list(requests)[:limit]:
        output = max(1, round(request.output_tokens * length_factor))
        prompt = max(1, round(request.input_tokens * length_factor))
        if max_total_tokens is not None:
            output = min(output, max_total_tokens - 1)
            prompt = min(prompt, max_total_tokens - output)
        scaled.append(TraceRequest(at_s=request.at_s * time_factor, input_tokens=prompt, output_tokens=output))
    return tuple(scaled)
