"""Experts on ranks of their own: how much the busiest rank does, and copies of experts that even it out (pure).

With tensor parallelism each rank holds a share of every expert, so ranks always do the same. With expert parallelism a
rank holds whole experts, and all ranks wait for the one whose experts got most tokens.
"""

import math

from autoscale.operators.model_shape import Experts

# Expected largest of so many draws from a normal distribution, in standard deviations (tables of order statistics).
_LARGEST = {1: 0.0, 2: 0.564, 4: 1.029, 8: 1.424, 16: 1.766, 32: 2.070}


def chance_load(experts: Experts, tokens: float, ranks: int) -> float:
    """Work of the busiest rank as a multiple of the mean, where tokens choose all experts alike.

    A rank gets a binomial number of the ``tokens * per_token`` choices. The largest of them is taken as normal.
    """
    choices = max(1.0, tokens * experts.per_token)
    size = min(_LARGEST, key=lambda each: abs(each - ranks))
    return 1.0 + _LARGEST[size] * math.sqrt((ranks - 1.0) / choices)


def expert_load(experts: Experts, tokens: float, ranks: int, skew: float) -> float:
    """As ``chance_load``, where one expert is chosen ``skew`` times as often as the mean one."""
    per_rank = experts.count / ranks
    return chance_load(experts, tokens, ranks) + (skew - 1.0) / per_rank


def redundant_experts(ranks: int, skew: float) -> int:
    """Copies of experts in all, so that no copy gets more than a mean expert; each rank holds equally many.

    vLLM's ``num_redundant_experts``: the busiest expert needs ``skew`` copies, itself included.
    """
    more = math.ceil(skew - 1e-9) - 1
    return math.ceil(more / ranks) * ranks
