"""The second objective: the highest rate that fixed GPUs carry within the objective of latency (pure)."""

from dataclasses import dataclass

from autoscale.operators.demand import Demand, MemoryTooSmallError, PlanError, SloBelowServiceError, TooFewGpusError
from autoscale.operators.plan import Plan
from autoscale.operators.planners import Planner

# Rates are found up to this share.
RATE_FRAC = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """The highest rate, passes/s, and the plan for it."""

    passes_per_s: float
    plan: Plan


def highest_rate(planner: Planner, *, gpus: int, length_tokens: int, rate_frac: float = RATE_FRAC) -> Throughput:
    """The highest rate for which a planner needs at most ``gpus`` GPUs, found by halving.

    Raises:
        SloBelowServiceError: the objective is below the time of one pass that never waits.
        TooFewGpusError: the GPUs do not carry any rate.
    """

    def fitting(rate: float) -> Plan | None:
        try:
            plan = planner.at(Demand(passes_per_s=rate, length_tokens=length_tokens, slo_s=planner.slo_s))
        except (SloBelowServiceError, MemoryTooSmallError):
            raise
        except PlanError:
            return None
        return plan if plan.gpus <= gpus and plan.evaluation.meets(planner.slo_s) else None

    low, best, high = 0.0, fitting(0.0), 1.0
    if best is None:
        raise TooFewGpusError(
            f"{gpus} GPUs do not hold one instance of each operator within {planner.slo_s:.4g} s: give more GPUs, or "
            "raise the objective"
        )
    while (plan := fitting(high)) is not None:
        low, best, high = high, plan, 2.0 * high
    floor = high * 1e-6  # a rate below a millionth of what fails is none
    while high - low > rate_frac * high and high > floor:
        middle = (low + high) / 2.0
        plan = fitting(middle)
        low, best, high = (low, best, middle) if plan is None else (middle, plan, high)
    return Throughput(passes_per_s=low, plan=best)
