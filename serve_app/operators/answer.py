"""What ``tandem operators plan`` found for one phase of one demand, and what a reader must know about it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from autoscale.operators.comparison import ESTIMATES, OperatorRow, best_name, made_by_each, operator_rows
from autoscale.operators.costs import Phase, SourceKind
from autoscale.operators.demand import Demand
from autoscale.operators.energy import PowerModel
from autoscale.operators.objective import Objective
from autoscale.operators.plan import Plan
from autoscale.operators.throughput import Throughput, highest_rate
from serve_app.operators.inputs import Subject, demand_of, length_of


@dataclass(frozen=True, kw_only=True)
class PhaseAnswer:
    """Plans of one phase.

    Attributes:
        demand: what was planned for; with fixed GPUs its rate is 0, and ``rates`` has those found.
        plans: by planner, in the order of the options.
        refusals: why a planner has no plan.
        rates: highest passes per second by planner, with fixed GPUs; empty without them.
        fixed_gpus: None: GPUs are not fixed.
        output_tokens: length of an answer; None: it was not given.
    """

    subject: Subject
    phase: Phase
    objective: Objective
    demand: Demand
    plans: Mapping[str, Plan]
    refusals: Mapping[str, str]
    rates: Mapping[str, float]
    fixed_gpus: int | None
    output_tokens: int | None

    @property
    def power(self) -> PowerModel:
        """Power of one GPU."""
        return self.subject.platform.power

    @cached_property
    def best(self) -> str:
        """The planner whose operators are shown: with fixed GPUs that with the highest rate."""
        if self.rates:
            return max(self.rates, key=lambda name: (self.rates[name], name != "model"))
        return best_name(self.plans)

    @cached_property
    def rows(self) -> dict[str, tuple[OperatorRow, ...]]:
        """The operators of each plan."""
        costs = self.subject.costs(self.phase)
        return {name: operator_rows(plan, costs, self.power) for name, plan in self.plans.items()}

    @cached_property
    def estimated(self) -> dict[str, SourceKind]:
        """Operators whose time is not measured on this GPU, in the plan that is shown, with the source."""
        return {row.name: row.source for row in self.rows[self.best] if row.source in ESTIMATES}

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know before using a plan."""
        notes = [f"{name}: no plan: {reason}" for name, reason in self.refusals.items()]
        if not self.demand.passes_per_s and not self.rates:
            notes.append(
                "the rate is 0: one instance of each operator is kept, and the latency is that of a request that comes "
                "alone. Savings say nothing about load: give --requests-per-s above 0"
            )
        notes += [
            f"{name}: the plan misses the objective or does not fit into memory; do not use it"
            for name, plan in self.plans.items()
            if not plan.evaluation.meets(self.objective.slo_s)
        ]
        if longest := self._beyond_positions():
            notes.append(longest)
        if self.estimated:
            notes.append(self._estimate_note())
        return tuple(notes)

    def _beyond_positions(self) -> str | None:
        """What to say of a length that the model does not take."""
        most, asked = self.subject.longest_tokens, self.demand.length_tokens
        if most is None or asked <= most:
            return None
        return f"{asked} tokens are more than the model takes (max_position_embeddings {most}): the plan is arithmetic"

    def _estimate_note(self) -> str:
        rows = self.rows[self.best]
        share = sum(row.time_s for row in rows if row.source in ESTIMATES) / sum(row.time_s for row in rows)
        kinds = {kind: [name for name, each in self.estimated.items() if each is kind] for kind in ESTIMATES}
        parts = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in kinds.items() if names)
        return (
            f"estimated, for want of a measurement on the {self.subject.platform.gpu.name}: {share:.0%} of the time of "
            f"a pass ({parts}). Measure them on your GPU, and give --tables"
        )


def answer_for_load(
    subject: Subject,
    phase: Phase,
    planners: Sequence[str],
    *,
    requests_per_s: float,
    tokens: tuple[int, int | None],
    slo_s: float | None,
) -> PhaseAnswer:
    """The plans with the fewest GPUs for a load. ``tokens``: of a prompt and of an answer.

    Raises:
        PlanError: no planner has a plan.
    """
    objective = subject.objective(phase, length_of(phase, tokens), slo_s)
    demand = demand_of(phase, requests_per_s, tokens, objective.slo_s)
    plans, refusals = made_by_each(planners, lambda name: subject.planner(name, phase, objective.slo_s).at(demand))
    return PhaseAnswer(
        subject=subject,
        phase=phase,
        objective=objective,
        demand=demand,
        plans=plans,
        refusals=refusals,
        rates={},
        fixed_gpus=None,
        output_tokens=tokens[1],
    )


def answer_for_gpus(
    subject: Subject,
    phase: Phase,
    planners: Sequence[str],
    *,
    gpus: int,
    tokens: tuple[int, int | None],
    slo_s: float | None,
) -> PhaseAnswer:
    """The plans with the highest rate that fixed GPUs carry; arguments and errors as ``answer_for_load``."""
    objective = subject.objective(phase, length_of(phase, tokens), slo_s)
    demand = demand_of(phase, 0.0, tokens, objective.slo_s)

    def highest(name: str) -> Throughput:
        planner = subject.planner(name, phase, objective.slo_s)
        return highest_rate(planner, gpus=gpus, length_tokens=demand.length_tokens)

    found, refusals = made_by_each(planners, highest)
    return PhaseAnswer(
        subject=subject,
        phase=phase,
        objective=objective,
        demand=demand,
        plans={name: one.plan for name, one in found.items()},
        refusals=refusals,
        rates={name: one.passes_per_s for name, one in found.items()},
        fixed_gpus=gpus,
        output_tokens=tokens[1],
    )
