"""Exchanges between the GPUs of one replica (pure)."""

from dataclasses import dataclass

from autoscale.operators.kinds import ELEMENT_BYTES, PARALLEL_SIZES, Pass, Unit, Work, count

_WIDE = ELEMENT_BYTES["bf16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """An exchange between the ranks: of ``elements`` for each row; there is none on one GPU.

    ``adds``: whether ranks add up their parts (all-reduce); otherwise each rank sends its part to all (all-gather).
    """

    name: str
    copies: int
    elements: int
    adds: bool = True
    unit: Unit = Unit.TOKEN
    merge: int = 1
    weights: int = 0
    weight_bytes: float = 0.0

    def parallel_sizes(self) -> tuple[int, ...]:
        """As ``Operator`` says."""
        return PARALLEL_SIZES

    def message_bytes(self, step: Pass) -> float:
        """Bytes of the whole message."""
        return _WIDE * count(step, self.unit, self.merge) * self.elements

    def work(self, step: Pass, parallel: int) -> Work:
        """Bytes that one rank sends over its link: twice for an all-reduce, which spreads and collects parts."""
        share = (parallel - 1) / parallel * (2.0 if self.adds else 1.0)
        return Work(flops=0.0, traffic_bytes=share * self.message_bytes(step))

    def output_bytes(self, step: Pass) -> float:
        """As ``Operator`` says."""
        return self.message_bytes(step)

    def input_bytes(self, step: Pass) -> float:
        """As ``Operator`` says."""
        return self.message_bytes(step)
