"""The planner for a demand that may rise before the next plan: slack on its GPUs is kept (pure).

``search`` leaves out every replica that the expected demand does not need. That saves memory, and no GPU. But the slack
of the GPUs goes with it, which the next window may need. Here a replica is left out only if the plan without it still
keeps the objective at a higher rate: the highest one that all replicas on these GPUs carry, up to ``MOST_RISE``.
"""

from dataclasses import replace

from autoscale.operators.evaluation import Assumptions, evaluate
from autoscale.operators.options import OptionTable
from autoscale.operators.plan import Plan
from autoscale.operators.search import fewest_searched_gpus
from autoscale.operators.spare_replicas import without_spare_replicas

# Rise of the rate for which slack is kept. At 5 requests/s the counts of windows of 10 s have a deviation of 14 %
# (Poisson), so a half more is beyond three deviations.
MOST_RISE = 0.5
_RISES = tuple(MOST_RISE * step / 5 for step in range(5, 0, -1))


def plan_steady(table: OptionTable, assumptions: Assumptions) -> Plan:
    """The GPUs of ``plan_search``, with the replicas that let them carry a higher rate; raises as it."""
    plan = fewest_searched_gpus(table, assumptions)
    for rise in _RISES:
        demand = replace(table.demand, passes_per_s=(1.0 + rise) * table.demand.passes_per_s)
        raised = replace(table, demand=demand)
        judged = evaluate(raised, plan.choice, plan.layout, assumptions)
        if judged.meets(demand.slo_s):
            slim = without_spare_replicas(replace(plan, table=raised, evaluation=judged), assumptions)
            plan = replace(plan, layout=slim.layout)
            break
    judged = evaluate(table, plan.choice, plan.layout, assumptions)
    return replace(plan, evaluation=judged, planner="steady")
