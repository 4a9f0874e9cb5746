"""Plans of several planners for one demand: what they save against model level, and their operators (pure)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from autoscale.operators.costs import OperatorCosts, SourceKind
from autoscale.operators.curves import worst
from autoscale.operators.demand import PlanError
from autoscale.operators.energy import PowerModel, mean_power_w, request_energy_j
from autoscale.operators.plan import Plan
from autoscale.operators.settings import OperatorSetting

# Times of these kinds are not measured on the GPU, and reports mark them.
ESTIMATES = (SourceKind.EXTRAPOLATED, SourceKind.ROOFLINE)
_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Shares that a plan saves against another one; below 0: it needs more."""

    gpus_frac: float
    memory_frac: float
    power_frac: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRow:
    """One operator of a plan.

    Attributes:
        busy_frac: share of time that one of its replicas keeps its GPUs busy.
        time_s: T_v of one service of all copies, without other operators on its GPUs.
        source: the worst source of ``time_s``, of the operator and the collectives that follow it.
        wait_s: W_v. transfer_s: C_v.
        energy_j: Eq. 9 for one request.
        is_bottleneck: it has the longest T_v + W_v + C_v.
    """

    name: str
    setting: OperatorSetting
    busy_frac: float
    time_s: float
    source: SourceKind
    wait_s: float
    transfer_s: float
    energy_j: float
    is_bottleneck: bool


def made_by_each(names: Sequence[str], make: Callable[[str], _Made]) -> tuple[dict[str, _Made], dict[str, str]]:
    """What ``make`` returns for each planner's name, and the reason of each planner that finds nothing.

    Raises:
        PlanError: no planner finds anything; it is the error of the first one.
    """
    made: dict[str, _Made] = {}
    refusals: dict[str, str] = {}
    first: PlanError | None = None
    for name in names:
        try:
            made[name] = make(name)
        except PlanError as error:
            first = first or error
            refusals[name] = str(error)
    if first is not None and not made:
        raise first
    return made, refusals


def saved(plan: Plan, base: Plan, power: PowerModel) -> Saved:
    """What a plan saves against ``base``, the plan at model level."""
    return Saved(
        gpus_frac=1.0 - plan.gpus / base.gpus,
        memory_frac=1.0 - plan.memory_bytes / base.memory_bytes,
        power_frac=1.0 - mean_power_w(plan, power) / mean_power_w(base, power),
    )


def best_name(plans: Mapping[str, Plan]) -> str:
    """The name of the plan with the fewest GPUs; of equal numbers, that with the least memory, then latency.

    The model level is left out if there is another plan.
    """
    names = [name for name in plans if name != "model"] or list(plans)
    return min(names, key=lambda name: (plans[name].gpus, plans[name].memory_bytes, plans[name].evaluation.latency_s))


def operator_rows(plan: Plan, costs: OperatorCosts, power: PowerModel) -> tuple[OperatorRow, ...]:
    """The operators of a plan, in the order of a pass."""
    judged, table = plan.evaluation, plan.table
    energies, kinds = request_energy_j(plan, power), _sources(plan, costs)
    return tuple(
        OperatorRow(
            name=one.name,
            setting=plan.settings[one.name],
            busy_frac=float(judged.replica_busy_fracs[place]),
            time_s=float(one.time_s[option]),
            source=kinds[one.name],
            wait_s=float(judged.wait_s[place]),
            transfer_s=float(judged.transfer_s[place]),
            energy_j=energies[one.name],
            is_bottleneck=one.name == plan.bottleneck,
        )
        for place, (one, option) in enumerate(zip(table.operators, plan.choice, strict=True))
    )


def _sources(plan: Plan, costs: OperatorCosts) -> dict[str, SourceKind]:
    """By operator of the table, the worst source of its own time and of the collectives after it."""
    kinds: dict[str, list[SourceKind]] = {}
    length_tokens, head = plan.table.demand.length_tokens, ""
    for name in costs.names:
        if name in plan.settings:
            head = name
        setting = plan.settings[head]
        at = {"parallel": setting.parallel, "length_tokens": length_tokens, "batch": setting.batch}
        kinds.setdefault(head, []).append(costs.source(name, **at).kind)
    return {name: worst(found) for name, found in kinds.items()}
