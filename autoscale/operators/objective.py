"""The objective of a demand for which none was given (pure)."""

from dataclasses import dataclass

from autoscale.operators.costs import OperatorCosts
from autoscale.operators.demand import MemoryTooSmallError
from autoscale.operators.gpu import Gpu
from autoscale.operators.options import MEMORY_FRAC

# The objective is this multiple of a pass that never waits. `make operators-savings` uses the same.
DEFAULT_FACTOR = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """An objective of latency, and how it came about.

    ``parallel``: GPUs of the pass of which it is a multiple; None: it was given.
    """

    slo_s: float
    parallel: int | None = None


def smallest_group(costs: OperatorCosts, gpu: Gpu, length_tokens: int) -> int:
    """The smallest tensor parallel size that all operators have and that holds the weights and one request.

    Raises:
        MemoryTooSmallError: no size holds them.
    """
    sizes = sorted(set.intersection(*(set(costs.parallel_sizes(name)) for name in costs.names)))
    weights = sum(costs.weight_bytes(name) for name in costs.names)
    for size in sizes:
        at = {"parallel": size, "length_tokens": length_tokens, "batch": 1}
        needed = weights + max(costs.transient_bytes(name, **at) for name in costs.names)
        if needed <= size * MEMORY_FRAC * gpu.memory_bytes:
            return size
    raise MemoryTooSmallError(
        f"the weights take {weights / 1e9:.4g} GB, and {sizes[-1]} {gpu.name}, the largest group, have "
        f"{sizes[-1] * MEMORY_FRAC * gpu.memory_bytes / 1e9:.4g} GB for them: use larger GPUs, or fp8 weights"
    )


def default_objective(costs: OperatorCosts, gpu: Gpu, length_tokens: int) -> Objective:
    """``DEFAULT_FACTOR`` passes of one request that never waits, on the smallest group that holds the model.

    Raises:
        MemoryTooSmallError: as ``smallest_group``.
    """
    size = smallest_group(costs, gpu, length_tokens)
    at = {"parallel": size, "length_tokens": length_tokens, "batch": 1}
    return Objective(slo_s=DEFAULT_FACTOR * sum(costs.time_s(name, **at) for name in costs.names), parallel=size)
