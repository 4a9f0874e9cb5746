"""A trace planned window by window, with replicas that take time to start: what elasticity is worth (pure).

At the start of a window the planner sees the demand of an earlier one, and wants a plan. A replica is ready when it was
wanted for ``start_s`` without a break. So the plan that serves at an instant is the smallest of those wanted during the
last ``start_s``. GPUs are paid for from the instant at which they are wanted, and released at once.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from autoscale.operators.demand import Demand, PlanError
from autoscale.operators.energy import PowerModel, mean_power_w
from autoscale.operators.evaluation import Evaluation, evaluate
from autoscale.operators.plan import Plan
from autoscale.operators.planners import Planner
from autoscale.operators.window_demands import WindowDemand

# Seconds from the wish for a replica to its first batch. Section 1 of the paper: "sub-second" for an operator, and at
# least 10 s for a 70B model with the fastest loader that it cites.
OPERATOR_START_S = 0.5
MODEL_START_S = 10.0
# One request in ten seconds: a model without requests stays ready.
_LEAST_RATE_PER_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Elasticity:
    """How plans follow the demand.

    Attributes:
        window_s: time between plans.
        start_s: time from the wish for a replica until it serves.
        lag_windows: 1: a plan sees the demand of the window before; 0: it knows that of its own window.
        headroom_frac: share by which the rate is raised before planning.
    """

    window_s: float = 10.0
    start_s: float
    lag_windows: int = 1
    headroom_frac: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowResult:
    """One window: its demand, the plan that was wanted, and how its requests fared.

    Attributes:
        wanted: the plan that is paid for.
        judged: the wanted plan at the demand of this window, where it differs; None: no request came.
        met_requests: requests that arrived while the plan that served met the objective at this window's demand.
        power_w: mean power of the wanted plan at this demand.
        is_unplanned: no plan exists for the demand that the planner saw, so the last plan stayed.
    """

    demand: WindowDemand
    wanted: Plan
    judged: Evaluation | None
    met_requests: int
    power_w: float
    is_unplanned: bool


@dataclass(frozen=True, kw_only=True)
class Course:
    """All windows of a trace under one planner."""

    window_s: float
    windows: tuple[WindowResult, ...]
    requests: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "requests", sum(len(one.demand.arrivals_s) for one in self.windows))

    @property
    def gpu_hours(self) -> float:
        """GPU-hours that were paid for."""
        return sum(one.wanted.gpus for one in self.windows) * self.window_s / 3600.0

    @property
    def energy_kwh(self) -> float:
        """Energy of the GPUs that were paid for."""
        return sum(one.power_w for one in self.windows) * self.window_s / 3.6e6

    @property
    def mean_memory_bytes(self) -> float:
        """Weights, activations and KV of all replicas, mean over time."""
        return sum(one.wanted.memory_bytes for one in self.windows) / len(self.windows)

    @property
    def attained_frac(self) -> float:
        """Share of the requests that met the objective."""
        return sum(one.met_requests for one in self.windows) / max(1, self.requests)

    @property
    def unplanned_windows(self) -> int:
        """Windows for whose demand no plan exists."""
        return sum(one.is_unplanned for one in self.windows)


def course(planner: Planner, demands: Sequence[WindowDemand], elasticity: Elasticity, power: PowerModel) -> Course:
    """Plan every window of ``demands``, and judge each by the plan that was ready.

    Raises:
        PlanError: there is no window, or not even the first demand has a plan.
    """
    if not demands:
        raise PlanError("there is no window: the trace is empty")
    judge = _Judge(planner)
    wanted: list[Plan] = []
    results = []
    for number, demand in enumerate(demands):
        seen = demands[max(0, number - elasticity.lag_windows)]
        plan, is_unplanned = _planned(planner, seen, elasticity.headroom_frac, wanted)
        wanted.append(plan)
        rounded = planner.rounded(max(demand.passes_per_s, _LEAST_RATE_PER_S), demand.length_tokens)
        met = sum(
            requests
            for first, requests in _arrivals_by_first(demand, number, elasticity).items()
            if judge.at(_least(wanted[first : number + 1]), rounded).meets(planner.slo_s)
        )
        is_idle = demand.passes_per_s <= 0.0
        judged = None if is_idle else judge.at(plan, rounded)
        results.append(
            WindowResult(
                demand=demand,
                wanted=plan,
                judged=judged,
                met_requests=met,
                power_w=plan.gpus * power.idle_w if is_idle else judge.power_w(plan, rounded, power),
                is_unplanned=is_unplanned,
            )
        )
    return Course(window_s=elasticity.window_s, windows=tuple(results))


@dataclass(slots=True)
class _Judge:
    """Judges plans at demands that they were not made for, and keeps the results."""

    planner: Planner
    judged: dict[tuple[int, Demand], Evaluation] = field(default_factory=dict)

    def at(self, plan: Plan, rounded: Demand) -> Evaluation:
        if rounded == plan.table.demand:
            return plan.evaluation
        key = id(plan), rounded  # the planner keeps its plans, so an id stays that of one plan
        if key not in self.judged:
            self.judged[key] = evaluate(self.planner.table(rounded), plan.choice, plan.layout, self.planner.assumptions)
        return self.judged[key]

    def power_w(self, plan: Plan, rounded: Demand, power: PowerModel) -> float:
        moved = Plan(
            table=self.planner.table(rounded),
            choice=plan.choice,
            layout=plan.layout,
            evaluation=self.at(plan, rounded),
            planner=plan.planner,
        )
        return mean_power_w(moved, power)


def _planned(planner: Planner, seen: WindowDemand, headroom_frac: float, before: Sequence[Plan]) -> tuple[Plan, bool]:
    """The plan for a demand; the last one if none exists. A window without requests keeps a plan for one in it."""
    length = seen.length_tokens or (before[-1].table.demand.length_tokens if before else 1.0)
    rate = max(seen.passes_per_s * (1.0 + headroom_frac), _LEAST_RATE_PER_S)
    try:
        return planner.at(planner.rounded(rate, length)), False
    except PlanError:
        if not before:
            raise
        return before[-1], True


def _arrivals_by_first(demand: WindowDemand, number: int, elasticity: Elasticity) -> Counter[int]:
    """Arrivals of window ``number`` by the first window whose plan counts: the one ``start_s`` before an arrival."""
    return Counter(
        max(0, min(number, int((at_s - elasticity.start_s) // elasticity.window_s))) for at_s in demand.arrivals_s
    )


def _least(wanted: Sequence[Plan]) -> Plan:
    """The plan that is ready: the smallest of those wanted since."""
    return min(wanted, key=lambda plan: (plan.gpus, plan.weight_bytes))
