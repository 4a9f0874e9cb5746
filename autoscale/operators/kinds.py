"""What one operator computes, reads and holds, by its kind; shapes are of the whole model (pure).

All operators share one set of methods (``Operator``). ``parallel`` is the tensor parallel size. FLOPs and bytes are
those of one copy on one rank, for an ideal kernel: each input is read once, each output is written once.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

# Largest tensor parallel size: the GPUs of one node, which share fast links.
MOST_PARALLEL = 8
PARALLEL_SIZES = tuple(1 << power for power in range(MOST_PARALLEL.bit_length()))

# Bytes of an element by data type.
ELEMENT_BYTES = {"bf16": 2.0, "fp8": 1.0, "fp32": 4.0}


def wide_dtype(dtype: str) -> str:
    """The type of what is not quantised, in a model whose linear layers have weights of ``dtype``."""
    return "bf16" if dtype == "fp8" else dtype


class Unit(StrEnum):
    """What an operator computes one row for."""

    TOKEN = "token"  # noqa: S105 (no password)
    SEQUENCE = "sequence"  # each sequence that gets a token
    PATCH = "patch"  # of an image, before patches are merged


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """What one pass through the model computes: prompts or chunks of prompts, and sequences that decode.

    Attributes:
        prompts: prompts, each with ``new_tokens`` to compute after ``past_tokens`` that were computed before.
        decoding: sequences that get one new token, each with ``context_tokens`` in the KV cache.
        image_tokens: tokens of each prompt that come from an image (``merge`` x ``merge`` patches each).
    """

    prompts: int = 0
    new_tokens: int = 0
    past_tokens: float = 0.0
    decoding: int = 0
    context_tokens: float = 0.0
    image_tokens: int = 0

    @property
    def tokens(self) -> int:
        """New tokens of all sequences."""
        return self.prompts * self.new_tokens + self.decoding

    @property
    def sequences(self) -> int:
        """Sequences that get a token: an engine computes the logits of each prompt's last token."""
        return self.prompts + self.decoding


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """FLOPs and memory traffic of one copy on one rank."""

    flops: float
    traffic_bytes: float


class Operator(Protocol):
    """One operator of a model; it stands for ``copies`` equal ones, most often one in each layer."""

    @property
    def name(self) -> str:
        """Its name, as in the model's graph."""
        ...

    @property
    def copies(self) -> int:
        """How often one pass computes it."""
        ...

    @property
    def weights(self) -> int:
        """Parameters of one copy; 0 where another operator holds them."""
        ...

    @property
    def weight_bytes(self) -> float:
        """Bytes of the weights of one copy, over all ranks."""
        ...

    def parallel_sizes(self) -> tuple[int, ...]:
        """Tensor parallel sizes that its shape allows, ascending."""
        ...

    def work(self, step: Pass, parallel: int) -> Work:
        """FLOPs and bytes of one copy on one rank."""
        ...

    def output_bytes(self, step: Pass) -> float:
        """Bytes that one copy sends to the next operator, over all ranks."""
        ...

    def input_bytes(self, step: Pass) -> float:
        """Bytes of activations that one copy reads, over all ranks, without weights and KV."""
        ...


def count(step: Pass, unit: Unit, merge: int = 1) -> int:
    """Rows that an operator computes in a pass; ``merge``: patches of an image side that become one token."""
    if unit is Unit.PATCH:
        return step.prompts * min(step.image_tokens, step.new_tokens) * merge**2
    return step.tokens if unit is Unit.TOKEN else step.sequences


def divisors(*sizes: int) -> tuple[int, ...]:
    """Tensor parallel sizes that divide all sizes."""
    return tuple(size for size in PARALLEL_SIZES if not any(each % size for each in sizes))
