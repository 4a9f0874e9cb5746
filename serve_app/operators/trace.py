"""A trace planned window by window under each planner, for ``tandem operators plan --trace``."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoscale.operators.comparison import made_by_each
from autoscale.operators.costs import Phase
from autoscale.operators.objective import Objective
from autoscale.operators.over_time import Course, Elasticity, WindowResult, course
from autoscale.operators.window_demands import WindowDemand, decode_demands, prefill_demands
from autoscale.traces.trace import TraceRequest, scale_rate
from serve_app.checks.numbers import above_0
from serve_app.operators.inputs import Subject

# A trace with fewer requests says little about rates.
_FEW_REQUESTS = 30
# Copies of requests that take minutes to plan, and gigabytes.
_MOST_REQUESTS = 5_000_000
# Share by which the rate of the window before is raised: rates of windows of 10 s at 5 requests/s have a deviation of
# 14 % (Poisson), and this is two of them.
HEADROOM_FRAC = 0.3
# Savings are compared at one quality if the shares of requests within the objective differ by less.
_SAME_SHARE = 0.01
_SEED = 0  # of the copies of requests that a larger rate needs


@dataclass(frozen=True, slots=True, kw_only=True)
class Replanning:
    """How plans follow a trace: seconds between plans, of starts, and the share by which rates are raised.

    Raises:
        ValueError: a number is not finite, or the window is not above 0.
    """

    window_s: float
    model_start_s: float
    operator_start_s: float
    headroom_frac: float

    def __post_init__(self) -> None:
        above_0("--window-s", self.window_s)
        for option, value in (
            ("--model-start-s", self.model_start_s),
            ("--operator-start-s", self.operator_start_s),
            ("--headroom-frac", self.headroom_frac),
        ):
            if not 0.0 <= value < math.inf:
                raise ValueError(f"{option} {value:g}: give a number from 0")

    def elasticity(self, planner: str) -> Elasticity:
        """That of a planner: whole models start as models."""
        start_s = self.model_start_s if planner == "model" else self.operator_start_s
        return Elasticity(window_s=self.window_s, start_s=start_s, headroom_frac=self.headroom_frac)


@dataclass(frozen=True, kw_only=True)
class TraceAnswer:
    """The courses of one phase by planner; ``length_tokens``: mean of the trace, for the default objective."""

    subject: Subject
    phase: Phase
    objective: Objective
    length_tokens: int
    requests: int
    courses: Mapping[str, Course]
    refusals: Mapping[str, str]

    @property
    def notes(self) -> list[str]:
        """What a reader must know before using the figures."""
        notes = [f"{name}: no plan: {reason}" for name, reason in self.refusals.items()]
        if self.requests < _FEW_REQUESTS:
            notes.append(
                f"the trace has {self.requests} request(s): rates of a window and shares of requests are an estimate "
                f"from very few; give {_FEW_REQUESTS} or more"
            )
        notes += [
            f"{name}: {one.unplanned_windows} of {len(one.windows)} windows have no plan within the objective, and "
            "keep the last one: raise the objective"
            for name, one in self.courses.items()
            if one.unplanned_windows
        ]
        base = self.courses.get("model")
        notes += [
            f"{name}: {one.attained_frac:.1%} of the requests are within the objective, at model level "
            f"{base.attained_frac:.1%}: the savings are at a lower quality; compare at more --headroom-frac"
            for name, one in self.courses.items()
            if base is not None and one.attained_frac < base.attained_frac - _SAME_SHARE
        ]
        return notes


def scaled(trace: tuple[TraceRequest, ...], factor: float | None) -> tuple[TraceRequest, ...]:
    """A trace with ``factor`` times as many requests, each time with the same copies.

    Raises:
        ValueError: no request would be left, or too many.
    """
    if factor is None or factor == 1.0:
        return trace
    if factor * len(trace) > _MOST_REQUESTS:
        raise ValueError(
            f"--rate-scale {factor:g} makes {factor * len(trace):.3g} of {len(trace):,} requests, and "
            f"{_MOST_REQUESTS:,} are the most: give a smaller one"
        )
    found = scale_rate(trace, factor, random.Random(_SEED))
    if not found:
        raise ValueError(f"--rate-scale {factor:g} leaves none of {len(trace):,} requests: give a larger one")
    return found


def answer_for_trace(
    subject: Subject,
    phase: Phase,
    planners: Sequence[str],
    trace: Sequence[TraceRequest],
    replanning: Replanning,
    slo_s: float | None,
) -> TraceAnswer:
    """Plan every window of a trace.

    Raises:
        PlanError: no planner has a plan for the first window, or the trace is empty.
    """
    outputs = sum(one.output_tokens for one in trace) / len(trace)
    prompts = sum(one.input_tokens for one in trace) / len(trace)
    length = max(1, round(prompts if phase is Phase.PREFILL else prompts + outputs / 2))
    objective = subject.objective(phase, length, slo_s)
    demands = window_demands(trace, phase, replanning.window_s, objective.slo_s)

    def followed(name: str) -> Course:
        planner = subject.planner(name, phase, objective.slo_s)
        return course(planner, demands, replanning.elasticity(name), subject.platform.power)

    courses, refusals = made_by_each(planners, followed)
    return TraceAnswer(
        subject=subject,
        phase=phase,
        objective=objective,
        length_tokens=length,
        requests=len(trace),
        courses=courses,
        refusals=refusals,
    )


def window_demands(
    trace: Sequence[TraceRequest], phase: Phase, window_s: float, tpot_s: float
) -> tuple[WindowDemand, ...]:
    """What a phase must do in each window; tokens of an answer come at the objective's pace."""
    if phase is Phase.PREFILL:
        return prefill_demands(trace, window_s)
    return decode_demands(trace, window_s, tpot_s)


def bottleneck(window: WindowResult) -> str | None:
    """The operator with the longest T_v + W_v + C_v at the demand of a window; None: no request came."""
    judged = window.judged
    if judged is None:
        return None
    sojourns = judged.service_s + judged.wait_s + judged.transfer_s
    return window.wanted.table.names[int(sojourns.argmax())]
