"""The operators of a model in the order of one pass, from its shape (pure).

Equal layers are one class: an operator stands for its copies in all of them. Norms include the addition of the
residual, as engines fuse both.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autoscale.operators.decoder import decoder_operators
from autoscale.operators.kinds import ELEMENT_BYTES, Operator
from autoscale.operators.model_shape import ModelConfigError, ModelShape, model_shape
from autoscale.operators.vision import vision_operators


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorPrecision:
    """Types of the weights of linear layers and of the KV cache: bf16, fp8 or fp32.

    With fp8, embeddings, the LM head, norms and the router stay in bf16, as in the quantised checkpoints that engines
    load.
    """

    weights: str = "bf16"
    kv: str = "bf16"

    def __post_init__(self) -> None:
        for dtype in (self.weights, self.kv):
            if dtype not in ELEMENT_BYTES:
                raise ModelConfigError(f"data type {dtype!r} is not known: give one of {', '.join(ELEMENT_BYTES)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorGraph:
    """A model's operators in the order of one pass. The order is the critical path: each needs the one before it."""

    shape: ModelShape
    precision: OperatorPrecision
    operators: tuple[Operator, ...]

    @property
    def weights(self) -> int:
        """Parameters of the model; a tied LM head is the embedding."""
        return sum(each.weights * each.copies for each in self.operators)

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights, over all GPUs; a tied LM head is the embedding."""
        return sum(each.weight_bytes * each.copies for each in self.operators)

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of K and V of one token in all layers, over all GPUs, without copies of heads."""
        return self.shape.kv_elements_per_token * ELEMENT_BYTES[self.precision.kv]

    def parallel_sizes(self) -> tuple[int, ...]:
        """Tensor parallel sizes that all operators allow, ascending."""
        common = set.intersection(*(set(each.parallel_sizes()) for each in self.operators))
        return tuple(sorted(common))


def operator_graph(config: Mapping[str, Any], precision: OperatorPrecision | None = None) -> OperatorGraph:
    """The operators of the model that a config.json describes; precision is bf16 where it is left out.

    Raises:
        UnknownArchitectureError, ModelConfigError: as ``model_shape``.
    """
    shape, precision = model_shape(config), precision or OperatorPrecision()
    operators = (*vision_operators(shape), *decoder_operators(shape, precision.weights, precision.kv))
    return OperatorGraph(shape=shape, precision=precision, operators=operators)
