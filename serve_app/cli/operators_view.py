"""What ``tandem operators plan`` prints: for each phase the planners, and the operators of the best plan."""

from collections.abc import Sequence

from rich.table import Table

from autoscale.operators.comparison import ESTIMATES, OperatorRow, saved
from autoscale.operators.energy import mean_power_w
from autoscale.operators.plan import Plan
from serve_app.cli.sim_report import print_notes, print_whole
from serve_app.cli.terminal import console, figures_table
from serve_app.operators.answer import PhaseAnswer
from serve_app.operators.inputs import UNITS, Subject, objective_text, rate_text

# Words of a plan's planner. The first column of the tables has them.
PLANNER_TEXTS = {
    "model": "model level",
    "paper_greedy": "greedy (paper)",
    "greedy": "greedy (ours)",
    "search": "search (ours)",
    "steady": "steady (ours)",
    "apart": "apart (paper)",
}


def show(answers: Sequence[PhaseAnswer]) -> None:
    """Print the answers."""
    print_lines(assumption_lines(answers[0].subject))
    for answer in answers:
        print_lines(
            ["", head_line(answer), objective_text(answer.phase, answer.objective, answer.demand.length_tokens)]
        )
        print_whole(planner_table(answer))
        print_whole(operator_table(answer, answer.best))
        print_notes(answer.notes)


def print_lines(lines: Sequence[str]) -> None:
    """Print lines as they are."""
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def assumption_lines(subject: Subject) -> list[str]:
    """What all plans assume."""
    platform = subject.platform
    lines = [
        f"{subject.name} ({subject.dtype}) on {platform.gpu.name}; operators share GPUs by {platform.sharing_text}; "
        f"power {platform.power_text}"
    ]
    if subject.graph.shape.vision is not None:
        lines.append("prompts are counted as text: the vision encoder takes no time")
    return lines


def head_line(answer: PhaseAnswer) -> str:
    """The demand of a phase in one line."""
    length = answer.demand.length_tokens
    what = f"prompts of {length} tokens" if answer.phase == "prefill" else f"{length} tokens of context"
    if answer.fixed_gpus is not None:
        return f"{answer.phase}: the highest rate of {answer.fixed_gpus} GPUs, {what}"
    return f"{answer.phase}: {rate_text(answer.demand.passes_per_s)} {UNITS[answer.phase]}, {what}"


def planner_table(answer: PhaseAnswer) -> Table:
    """One line for each planner; what is saved is a share of the model level's."""
    table = figures_table("", [head.replace(" ", "\n", 1) for head in planner_heads(answer)])
    for name in answer.plans:
        table.add_row(PLANNER_TEXTS[name], *planner_cells(answer, name))
    for name in answer.refusals:
        table.add_row(PLANNER_TEXTS[name], "no plan")
    return table


def planner_heads(answer: PhaseAnswer) -> list[str]:
    """Heads of the columns of a planner."""
    heads = [UNITS[answer.phase], "x model"] if answer.rates else []
    heads += ["GPUs", "memory GB", "power kW", "latency ms", "GPUs busy"]
    return [*heads, *(["saved GPUs", "saved memory", "saved power"] if _has_savings(answer) else []), "bottleneck"]


def planner_cells(answer: PhaseAnswer, name: str) -> list[str]:
    """The columns of one planner that has a plan."""
    plan = answer.plans[name]
    savings = saved_cells(answer, name) if _has_savings(answer) else []
    return [*_rate_cells(answer, name), *_plan_cells(answer, plan), *savings, plan.bottleneck]


def _has_savings(answer: PhaseAnswer) -> bool:
    return "model" in answer.plans and len(answer.plans) > 1 and not answer.rates


def saved_cells(answer: PhaseAnswer, name: str) -> list[str]:
    """What a plan saves against model level: GPUs, memory, power."""
    if name == "model":
        return ["", "", ""]
    part = saved(answer.plans[name], answer.plans["model"], answer.power)
    return [f"{value:.0%}" for value in (part.gpus_frac, part.memory_frac, part.power_frac)]


def _rate_cells(answer: PhaseAnswer, name: str) -> list[str]:
    if not answer.rates:
        return []
    base = answer.rates.get("model")
    return [f"{answer.rates[name]:.4g}", f"{answer.rates[name] / base:.2f}" if base else "-"]


def _plan_cells(answer: PhaseAnswer, plan: Plan) -> list[str]:
    judged = plan.evaluation
    return [
        str(plan.gpus),
        f"{plan.memory_bytes / 1e9:.0f}",
        f"{mean_power_w(plan, answer.power) / 1e3:.2f}",
        f"{judged.latency_s * 1e3:.1f} of {answer.objective.slo_s * 1e3:.1f}",
        f"{plan.busy_gpus / plan.gpus:.0%}",
    ]


def operator_heads(has_shares: bool) -> list[str]:
    """Heads of a table of operators."""
    shares = ["SMs"] if has_shares else []
    return ["replicas", "batch", "TP", *shares, "busy", "time ms", "wait ms", "move ms", "source of the time"]


def operator_cells(row: OperatorRow, has_shares: bool) -> list[str]:
    """One operator; an estimate is marked by an exclamation mark."""
    shares = [f"{row.setting.sm_share_percent} %"] if has_shares else []
    mark = " !" if row.source in ESTIMATES else ""
    return [
        str(row.setting.replicas),
        str(row.setting.batch),
        str(row.setting.parallel),
        *shares,
        f"{row.busy_frac:.1%}",
        f"{row.time_s * 1e3:.3f}",
        f"{row.wait_s * 1e3:.3f}",
        f"{row.transfer_s * 1e3:.3f}",
        f"{row.source}{mark}",
    ]


def operator_table(answer: PhaseAnswer, name: str) -> Table:
    """The operators of one plan, in the order of a pass."""
    has_shares = answer.subject.platform.shares is not None
    title = f"operators of {PLANNER_TEXTS[name]}; times of one batch, all layers; * the bottleneck, ! estimated"
    table = figures_table("", operator_heads(has_shares), title=title)
    for row in answer.rows[name]:
        table.add_row(f"{row.name}{' *' if row.is_bottleneck else ''}", *operator_cells(row, has_shares))
    return table
