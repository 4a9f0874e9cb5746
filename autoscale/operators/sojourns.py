"""Sojourn times of options if each replica has GPUs of its own, and what first options are chosen by (pure)."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autoscale.operators.evaluation import Assumptions
from autoscale.operators.options import OperatorOptions, OptionTable
from autoscale.operators.queueing import batch_rate, wait_s

Floats = NDArray[np.float64]


def sojourn_s(table: OptionTable, one: OperatorOptions, replicas: int | NDArray[np.int64], wait: Assumptions) -> Floats:
    """S_v = T_v + W_v of every option of an operator; infinite where a number of replicas is not stable."""
    rates = batch_rate(table.demand.passes_per_s, one.batch)
    return one.time_s + wait_s(replicas, rates, one.time_s, wait.wait)


@dataclass(frozen=True, slots=True, kw_only=True)
class Queues:
    """Sojourn times by operator and replicas, kept since steps ask for them again and again."""

    table: OptionTable
    assumptions: Assumptions
    kept: dict[tuple[int, int], Floats] = field(default_factory=dict)

    def sojourns_s(self, place: int, replicas: int) -> Floats:
        """As ``sojourn_s``."""
        key = place, replicas
        if key not in self.kept:
            self.kept[key] = sojourn_s(self.table, self.table.operators[place], replicas, self.assumptions)
        return self.kept[key]


def by_sojourn(one: OperatorOptions, sojourns_s: Floats) -> Floats:
    """Line 5 of Algorithm 1: the least sojourn time at the fewest replicas."""
    return sojourns_s


def by_gpu_time(one: OperatorOptions, sojourns_s: Floats) -> Floats:
    """The least GPU time for each request, which in decode is that of a large batch."""
    return one.gpu_s


# What the first option of an operator is chosen by, from its options and their sojourn times; the least is taken.
Seed = Callable[[OperatorOptions, Floats], Floats]
