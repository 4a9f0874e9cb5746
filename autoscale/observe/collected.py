"""Figures of a service from another source than its replicas' own reports, and the check of each figure (pure)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal, get_args

from autoscale.extension import storable

# Figures of one replica. The rates are of the last window; the gauges of GPUs may be measured better by an exporter.
ReplicaFigure = Literal[
    "running_requests",
    "waiting_requests",
    "queued_prefill_tokens",
    "kv_usage_frac",
    "gpu_utilization_frac",
    "sm_activity_frac",
    "decode_tokens_per_s",
    "prefill_tokens_per_s",
]
# Figures of the whole service in the last window: the quantiles of ``slo.quantile_frac``, and the arrivals.
ServiceFigure = Literal["ttft_s", "tpot_s", "requests_per_s", "input_tokens_mean", "output_tokens_mean"]

# Largest figure that can be true, in any unit. Sums of far larger ones are infinite.
_MOST = 1e15
# Most causes that one answer may name; more say no more.
_MOST_CAUSES = 20

_REPLICA_FIGURES = get_args(ReplicaFigure)
_SERVICE_FIGURES = get_args(ServiceFigure)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """The answer of a collector. A figure that is left out is not observed by it, and the replicas' own one counts.

    Attributes:
        replicas: figures of each replica, by replica id and name.
        service: figures of the whole service, by name.
        observed_s: when the figures were true, seconds since the epoch; ``None``: when the collector was called.
    """

    replicas: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    service: Mapping[str, float] = field(default_factory=dict)
    observed_s: float | None = None


def checked(answer: Any) -> tuple[Collected, dict[str, str]]:
    """The figures of an answer that can be true, and what is wrong with the others: by cause, one example each.

    Raises:
        ValueError: it is no answer, or its time is no time.
    """
    if not isinstance(answer, Collected):
        raise ValueError(f"returned {answer!r:.80}, which is no Collected")
    if answer.observed_s is not None and (fault := _fault("observed_s", answer.observed_s)):
        raise ValueError(f"observed_s is {answer.observed_s!r:.80}, which {fault}")
    faults: dict[str, str] = {}
    replicas = {
        storable(str(replica)): _sound(figures, _REPLICA_FIGURES, f" of replica {replica}", faults)
        for replica, figures in answer.replicas.items()
    }
    service = _sound(answer.service, _SERVICE_FIGURES, "", faults)
    return Collected(replicas=replicas, service=service, observed_s=answer.observed_s), faults


def _sound(figures: Mapping[str, Any], names: tuple[str, ...], owner: str, faults: dict[str, str]) -> dict[str, float]:
    """The figures that can be true; the others are added to ``faults``. ``owner``: the replica, in words."""
    sound = {}
    for name, value in figures.items():
        fault = _fault(name, value) if name in names else f"is unknown (known are {', '.join(names)})"
        if fault is None:
            sound[str(name)] = float(value)
        elif len(faults) < _MOST_CAUSES:
            cause = storable(f"{name!s:.80} {fault}")
            faults.setdefault(cause, storable(f"{name!s:.80}{owner} is {value!r:.80}: it {fault}"))
    return sound


def _fault(name: str, value: Any) -> str | None:
    """Why a value cannot be true; ``None``: it can. All figures are counts, rates, times, lengths or shares."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return "is no number"
    number: Any = value  # a whole number may be too large for a float
    if not abs(number) < math.inf:
        return "is not finite"
    if number < 0:
        return "is negative"
    if number > _MOST:
        return f"is above {_MOST:g}"
    return "is a share above 1" if name.endswith("_frac") and number > 1 else None
