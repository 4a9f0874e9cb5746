"""The experts of a sparse layer, computed as one grouped operator (pure)."""

from dataclasses import dataclass

from autoscale.operators.kinds import ELEMENT_BYTES, Pass, Work, divisors

_WIDE = ELEMENT_BYTES["bf16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedExperts:
    """Gate, up and down of all experts; each token is computed by ``per_token`` of ``experts``.

    With ``parallel`` ranks each rank holds a share of the width of every expert.
    """

    name: str
    copies: int
    experts: int
    per_token: int
    hidden: int
    intermediate: int
    dtype: str

    @property
    def weights(self) -> int:
        """As ``Operator`` says."""
        return 3 * self.experts * self.hidden * self.intermediate

    @property
    def weight_bytes(self) -> float:
        """As ``Operator`` says."""
        return self.weights * ELEMENT_BYTES[self.dtype]

    def parallel_sizes(self) -> tuple[int, ...]:
        """As ``Operator`` says."""
        return divisors(self.intermediate)

    def active_experts(self, tokens: int) -> float:
        """Expected number of experts that at least one token uses, where tokens choose them evenly."""
        return self.experts * (1.0 - (1.0 - self.per_token / self.experts) ** tokens)

    def work(self, step: Pass, parallel: int) -> Work:
        """FLOPs of the chosen experts; only weights of experts in use are read."""
        tokens, width = step.tokens, self.intermediate // parallel
        rows = tokens * self.per_token
        weights = 3.0 * self.active_experts(tokens) * self.hidden * width * ELEMENT_BYTES[self.dtype]
        return Work(
            flops=6.0 * rows * self.hidden * width,
            traffic_bytes=weights + _WIDE * rows * (2 * self.hidden + 3 * width),
        )

    def output_bytes(self, step: Pass) -> float:
        """As ``Operator`` says."""
        return _WIDE * step.tokens * self.hidden

    def input_bytes(self, step: Pass) -> float:
        """As ``Operator`` says."""
        return _WIDE * step.tokens * self.hidden
