"""Leaves out replicas that the objective does not need, which saves memory (pure)."""

from dataclasses import replace

from autoscale.operators.evaluation import Assumptions, Evaluation, evaluate
from autoscale.operators.layout import Layout, Unit, merged
from autoscale.operators.plan import Plan

# Operators with a smaller share of the model's weights stay on all units: norms, and others without a product. Their
# replicas would hardly save memory, and plans would have more different GPUs.
_LEAST_FRAC = 0.005


def without_spare_replicas(plan: Plan, assumptions: Assumptions) -> Plan:
    """The plan with as few replicas of each operator as its GPUs and the objective allow, largest weights first.

    An operator that fewer units host keeps its place in the first or in the last units: what is better is taken.
    """
    table, layout = plan.table, plan.layout
    judged = plan.evaluation
    order = sorted(range(len(table.operators)), key=lambda place: -table.operators[place].weight_bytes)
    least_bytes = _LEAST_FRAC * sum(one.weight_bytes for one in table.operators)
    for operator in order:
        if table.operators[operator].weight_bytes <= least_bytes:
            break
        least = int(table.least_replicas[operator][plan.choice[operator]])
        total = sum(unit.count for unit in layout.units if any(one.operator == operator for one in unit.replicas))

        def kept(count: int, operator: int = operator, layout: Layout = layout) -> tuple[Layout, Evaluation] | None:
            for is_first in (True, False):
                fewer = _hosted_by(layout, operator, count, is_first)
                end = evaluate(table, plan.choice, fewer, assumptions)
                if fewer.gpus == layout.gpus and end.meets(table.demand.slo_s):
                    return fewer, end
            return None

        most_a_unit = max(sum(one.operator == operator for one in unit.replicas) for unit in layout.units)
        low, high, best = (least - 1) // most_a_unit, total, None
        while high - low > 1:
            middle = (low + high) // 2
            end = kept(middle)
            low, high, best = (middle, high, best) if end is None else (low, middle, end)
        if best is not None:
            layout, judged = best
    return replace(plan, layout=layout, evaluation=judged)


def _hosted_by(layout: Layout, operator: int, count: int, is_first: bool) -> Layout:
    """The layout with an operator in only ``count`` of the units that host it."""
    units: list[Unit] = []
    left = count
    for unit in layout.units if is_first else reversed(layout.units):
        without = tuple(one for one in unit.replicas if one.operator != operator)
        if len(without) == len(unit.replicas):
            units.append(unit)
            continue
        keep = min(left, unit.count)
        left -= keep
        units += [replace(unit, count=keep), replace(unit, replicas=without, count=unit.count - keep)]
    return merged(units)
