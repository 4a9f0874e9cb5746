"""Report: the figures of a run as its client measured them, for the load generator and the laboratory (pure).

The simulator shares ``RequestRecord`` and ``Slo``, and has its own figures, ``autoscale.sim.outcome.Outcome``.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np

_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """The timeline of one request, seconds from the start of the run; ``None``: the request did not reach that point.

    Attributes:
        prefilled_s: end of the computation on a prefill engine; ``None`` also if decode computed the prompt, or if the
            time is unknown.
        answered_s: arrival of the response's status.
    """

    sent_s: float
    first_token_s: float | None
    last_token_s: float | None
    input_tokens: int
    output_tokens: int
    error: str | None = None
    prefilled_s: float | None = None
    answered_s: float | None = None

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return None if self.first_token_s is None else self.first_token_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; ``None`` for fewer than two tokens."""
        if self.first_token_s is None or self.last_token_s is None or self.output_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Latency objectives of one request, seconds."""

    ttft_s: float
    tpot_s: float

    def is_met(self, record: RequestRecord) -> bool:
        """Whether a request ended without an error and within both objectives."""
        if record.error is not None or record.ttft_s is None:
            return False
        return record.ttft_s <= self.ttft_s and (record.tpot_s is None or record.tpot_s <= self.tpot_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Counts, latency quantiles (seconds) and rates of one run; failed requests are left out of the quantiles."""

    requests_ok: int
    requests_failed: int
    duration_s: float
    ttft_s: dict[str, float]
    tpot_s: dict[str, float]
    output_tokens_per_s: float
    requests_per_s: float
    slo_attainment_frac: float | None
    goodput_requests_per_s: float | None
    errors: dict[str, int]

    @classmethod
    def of(cls, records: Sequence[RequestRecord], slos: Sequence[Slo] | None = None) -> Self:
        """The report of a run; ``slos``: the objectives of each record; ``None``: no attainment and no goodput.

        Raises:
            ValueError: there are no records, or records and objectives differ in number.
        """
        if not records:
            raise ValueError("a report needs at least one request")
        if slos is not None and len(slos) != len(records):
            raise ValueError(f"{len(slos)} objectives for {len(records)} requests: give one each")
        ok = [record for record in records if record.error is None]
        start = min(record.sent_s for record in records)
        end = max(max(record.last_token_s or 0.0, record.sent_s) for record in records)
        duration = max(end - start, 1e-9)  # never 0, since rates are divided by it
        met = None if slos is None else sum(slo.is_met(record) for record, slo in zip(records, slos, strict=True))
        return cls(
            requests_ok=len(ok),
            requests_failed=len(records) - len(ok),
            duration_s=duration,
            ttft_s=_quantiles([record.ttft_s for record in ok]),
            tpot_s=_quantiles([record.tpot_s for record in ok]),
            output_tokens_per_s=sum(record.output_tokens for record in ok) / duration,
            requests_per_s=len(ok) / duration,
            slo_attainment_frac=None if met is None else met / len(records),
            goodput_requests_per_s=None if met is None else met / duration,
            errors=dict(Counter(record.error for record in records if record.error is not None)),
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def _quantiles(values: Sequence[float | None]) -> dict[str, float]:
    present = [value for value in values if value is not None]
    return {name: float(np.quantile(present, q)) for name, q in _QUANTILES.items()} if present else {}
