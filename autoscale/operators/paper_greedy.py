"""The paper's planner: Algorithm 1, then Algorithm 2 (section 4.2; pure).

Algorithm 1 sizes as if no replica shared its GPUs, and stops as soon as the objective is met. So it leaves no time for
the interference that Algorithm 2 then finds. The paper has a buffer epsilon below the objective, and gives it no value.
Here Algorithm 1 runs at several smaller objectives. The text starts from the parallelism "inherited from the model's
deployment": here both from the smallest one that can meet the objective, and without a bound. It starts from the
batches with the least sojourn time, as line 5 says, and from those with the least GPU time, which in decode are larger.
The plan with the fewest GPUs is taken.
"""

from collections.abc import Callable, Sequence
from itertools import product

from autoscale.operators.demand import PlanError
from autoscale.operators.evaluation import Assumptions
from autoscale.operators.latency import path_s
from autoscale.operators.options import OptionTable
from autoscale.operators.placement import place, place_apart
from autoscale.operators.plan import Plan
from autoscale.operators.sizing import Sizing, check_slo, size
from autoscale.operators.sojourns import Queues, by_gpu_time, by_sojourn

# Objectives of Algorithm 1 as shares of the real one. 1 is the algorithm as printed.
RESERVES = (1.0, 0.7, 0.4)
# The least objective is this multiple of a pass that never waits: closer to it, replicas grow without bound.
_LEAST_SLACK = 1.02
_SEEDS = (by_sojourn, by_gpu_time)


def plan_paper_greedy(table: OptionTable, assumptions: Assumptions, reserves: Sequence[float] = RESERVES) -> Plan:
    """The plan with the fewest GPUs, then with the least weights, of Algorithms 1 and 2 at all ``reserves``.

    Raises:
        SloBelowServiceError: the objective is below the time of one pass that never waits.
        PlanError: neither algorithm finds a plan.
    """
    return _best(table, assumptions, reserves, place)


def plan_apart(table: OptionTable, assumptions: Assumptions, reserves: Sequence[float] = RESERVES) -> Plan:
    """As ``plan_paper_greedy``, on GPUs that run no kernels side by side (``place_apart``)."""
    return _best(table, assumptions, reserves, place_apart)


def _best(
    table: OptionTable,
    assumptions: Assumptions,
    reserves: Sequence[float],
    place_replicas: Callable[[OptionTable, Sizing, Assumptions], Plan],
) -> Plan:
    slo_s = table.demand.slo_s
    check_slo(table, slo_s)
    plans: dict[Sizing, Plan] = {}
    faults: list[PlanError] = []
    queues = Queues(table=table, assumptions=assumptions)
    for (most_parallel, bare_s), seed, reserve in product(_parallel_bounds(table), _SEEDS, reserves):
        try:
            target_s = max(reserve * slo_s, min(slo_s, _LEAST_SLACK * bare_s))
            sizing = size(table, assumptions, target_s, most_parallel=most_parallel, queues=queues, seed=seed)
        except PlanError as error:
            faults.append(error)
            continue
        if sizing not in plans:
            plans[sizing] = place_replicas(table, sizing, assumptions)
    kept = [plan for plan in plans.values() if plan.evaluation.meets(slo_s)]
    if not kept:
        latencies = ", ".join(f"{plan.evaluation.latency_s:.4g} s" for plan in plans.values())
        raise PlanError(
            f"no placement keeps {slo_s:.4g} s at {table.demand.passes_per_s:.4g} passes/s: the fastest found have "
            f"{latencies or 'no sizing'}"
        ) from (faults[0] if faults else None)
    return min(kept, key=lambda plan: (plan.gpus, plan.weight_bytes))


def _parallel_bounds(table: OptionTable) -> list[tuple[int, float]]:
    """The smallest bound of the tensor parallel size that can meet the objective, and the largest size.

    Each comes with the time of a pass that never waits within the bound, seconds.
    """
    sizes = sorted({int(size) for one in table.operators for size in one.parallel})
    found: list[tuple[int, float]] = []
    for bound in sizes:
        fits = [
            (least > 0) & (one.parallel <= bound)
            for one, least in zip(table.operators, table.least_replicas, strict=True)
        ]
        if all(each.any() for each in fits):
            times = [float(one.time_s[each].min()) for one, each in zip(table.operators, fits, strict=True)]
            bare_s = path_s(table.names, table.edges, times)
            if bare_s <= table.demand.slo_s:
                found.append((bound, bare_s))
    return list(dict.fromkeys([found[0], found[-1]])) if found else []
