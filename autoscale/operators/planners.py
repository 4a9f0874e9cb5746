"""The planners by name, and a planner that keeps its tables and plans for demands that come again (pure)."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from autoscale.operators.costs import OperatorCosts, Phase
from autoscale.operators.demand import Demand
from autoscale.operators.evaluation import Assumptions
from autoscale.operators.gpu import Gpu
from autoscale.operators.greedy import plan_greedy
from autoscale.operators.model_level import plan_model_level
from autoscale.operators.option_table import option_table
from autoscale.operators.options import Limits, OptionTable
from autoscale.operators.paper_greedy import plan_apart, plan_paper_greedy
from autoscale.operators.plan import Plan
from autoscale.operators.search import plan_search
from autoscale.operators.sm_shares import SmShares
from autoscale.operators.steady import plan_steady

PlanFunction = Callable[[OptionTable, Assumptions], Plan]
PLANNERS: Mapping[str, PlanFunction] = MappingProxyType(
    {
        "model": plan_model_level,
        "paper_greedy": plan_paper_greedy,
        "greedy": plan_greedy,
        "search": plan_search,
        "steady": plan_steady,
        "apart": plan_apart,
    }
)


@dataclass(kw_only=True)
class Planner:
    """Plans of one model on one GPU type by one planner.

    Demands are rounded up, rates and lengths each to a geometric grid, so that those which nearly come again are
    looked up. A plan is therefore for at least the demand.

    Attributes:
        plan: one of ``PLANNERS``.
        rate_step, length_step: ratio of neighbouring values of the two grids.
    """

    costs: OperatorCosts
    phase: Phase
    gpu: Gpu
    limits: Limits
    assumptions: Assumptions
    slo_s: float
    plan: PlanFunction
    shares: SmShares | None = None
    rate_step: float = 1.1
    length_step: float = 1.15
    _tables: dict[tuple[int, bool], OptionTable] = field(default_factory=dict, repr=False)
    _plans: dict[Demand, Plan] = field(default_factory=dict, repr=False)

    def rounded(self, passes_per_s: float, length_tokens: float) -> Demand:
        """The demand of the two grids that is at least this one."""
        return Demand(
            passes_per_s=_grid_up(passes_per_s, self.rate_step),
            length_tokens=_tokens_up(max(length_tokens, 1.0), self.length_step),
            slo_s=self.slo_s,
        )

    def table(self, demand: Demand) -> OptionTable:
        """The table of a demand. Times depend on the length alone, so demands that differ in rate share them."""
        key = demand.length_tokens, demand.passes_per_s > 0.0
        if key not in self._tables:
            self._tables[key] = option_table(
                self.costs, demand=demand, phase=self.phase, gpu=self.gpu, limits=self.limits, shares=self.shares
            )
        return replace(self._tables[key], demand=demand)

    @property
    def plans(self) -> int:
        """Different plans that were made."""
        return len(self._plans)

    def at(self, demand: Demand) -> Plan:
        """The plan of a demand, which is not rounded here.

        Raises:
            PlanError: no plan exists; the subclass and the message say why.
        """
        if demand not in self._plans:
            self._plans[demand] = self.plan(self.table(demand), self.assumptions)
        return self._plans[demand]


def _grid_up(value: float, step: float) -> float:
    """The next power of ``step`` from ``value`` on; 0 stays 0. A value of the grid stays, but for rounding."""
    if value <= 0.0:
        return 0.0
    return float(step ** math.ceil(math.log(value) / math.log(step) - 1e-9))


def _tokens_up(value: float, step: float) -> int:
    """The next whole number of tokens of the grid; one of the grid stays, although whole numbers are rounded up."""
    power = math.ceil(math.log(value) / math.log(step) - 1e-9)
    below = math.ceil(step ** (power - 1))
    return below if below >= value else math.ceil(step**power)
