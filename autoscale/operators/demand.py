"""What operators must do: how often, at which length, within which time; and the named errors of planning (pure)."""

import math
from dataclasses import dataclass

# Demands beyond this number of GPUs are a fault, not a plan.
MOST_GPUS = 1 << 16


class PlanError(ValueError):
    """No plan exists for a demand."""


class SloBelowServiceError(PlanError):
    """The objective is below the time of one pass that never waits."""


class MemoryTooSmallError(PlanError):
    """The weights or the KV of an operator do not fit into the GPUs."""


class TooFewGpusError(PlanError):
    """The GPUs that are there do not carry the demand."""


class BadCostError(PlanError):
    """A time, a size or a traffic of an operator is NaN, infinite or negative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Passes of one phase that the operators must carry.

    Attributes:
        passes_per_s: prefill: prompts per second; decode: output tokens per second of all sequences together. 0: none.
        length_tokens: prefill: new tokens of a prompt; decode: tokens of context of a sequence.
        slo_s: prefill: objective of the TTFT; decode: objective of the time between tokens. The mean latency of a pass
            must not be above it (Eq. 3 has means, so it is an objective of the mean).

    Raises:
        PlanError: a number is NaN, infinite, negative, or a length or an objective is 0.
    """

    passes_per_s: float
    length_tokens: int
    slo_s: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.passes_per_s < math.inf:
            raise PlanError(f"passes_per_s is {self.passes_per_s}: give a number from 0")
        if not 0 < self.length_tokens < math.inf:
            raise PlanError(f"length_tokens is {self.length_tokens}: give 1 or more")
        if not 0.0 < self.slo_s < math.inf:
            raise PlanError(f"slo_s is {self.slo_s}: give a number of seconds above 0")
