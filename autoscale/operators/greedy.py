"""The greedy planner: operators are sized together, and then get the GPUs that host all of them (pure).

The printed pair of algorithms is ``plan_paper_greedy``. It first sizes each operator alone. Here ``joint_sizing`` sizes
all of them on common GPUs, and ``full_layouts`` places them. At the end, replicas that the objective does not need are
left out, the largest weights first, as Algorithm 1 does in lines 11 to 17.
"""

from collections.abc import Iterator

from autoscale.operators.demand import MOST_GPUS, MemoryTooSmallError, PlanError
from autoscale.operators.evaluation import Assumptions, evaluate
from autoscale.operators.joint_sizing import JointSizing, joint_sizings
from autoscale.operators.options import OptionTable
from autoscale.operators.packing import full_layouts
from autoscale.operators.plan import Plan
from autoscale.operators.sizing import check_slo
from autoscale.operators.spare_replicas import without_spare_replicas


def plan_greedy(table: OptionTable, assumptions: Assumptions) -> Plan:
    """``fewest_gpus``, without the replicas that the objective does not need; raises as it."""
    return without_spare_replicas(fewest_gpus(table, assumptions), assumptions)


def fewest_gpus(table: OptionTable, assumptions: Assumptions) -> Plan:
    """The plan with the fewest GPUs, then with the lowest latency, of all sizings of ``joint_sizings``.

    Raises:
        SloBelowServiceError: the objective is below the time of one pass that never waits.
        MemoryTooSmallError: the operators do not fit into the GPUs that the objective needs.
        PlanError: no number of GPUs up to ``MOST_GPUS`` keeps the objective.
    """
    check_slo(table, table.demand.slo_s)
    sizings = list(dict.fromkeys(joint_sizings(table, assumptions, MOST_GPUS)))
    if not sizings:
        raise PlanError(
            f"no number of GPUs up to {MOST_GPUS:,} keeps {table.demand.slo_s:.4g} s at "
            f"{table.demand.passes_per_s:.4g} passes/s: raise the objective, or lower the rate"
        )
    best: Plan | None = None
    for sizing in sorted(sizings, key=lambda one: one.gpus):
        if best is None or sizing.gpus <= best.gpus:
            plan = _placed(table, sizing, assumptions, best.gpus if best else MOST_GPUS)
            if plan is not None and (best is None or _cost(plan) < _cost(best)):
                best = plan
    if best is None:
        raise MemoryTooSmallError(f"no layout on {table.gpu.name} GPUs holds all operators and their requests")
    return best


def _cost(plan: Plan) -> tuple[int, float]:
    return plan.gpus, plan.evaluation.latency_s


def _placed(table: OptionTable, sizing: JointSizing, assumptions: Assumptions, most_gpus: int) -> Plan | None:
    """The sizing on its GPUs, or on the next larger number that keeps the objective; None: ``most_gpus`` do not."""
    for gpus in _counts(sizing.gpus, most_gpus):
        plans = [
            Plan(table=table, choice=sizing.choice, layout=layout, evaluation=judged, planner="greedy")
            for layout in full_layouts(table, sizing.choice, gpus)
            for judged in (evaluate(table, sizing.choice, layout, assumptions),)
            if judged.meets(table.demand.slo_s)
        ]
        if plans:
            return min(plans, key=_cost)
    return None


def _counts(first: int, most: int) -> Iterator[int]:
    """Numbers of GPUs from ``first`` on, in steps of a thirty-second."""
    gpus = first
    while gpus <= most:
        yield gpus
        gpus += max(1, gpus // 32)
