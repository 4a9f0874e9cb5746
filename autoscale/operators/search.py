"""Our search: sizing and placement together, by a price on GPU time (pure).

The paper sizes operators as if each replica had GPUs of its own, and then packs them. Packing adds waits that sizing
did not know. This search starts from the GPUs instead. For a number of GPUs and a busy share rho that all of them have,
the latency of an operator is T_v (1 + wait(R_v, rho)) with as many replicas as there is room for, so operators only
compete for GPU time. A price on GPU time (a Lagrange multiplier) makes the best option of each operator a choice of its
own: the least of latency + price x GPU-seconds. A few busy shares and prices give a few choices, each judged by
``evaluate``. The number of GPUs is found by doubling and halving, below those of the greedy plan and of model
instances; the better one of these is taken if nothing better is found. At the end, replicas that the objective does not
need are removed, the largest weights first, which saves memory.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autoscale.operators.demand import MOST_GPUS, MemoryTooSmallError, PlanError, TooFewGpusError
from autoscale.operators.evaluation import Assumptions, Choice, Evaluation, evaluate
from autoscale.operators.greedy import fewest_gpus
from autoscale.operators.joint_sizing import load_frac
from autoscale.operators.layout import Layout
from autoscale.operators.model_level import plan_model_level
from autoscale.operators.options import OptionTable
from autoscale.operators.packing import full_layouts
from autoscale.operators.plan import Plan
from autoscale.operators.queueing import fill_s
from autoscale.operators.sizing import check_slo
from autoscale.operators.spare_replicas import without_spare_replicas

Floats = NDArray[np.float64]

# Busy shares of the GPUs that are tried, and prices of a GPU-second in seconds of latency. The gap to the oracle does
# not fall with twice as many of each (tests/lab/operators/gap.py).
_BUSY = np.array([0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.72, 0.78, 0.83, 0.87, 0.9, 0.925, 0.95, 0.97, 0.985])
_PRICES = np.concatenate([[0.0], np.geomspace(0.01, 100.0, 13)])
# An estimate may be this much above the objective, since it is made at the next higher of the busy shares.
_ROUNDING = 1.2
# Choices that are judged for each number of GPUs: those with the least estimated latency. Estimates count contention on
# average, so the best choice may be some places behind.
_JUDGED = 16


def plan_search(table: OptionTable, assumptions: Assumptions, *, most_gpus: int = MOST_GPUS) -> Plan:
    """``fewest_searched_gpus``, without the replicas that the objective does not need; raises as it."""
    plan = fewest_searched_gpus(table, assumptions, most_gpus=most_gpus)
    return without_spare_replicas(plan, assumptions)


def fewest_searched_gpus(table: OptionTable, assumptions: Assumptions, *, most_gpus: int = MOST_GPUS) -> Plan:
    """The fewest GPUs that this search finds, with as many replicas as they hold.

    Raises:
        SloBelowServiceError: the objective is below the time of one pass that never waits.
        MemoryTooSmallError: no layout on ``most_gpus`` GPUs holds the weights.
        TooFewGpusError: no layout on ``most_gpus`` GPUs keeps the objective.
    """
    check_slo(table, table.demand.slo_s)
    rate = table.demand.passes_per_s
    pairs = zip(table.operators, table.least_replicas, strict=True)
    works = sum(rate * float(one.gpu_s[least > 0].min()) for one, least in pairs)
    sizes = [at for one in table.operators for at in (one.activities[0], one.activities[-1])]
    at_once = assumptions.contention.taken_fracs(sizes)
    first = max(1, int(works * min(1.0, float(at_once.min()))))
    found: dict[int, Plan | None] = {}

    def at(gpus: int) -> Plan | None:
        if gpus not in found:
            found[gpus] = best_on(table, assumptions, gpus)
        return found[gpus]

    known = _known_plan(table, assumptions)
    last = most_gpus if known is None else min(most_gpus, known.gpus - 1)
    if known is None:
        high = _first_true(lambda gpus: at(gpus) is not None, first, last)
    else:  # most often one GPU less is too few already
        high = _first_true_down(lambda gpus: at(gpus) is not None, first, last)
    plan = at(high) if high is not None else known
    if plan is not None and plan.gpus > most_gpus:
        plan = None
    if plan is None:
        if next(full_layouts(table, _smallest(table), most_gpus), None) is None:
            raise MemoryTooSmallError(f"{most_gpus} {table.gpu.name} GPUs do not hold the weights of all operators")
        raise TooFewGpusError(f"{most_gpus} GPUs do not keep {table.demand.slo_s:.4g} s at {rate:.4g} passes/s")
    return replace(plan, planner="search")


def _known_plan(table: OptionTable, assumptions: Assumptions) -> Plan | None:
    """The greedy plan, or model instances where these need fewer GPUs: operators may be placed like that as well.

    None: neither keeps the objective. Both start from one batch and one parallel size, which may not be possible.
    """
    known: Plan | None = None
    with suppress(PlanError):
        known = fewest_gpus(table, assumptions)
    with suppress(PlanError):
        whole = plan_model_level(table, assumptions, None if known is None else known.gpus - 1)
        judged = evaluate(table, whole.choice, whole.layout, assumptions)
        if judged.meets(table.demand.slo_s):
            known = replace(whole, evaluation=judged)
    return known


def best_on(table: OptionTable, assumptions: Assumptions, gpus: int) -> Plan | None:
    """The first plan on ``gpus`` GPUs, by estimated latency, that keeps the objective; None: none tried does."""
    best: tuple[float, Choice, Layout, Evaluation] | None = None
    for choice in _choices(table, assumptions, gpus):
        for layout in full_layouts(table, choice, gpus):
            judged = evaluate(table, choice, layout, assumptions)
            if judged.meets(table.demand.slo_s) and (best is None or judged.latency_s < best[0]):
                best = judged.latency_s, choice, layout, judged
        if best is not None:
            break
    if best is None:
        return None
    return Plan(table=table, choice=best[1], layout=best[2], evaluation=best[3], planner="search")


def _first_true(holds: Callable[[int], bool], first: int, last: int) -> int | None:
    """The first number from ``first`` on for which ``holds`` is true, if it stays true from there; None: none."""
    if first > last:
        return None
    step, low, high = 1, first - 1, first
    while not holds(high):
        if high == last:
            return None
        low, high, step = high, min(last, high + step), 2 * step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _first_true_down(holds: Callable[[int], bool], first: int, last: int) -> int | None:
    """As ``_first_true``, where it is expected near ``last``."""
    if last < first or not holds(last):
        return None
    step, low, high = 1, last - 1, last
    while low >= first and holds(low):
        high, low, step = low, low - 2 * step, 2 * step
    low = max(low, first - 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _smallest(table: OptionTable) -> Choice:
    """The options with the least memory on a GPU."""
    return tuple(
        min(range(len(one.batch)), key=lambda option, one=one: one.gpu_bytes(option, 1.0))  # type: ignore[misc]
        for one in table.operators
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sharing:
    """What a number of GPUs offers.

    Attributes:
        sizes: tensor parallel sizes for which there is room, ascending.
        waits: by size and busy share, the wait in services.
        load_frac: GPU time that a second of work takes from the other operators on its GPU, on average.
    """

    sizes: NDArray[np.int64]
    waits: Floats
    load_frac: float


def _choices(table: OptionTable, assumptions: Assumptions, gpus: int) -> list[Choice]:
    """Choices of options for ``gpus`` equally busy GPUs, by their estimated latency.

    Each largest batch is tried, since the wait for a full batch depends on it.
    """
    sizes = sorted({int(size) for one in table.operators for size in one.parallel if size <= gpus})
    if not sizes:
        return []
    sharing = _Sharing(
        sizes=np.array(sizes),
        waits=assumptions.wait(np.array([gpus // size for size in sizes])[:, None], _BUSY[None, :]),
        load_frac=load_frac(table, assumptions),
    )
    batches = sorted({int(size) for one in table.operators for size in one.batch})
    found: dict[Choice, float] = {}
    for cap in batches if assumptions.is_fill_counted else batches[-1:]:
        estimates = _estimates(table, assumptions, gpus, cap, sharing)
        for choice, latency_s in estimates.items():
            found[choice] = min(found.get(choice, np.inf), latency_s)
    return sorted(found, key=lambda choice: found[choice])[:_JUDGED]


def _estimates(
    table: OptionTable, assumptions: Assumptions, gpus: int, cap: int, sharing: _Sharing
) -> dict[Choice, float]:
    """Choices with batches up to ``cap`` and their estimated latency, one for each busy share and price."""
    rate = table.demand.passes_per_s
    fill = fill_s(rate, cap) if assumptions.is_fill_counted and rate else 0.0
    if fill + table.bare_s > table.demand.slo_s:
        return {}
    latency, work = np.full((len(_BUSY), len(_PRICES)), fill), np.zeros((len(_BUSY), len(_PRICES)))
    picked = []
    for one, least in zip(table.operators, table.least_replicas, strict=True):
        usable = (least > 0) & (least * one.parallel <= gpus) & (one.batch <= cap)
        if not usable.any():
            return {}
        index = np.searchsorted(sharing.sizes, np.where(usable, one.parallel, sharing.sizes[0]))
        seconds = np.where(usable[:, None], one.time_s[:, None] * (1.0 + sharing.waits[index]), np.inf)
        best = (seconds[:, :, None] + _PRICES[None, None, :] * one.gpu_s[:, None, None]).argmin(axis=0)
        picked.append(best)
        latency += seconds[best, np.arange(len(_BUSY))[:, None]]
        work += rate * one.gpu_s[best]
    fits = (work * sharing.load_frac <= gpus * _BUSY[:, None]) & (latency <= _ROUNDING * table.demand.slo_s)
    found: dict[Choice, float] = {}
    # For each price, the busy share with the least latency; the others have the same or more work.
    at = np.where(fits, latency, np.inf).argmin(axis=0)
    for price, busy in enumerate(at):
        if fits[busy, price]:
            choice = tuple(int(best[busy, price]) for best in picked)
            found[choice] = min(found.get(choice, np.inf), float(latency[busy, price]))
    return found
