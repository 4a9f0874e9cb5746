"""Linear operators: products of a batch with a matrix of weights (pure)."""

from dataclasses import dataclass

from autoscale.operators.kinds import ELEMENT_BYTES, PARALLEL_SIZES, Pass, Unit, Work, count, divisors

_WIDE = ELEMENT_BYTES["bf16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemm:
    """A linear operator: ``columns`` outputs of ``rows`` inputs for each row of the batch.

    Attributes:
        splits_rows: whether ranks divide the inputs, and add up their outputs afterwards; else they divide outputs.
        kv_heads: for QKV, its KV heads: a rank holds at least one, so few heads are copied. Their outputs are not in
            ``columns``. 0: the operator is not QKV.
        is_split: whether ranks divide it at all; the router of experts is computed by each.
        is_tied: whether its weights are those of the embedding, which holds them.
    """

    name: str
    copies: int
    columns: int
    rows: int
    dtype: str
    unit: Unit = Unit.TOKEN
    merge: int = 1
    splits_rows: bool = False
    kv_heads: int = 0
    head_dim: int = 0
    has_bias: bool = False
    is_split: bool = True
    is_tied: bool = False

    def rank_shape(self, parallel: int) -> tuple[int, int]:
        """(n, k) on one rank: outputs and inputs for each row."""
        if not self.is_split:
            return self.columns, self.rows
        if self.splits_rows:
            return self.columns, self.rows // parallel
        kv = 2 * max(1, self.kv_heads // parallel) * self.head_dim if self.kv_heads else 0
        # Engines pad the vocabulary, so outputs need not be divisible.
        return -(-self.columns // parallel) + kv, self.rows

    @property
    def _all_columns(self) -> int:
        return self.columns + 2 * self.kv_heads * self.head_dim

    @property
    def weights(self) -> int:
        """As ``Operator`` says."""
        return 0 if self.is_tied else self._all_columns * self.rows + (self._all_columns if self.has_bias else 0)

    @property
    def weight_bytes(self) -> float:
        """As ``Operator`` says."""
        return self.weights * ELEMENT_BYTES[self.dtype]

    def parallel_sizes(self) -> tuple[int, ...]:
        """As ``Operator`` says."""
        if not self.is_split or self.unit is Unit.SEQUENCE:
            return PARALLEL_SIZES
        if self.kv_heads:
            heads = self.columns // self.head_dim
            return tuple(size for size in divisors(heads) if not (self.kv_heads % size and size % self.kv_heads))
        return divisors(self.rows if self.splits_rows else self.columns)

    def work(self, step: Pass, parallel: int) -> Work:
        """As ``Operator`` says."""
        m = count(step, self.unit, self.merge)
        n, k = self.rank_shape(parallel)
        narrow = ELEMENT_BYTES[self.dtype]
        return Work(flops=2.0 * m * n * k, traffic_bytes=narrow * (m * k + n * k) + _WIDE * m * n)

    def output_bytes(self, step: Pass) -> float:
        """As ``Operator`` says."""
        return _WIDE * count(step, self.unit, self.merge) * self._all_columns

    def input_bytes(self, step: Pass) -> float:
        """As ``Operator`` says."""
        return _WIDE * count(step, self.unit, self.merge) * self.rows
