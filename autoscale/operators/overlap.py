"""Dual batch overlap: from how many tokens on two half batches hide the exchanges between ranks (pure).

One half of the batch exchanges while the other half computes. A step then takes the longer of all arithmetic and all
exchanges of both halves. Half batches use the GPU less well, so small batches lose.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from autoscale.operators.collective import Collective
from autoscale.operators.graph import OperatorGraph
from autoscale.operators.kinds import Pass
from autoscale.operators.step_times import StepTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """What two half batches give.

    Attributes:
        threshold_tokens: the smallest step that becomes shorter; ``None``: none does.
        exchange_frac: share of the exchanges in the largest step.
        saved_frac: share of the largest step that is saved; below 0: it takes longer.
    """

    threshold_tokens: int | None
    exchange_frac: float
    saved_frac: float


def overlap(graph: OperatorGraph, steps: StepTimes, pass_of: Callable[[int], Pass], tokens: Iterable[int]) -> Overlap:
    """The effect on steps of these sizes, ascending. ``pass_of``: the step of a number of tokens, in whole requests."""
    exchanges = {each.name for each in graph.operators if isinstance(each, Collective)}
    threshold, exchange_frac, saved_frac = None, 0.0, 0.0
    for size in tokens:
        whole, half = steps.parts(pass_of(size)), steps.parts(pass_of(size // 2))
        exchange_s = 2.0 * sum(seconds for name, seconds in half.items() if name in exchanges)
        compute_s = 2.0 * sum(half.values()) - exchange_s
        whole_s = sum(whole.values())
        exchange_frac = sum(seconds for name, seconds in whole.items() if name in exchanges) / whole_s
        saved_frac = 1.0 - max(compute_s, exchange_s) / whole_s
        if saved_frac > 0.0 and threshold is None:
            threshold = size
    return Overlap(threshold_tokens=threshold, exchange_frac=exchange_frac, saved_frac=saved_frac)
