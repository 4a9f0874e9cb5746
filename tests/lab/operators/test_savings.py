"""What the savings study compares: the same demand and assumptions for all planners."""

from autoscale.operators.costs import Phase
from tests.lab.operators.model_costs import model_costs
from tests.lab.operators.savings import Point, assumptions_by_name, objective_s, plans


def test_all_planners_keep_the_same_objective() -> None:
    costs = model_costs("qwen2-7b", "A100", Phase.PREFILL)
    point = Point(phase=Phase.PREFILL, passes_per_s=20.0, length_tokens=1024)
    found = plans(costs, point, "A100", assumptions_by_name()["measured pairs"])
    assert set(found) == {"model", "paper_greedy", "greedy", "search"}
    for plan in found.values():
        assert plan is not None
        assert plan.evaluation.meets(objective_s(costs, point))
    assert found["search"].gpus <= found["model"].gpus  # type: ignore[union-attr]
