"""Costs of a model's operators on a GPU type, from the shipped tables, for the planner's laboratory."""

import json
from pathlib import Path

from autoscale.operators.costs import Phase
from autoscale.operators.gpu import gpu_named
from autoscale.operators.graph import operator_graph
from autoscale.operators.measured_costs import ModelCosts
from autoscale.operators.tables import load_operator_tables
from autoscale.operators.times import OperatorTimes

CONFIGS = Path(__file__).parents[3] / "configs" / "operators"
PAIRS = CONFIGS / "contention" / "h100_80gb_pairs.csv"
SM_SHARES = CONFIGS / "contention" / "h100_80gb_sm_shares.csv"


def model_costs(model: str, gpu: str, phase: Phase) -> ModelCosts:
    """``model``: a file of configs/operators/models, without its ending; ``gpu``: a folder of its tables."""
    config = json.loads((CONFIGS / "models" / f"{model}.json").read_text(encoding="utf-8"))
    times = OperatorTimes(gpu_named(gpu), load_operator_tables(CONFIGS / "tables" / gpu))
    return ModelCosts(operator_graph(config), times, phase)
