"""What an operator does to a GPU while it runs, and the kind of kernel that it is (pure)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from types import MappingProxyType

from autoscale.operators.costs import Phase


class Kind(StrEnum):
    """Kinds of operators whose kernels load a GPU in one way."""

    PRODUCT = "product"  # a matrix product: QKV, O, gate/up, down, experts, LM head
    PREFILL_ATTENTION = "prefill_attention"
    DECODE_ATTENTION = "decode_attention"
    NORM = "norm"
    POINTWISE = "pointwise"  # rotary, activation, embedding, sampler and others without a product


# Parts of the names of operators that tell their kind; a name with none of them is a product, which loads a GPU most.
_NAME_PARTS: Mapping[str, Kind] = MappingProxyType(
    {
        "norm": Kind.NORM,
        "rotary": Kind.POINTWISE,
        "rope": Kind.POINTWISE,
        "activation": Kind.POINTWISE,
        "silu": Kind.POINTWISE,
        "embed": Kind.POINTWISE,
        "sampler": Kind.POINTWISE,
        "residual": Kind.POINTWISE,
        "expert_choice": Kind.POINTWISE,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """An operator at one size.

    Attributes:
        tokens: tokens that one service computes: batch x length in prefill, batch in decode.
        bandwidth_frac: share of the memory's bandwidth that it takes while it runs alone, 0 to 1.
    """

    name: str
    phase: Phase
    tokens: int
    bandwidth_frac: float

    @property
    def kind(self) -> Kind:
        """Its kind, from its name and its phase."""
        return _kind(self.name, self.phase)


@lru_cache(maxsize=1024)  # planners ask thousands of times for a few names
def _kind(name: str, phase: Phase) -> Kind:
    if is_attention(name):
        return Kind.PREFILL_ATTENTION if phase is Phase.PREFILL else Kind.DECODE_ATTENTION
    return next((kind for part, kind in _NAME_PARTS.items() if part in name), Kind.PRODUCT)


def is_attention(name: str) -> bool:
    """Whether an operator is attention itself, and not its norm or its all-reduce."""
    return "attention" in name and "norm" not in name and "all_reduce" not in name


def holds_kv(name: str) -> bool:
    """Whether an operator keeps the KV of the requests in the model; a vision encoder keeps none."""
    return is_attention(name) and not name.startswith("vision")


@lru_cache(maxsize=4096)
def nearest_size(tokens: float, sizes: tuple[int, ...]) -> int:
    """The size of a table that is nearest to ``tokens`` by ratio."""
    return min(sizes, key=lambda size: abs(math.log(size / max(tokens, 1.0))))
