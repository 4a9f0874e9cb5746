"""Operators that move and change elements, each by itself or within its row (pure)."""

from dataclasses import dataclass

from autoscale.operators.kinds import ELEMENT_BYTES, Pass, Unit, Work, count, divisors

_WIDE = ELEMENT_BYTES["bf16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointwise:
    """An operator that moves and changes elements: norm, rotary embedding, activation, embedding, sampler.

    Attributes:
        table: name of its curve in measured tables.
        reads, writes: elements for each row of the batch, over all ranks.
        is_split: whether ranks divide its elements; otherwise each rank computes all of them.
        element_bytes: bytes of one element; samplers read float32.
        sizes: elements whose number a rank must divide evenly, such as heads; empty: any.
    """

    name: str
    copies: int
    table: str
    reads: int
    writes: int
    flops_per_element: float
    is_split: bool
    unit: Unit = Unit.TOKEN
    merge: int = 1
    weights: int = 0
    element_bytes: float = _WIDE
    sizes: tuple[int, ...] = ()

    @property
    def weight_bytes(self) -> float:
        """As ``Operator`` says."""
        return self.weights * _WIDE

    def parallel_sizes(self) -> tuple[int, ...]:
        """As ``Operator`` says."""
        return divisors(*self.sizes)

    def rank_width(self, parallel: int) -> float:
        """Elements that one rank reads and writes for each row."""
        return (self.reads + self.writes) / (parallel if self.is_split else 1)

    def work(self, step: Pass, parallel: int) -> Work:
        """As ``Operator`` says."""
        elements = count(step, self.unit, self.merge) * self.rank_width(parallel)
        return Work(flops=elements * self.flops_per_element, traffic_bytes=elements * self.element_bytes)

    def output_bytes(self, step: Pass) -> float:
        """As ``Operator`` says."""
        return count(step, self.unit, self.merge) * self.writes * self.element_bytes

    def input_bytes(self, step: Pass) -> float:
        """As ``Operator`` says."""
        return count(step, self.unit, self.merge) * self.reads * self.element_bytes
