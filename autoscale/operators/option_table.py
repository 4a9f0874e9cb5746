"""Builds the table of options from the costs of operators, and refuses costs that are wrong (pure).

Operators that take no time on one GPU are collectives. They have no replicas of their own: their time is added to the
operator before them, whose tensor parallel size they follow.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoscale.operators.activity import Activity, holds_kv
from autoscale.operators.costs import OperatorCosts, Phase
from autoscale.operators.demand import BadCostError, Demand, MemoryTooSmallError, PlanError
from autoscale.operators.gpu import Gpu
from autoscale.operators.options import Limits, OperatorOptions, OptionTable
from autoscale.operators.sm_shares import SmShares


def option_table(
    costs: OperatorCosts,
    *,
    demand: Demand,
    phase: Phase,
    gpu: Gpu,
    limits: Limits,
    shares: SmShares | None = None,
    edges: tuple[tuple[str, str], ...] = (),
) -> OptionTable:
    """The table of a model at one demand; with ``shares``, each operator gets the least share of SMs it needs (MPS).

    Raises:
        BadCostError: a cost is NaN, infinite or negative; the message names operator and point.
        MemoryTooSmallError: no option of an operator fits into the memory of its GPUs.
        PlanError: no size of parallelism or batch is left.
    """
    if not limits.batches or limits.batches[0] < 1:
        raise PlanError(f"batch sizes are {limits.batches}: give 1 or more")
    followers = _followers(costs, demand.length_tokens)
    heads = [name for name in costs.names if name not in followers]
    if not heads:
        raise PlanError("all operators take no time: there is nothing to plan")
    if not demand.passes_per_s:
        limits = Limits(batches=(1,), most_parallel=limits.most_parallel)  # a batch of two would never be full
    builder = _Builder(costs=costs, demand=demand, phase=phase, gpu=gpu, limits=limits, shares=shares)
    operators = []
    for name in heads:
        tail = [one for one in followers if followers[one] == name]
        operators.append(builder.options([name, *tail]))
    merged = tuple((followers.get(a, a), followers.get(b, b)) for a, b in edges)
    table = OptionTable(
        demand=demand,
        phase=phase,
        gpu=gpu,
        operators=tuple(operators),
        edges=tuple((a, b) for a, b in merged if a != b),
    )
    for one in table.operators:
        least = min(one.gpu_bytes(option, 1.0) for option in range(len(one.batch)))
        if least > table.memory_bytes:
            raise MemoryTooSmallError(
                f"operator {one.name} needs {least / 1e9:.3g} GB on each of {one.parallel.max()} GPUs, and one "
                f"{gpu.name} has {table.memory_bytes / 1e9:.3g} GB for it: raise the largest tensor parallel size"
            )
    return table


def _followers(costs: OperatorCosts, length_tokens: int) -> dict[str, str]:
    """Collectives, by name, with the operator that they follow."""
    found: dict[str, str] = {}
    head = ""
    for name in costs.names:
        is_free = costs.time_s(name, parallel=1, length_tokens=length_tokens, batch=1) == 0.0
        if is_free and head and 1 in costs.parallel_sizes(name):
            found[name] = head
        else:
            head = name
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    """What one option of an operator costs, as ``OperatorOptions`` says."""

    time_s: float
    transient_bytes: float
    kv_bytes: float
    transfer_s: float
    activity: Activity


@dataclass(frozen=True, slots=True, kw_only=True)
class _Builder:
    """What is the same for all operators of a table."""

    costs: OperatorCosts
    demand: Demand
    phase: Phase
    gpu: Gpu
    limits: Limits
    shares: SmShares | None

    def options(self, names: Sequence[str]) -> OperatorOptions:
        """The options of an operator and the collectives that follow it."""
        head = names[0]
        allowed = set.intersection(*(set(self.costs.parallel_sizes(name)) for name in names))
        sizes = sorted(size for size in allowed if size <= self.limits.most_parallel)
        if not sizes:
            raise PlanError(f"operator {head} has no tensor parallel size up to {self.limits.most_parallel}")
        weight = sum(_checked(self.costs.weight_bytes(name), name, "weight_bytes") for name in names)
        options = [(parallel, batch) for parallel in sizes for batch in self.limits.batches]
        points = [self._point(names, weight, parallel, batch) for parallel, batch in options]
        parallels, batches = (np.array(column, dtype=np.int64) for column in zip(*options, strict=True))
        percents = [self._share_percent(one.activity) for one in points]
        times = [one.time_s * self._slowdown(one.activity, at) for one, at in zip(points, percents, strict=True)]
        return OperatorOptions(
            name=head,
            parallel=parallels,
            batch=batches,
            sm_share_percent=np.array(percents, dtype=np.int64),
            time_s=np.array(times),
            gpu_s=parallels * np.array(times) / batches,
            weight_bytes=weight,
            transient_bytes=np.array([one.transient_bytes for one in points]),
            kv_bytes=np.array([one.kv_bytes for one in points]),
            transfer_s=np.array([one.transfer_s for one in points]),
            activities=tuple(one.activity for one in points),
        )

    def _point(self, names: Sequence[str], weight: float, parallel: int, batch: int) -> _Point:
        head, last, length = names[0], names[-1], self.demand.length_tokens
        where = f"parallel {parallel}, length_tokens {length}, batch {batch}"
        at = {"parallel": parallel, "length_tokens": length}
        seconds = sum(_checked(self.costs.time_s(name, **at, batch=batch), name, where) for name in names)
        transient, more = (
            _checked(self.costs.transient_bytes(head, **at, batch=size), head, where) for size in (batch, batch + 1)
        )
        output = _checked(self.costs.output_bytes(last, length_tokens=length, batch=batch), last, where)
        traffic_s = (weight + transient) / parallel / self.gpu.memory_bytes_per_s
        return _Point(
            time_s=seconds,
            transient_bytes=transient,
            kv_bytes=max(0.0, more - transient) if holds_kv(head) else 0.0,
            transfer_s=self.costs.copies(last) * output / parallel / self.gpu.link_bytes_per_s,
            activity=Activity(
                name=head,
                phase=self.phase,
                tokens=batch * length if self.phase is Phase.PREFILL else batch,
                bandwidth_frac=min(1.0, traffic_s / seconds) if seconds > 0.0 else 0.0,
            ),
        )

    def _share_percent(self, activity: Activity) -> int:
        return 100 if self.shares is None else self.shares.least_share_percent(activity)

    def _slowdown(self, activity: Activity, percent: int) -> float:
        return 1.0 if self.shares is None else max(1.0, self.shares.slowdown(activity, percent))


def _checked(value: float, name: str, where: str) -> float:
    if not 0.0 <= value < math.inf:
        raise BadCostError(f"operator {name}, {where}: the value is {value}: it must be a number from 0")
    return value
