"""What ``tandem operators plan --trace`` prints, and its JSON file."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from autoscale.operators.comparison import operator_rows
from autoscale.operators.over_time import Course, WindowResult
from autoscale.operators.plan import Plan
from serve_app.cli.operators_view import PLANNER_TEXTS, assumption_lines, print_lines
from serve_app.cli.sim_report import print_notes, print_whole
from serve_app.cli.terminal import figures_table
from serve_app.operators.document import row_document, subject_document
from serve_app.operators.inputs import objective_text
from serve_app.operators.trace import Replanning, TraceAnswer, bottleneck

COURSE_HEADS = (
    "GPU-hours",
    "energy kWh",
    "memory GB",
    "most GPUs",
    "requests within",
    "saved GPU-hours",
    "saved energy",
    "bottleneck",
)


def show_trace(answers: Sequence[TraceAnswer], replanning: Replanning) -> None:
    """Print the answers."""
    lines = [*assumption_lines(answers[0].subject), replanning_text(replanning)]
    print_lines(lines)
    for answer in answers:
        windows = len(next(iter(answer.courses.values())).windows)
        head = (
            f"{answer.phase}: {answer.requests:,} requests in {windows:,} windows, mean {answer.length_tokens} tokens"
        )
        print_lines(["", head, objective_text(answer.phase, answer.objective, answer.length_tokens)])
        print_whole(course_table(answer))
        print_notes(answer.notes)


def replanning_text(replanning: Replanning) -> str:
    """How plans follow the trace, in words."""
    return (
        f"a plan every {replanning.window_s:g} s, from the demand of the window before raised by "
        f"{replanning.headroom_frac:.0%}; a model starts in {replanning.model_start_s:g} s, an operator in "
        f"{replanning.operator_start_s:g} s"
    )


def course_table(answer: TraceAnswer) -> Table:
    """One line for each planner."""
    table = figures_table("", [head.replace(" ", "\n", 1) for head in COURSE_HEADS])
    for name in answer.courses:
        table.add_row(PLANNER_TEXTS[name], *course_cells(answer, name))
    for name in answer.refusals:
        table.add_row(PLANNER_TEXTS[name], "no plan")
    return table


def course_cells(answer: TraceAnswer, name: str) -> list[str]:
    """The columns of one planner."""
    one = answer.courses[name]
    return [
        f"{one.gpu_hours:.2f}",
        f"{one.energy_kwh:.2f}",
        f"{one.mean_memory_bytes / 1e9:.0f}",
        str(max(each.wanted.gpus for each in one.windows)),
        f"{one.attained_frac:.1%}",
        *([f"{value:.0%}" for value in course_savings(answer, name)] or ["", ""]),
        _longest_bottleneck(one),
    ]


def course_savings(answer: TraceAnswer, name: str) -> list[float]:
    """Shares of GPU-hours and of energy that a planner saves against model level; empty: there is no model level."""
    base = answer.courses.get("model")
    if base is None or name == "model":
        return []
    one = answer.courses[name]
    return [1.0 - one.gpu_hours / base.gpu_hours, 1.0 - one.energy_kwh / base.energy_kwh]


def _longest_bottleneck(one: Course) -> str:
    """The operator that is the bottleneck of the most windows, with its share of them."""
    counts = Counter(name for window in one.windows if (name := bottleneck(window)))
    if not counts:
        return "-"
    name, times = counts.most_common(1)[0]
    return f"{name} ({times / counts.total():.0%})"


def trace_document(answers: Sequence[TraceAnswer], replanning: Replanning) -> dict[str, Any]:
    """The answers for --json."""
    return {
        **subject_document(answers[0].subject),
        "replanning": asdict(replanning),
        "phases": {str(one.phase): _phase(one) for one in answers},
    }


def _phase(answer: TraceAnswer) -> dict[str, Any]:
    return {
        "requests": answer.requests,
        "length_tokens": answer.length_tokens,
        "objective": {
            "slo_s": answer.objective.slo_s,
            "is_default": answer.objective.parallel is not None,
            "text": objective_text(answer.phase, answer.objective, answer.length_tokens),
        },
        "planners": {name: _course(answer, name) for name in answer.courses},
        "refusals": dict(answer.refusals),
        "notes": answer.notes,
    }


def _course(answer: TraceAnswer, name: str) -> dict[str, Any]:
    one, subject = answer.courses[name], answer.subject
    plans: dict[int, tuple[int, Plan]] = {}
    for window in one.windows:
        plans.setdefault(id(window.wanted), (len(plans), window.wanted))
    costs, power = subject.costs(answer.phase), subject.platform.power
    return {
        "gpu_hours": one.gpu_hours,
        "energy_kwh": one.energy_kwh,
        "mean_memory_bytes": one.mean_memory_bytes,
        "attained_frac": one.attained_frac,
        "unplanned_windows": one.unplanned_windows,
        "plans": [
            {"gpus": plan.gpus, "operators": [row_document(row) for row in operator_rows(plan, costs, power)]}
            for _, plan in plans.values()
        ],
        "windows": [_window(each, plans[id(each.wanted)][0]) for each in one.windows],
    }


def _window(window: WindowResult, plan: int) -> dict[str, Any]:
    """``plan``: its place in the list of plans. Busy shares are those of one replica, by operator."""
    judged = window.judged
    names = window.wanted.table.names
    return {
        "start_s": window.demand.start_s,
        "passes_per_s": window.demand.passes_per_s,
        "length_tokens": window.demand.length_tokens,
        "requests": len(window.demand.arrivals_s),
        "requests_within_objective": window.met_requests,
        "plan": plan,
        "gpus": window.wanted.gpus,
        "power_w": window.power_w,
        "is_unplanned": window.is_unplanned,
        "bottleneck": bottleneck(window),
        "busy_fracs": {} if judged is None else dict(zip(names, judged.replica_busy_fracs.tolist(), strict=True)),
    }
