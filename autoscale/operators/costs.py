"""What a planner may know about the operators of one model in one phase on one GPU type (pure)."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class Phase(StrEnum):
    """Prefill computes whole prompts; decode computes one new token of each sequence."""

    PREFILL = "prefill"
    DECODE = "decode"


class SourceKind(StrEnum):
    """How a time came about, from the best to the worst."""

    MEASURED = "measured"  # the very point is in a table
    INTERPOLATED = "interpolated"  # between points of a table of this GPU
    EXTRAPOLATED = "extrapolated"  # beyond the points of a table of this GPU
    ROOFLINE = "roofline"  # no table of this GPU has the operator: computed from its work


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSource:
    """Where a time comes from: its kind, and the table or the formula in words."""

    kind: SourceKind
    text: str


class OperatorCosts(Protocol):
    """Times, memory and traffic of the operators of one model in one phase on one GPU type.

    Shapes: in prefill, a pass computes ``batch`` prompts of ``length_tokens`` new tokens each. In decode, it computes
    one new token of each of ``batch`` sequences, each with ``length_tokens`` tokens of context.
    ``parallel`` is the tensor parallel size. Source: the paper's section 4.1, operator attributes.
    """

    @property
    def names(self) -> tuple[str, ...]:
        """The operators in the order of one pass; each stands for its copies in all layers."""
        ...

    def parallel_sizes(self, name: str) -> tuple[int, ...]:
        """Tensor parallel sizes that the operator's shape allows, ascending."""
        ...

    def time_s(self, name: str, *, parallel: int, length_tokens: int, batch: int) -> float:
        """T_v(P, L, B): seconds of one pass through all copies of the operator (copies x time of one copy)."""
        ...

    def weight_bytes(self, name: str) -> float:
        """Bytes of the weights of all copies, over all GPUs; ``parallel`` does not change it."""
        ...

    def transient_bytes(self, name: str, *, parallel: int, length_tokens: int, batch: int) -> float:
        """Bytes of activations, one copy at a time, and of KV in all layers for attention; over all GPUs."""
        ...

    def output_bytes(self, name: str, *, length_tokens: int, batch: int) -> float:
        """Bytes that one copy sends to the next operator."""
        ...

    def copies(self, name: str) -> int:
        """How often one pass computes the operator, most often the number of layers."""
        ...

    def source(self, name: str, *, parallel: int, length_tokens: int, batch: int) -> TimeSource:
        """Where ``time_s`` of the same arguments comes from."""
        ...
