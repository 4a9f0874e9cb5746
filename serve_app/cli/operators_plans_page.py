"""The page of plans for one demand."""

from collections.abc import Sequence

from autoscale.operators.comparison import saved
from autoscale.operators.costs import Phase
from serve_app.cli.operators_page import beside, drawn, heading, notes, page, paragraph, study_sections, table
from serve_app.cli.operators_view import (
    PLANNER_TEXTS,
    assumption_lines,
    head_line,
    operator_cells,
    operator_heads,
    planner_cells,
    planner_heads,
)
from serve_app.operators.answer import PhaseAnswer
from serve_app.operators.inputs import objective_text
from serve_app.operators.panels import Bars, Figure
from serve_app.operators.sweeps import Base


def plans_page(answers: Sequence[PhaseAnswer]) -> str:
    """The page of all phases of one demand."""
    subject = answers[0].subject
    title = f"What operator-level scaling saves: {subject.name} on {subject.platform.gpu.name}"
    sections = [section for answer in answers for section in _phase_sections(answer)]
    if compared := [answer for answer in answers if "model" in answer.plans and len(answer.plans) > 1]:
        sections += [
            heading("Prefill against decode" if len(compared) > 1 else "Savings"),
            drawn(_savings_figure(compared)),
        ]
    sections += study_sections([_base(answer) for answer in answers])
    return page(title, assumption_lines(subject), sections)


def _phase_sections(answer: PhaseAnswer) -> list[str]:
    """Tables and figures of one phase."""
    has_shares = answer.subject.platform.shares is not None
    rows = [[PLANNER_TEXTS[name], *planner_cells(answer, name)] for name in answer.plans]
    rows += [[PLANNER_TEXTS[name], "no plan"] for name in answer.refusals]
    sections = [
        heading(head_line(answer)),
        paragraph(objective_text(answer.phase, answer.objective, answer.demand.length_tokens)),
        table(["", *planner_heads(answer)], rows),
        notes(answer.notes),
        drawn(_time_figure(answer)),
        drawn(_busy_figure(answer)),
    ]
    tables = []
    for name, operators in answer.rows.items():
        lines = [
            [f"{row.name}{' *' if row.is_bottleneck else ''}", *operator_cells(row, has_shares)] for row in operators
        ]
        head = heading(f"{answer.phase}, {PLANNER_TEXTS[name]}: operators", 3)
        tables.append(head + table(["operator", *operator_heads(has_shares)], lines))
    sections.append(beside(tables))
    sections.append(paragraph("* the bottleneck, ! the time is estimated and not measured on this GPU"))
    return sections


def _time_figure(answer: PhaseAnswer) -> Figure:
    """Where the time of a pass goes, by operator and planner."""
    panels = []
    most_s = max(row.time_s + row.wait_s + row.transfer_s for rows in answer.rows.values() for row in rows)
    for name, rows in answer.rows.items():
        values = {
            "service T_v": [row.time_s * 1e3 for row in rows],
            "wait W_v": [row.wait_s * 1e3 for row in rows],
            "move C_v": [row.transfer_s * 1e3 for row in rows],
        }
        groups = [f"{row.name}{' *' if row.is_bottleneck else ''}" for row in rows]
        panels.append(
            Bars(
                title=PLANNER_TEXTS[name],
                value_label="ms of a pass",
                groups=groups,
                values=values,
                is_stacked=True,
                most=most_s * 1e3,
            )
        )
    return Figure(
        title=f"{answer.phase}: time of a pass by operator",
        caption=f"All layers. * the bottleneck. The objective is {answer.objective.slo_s * 1e3:.4g} ms for the sum.",
        panels=panels,
        columns=len(panels),
    )


def _busy_figure(answer: PhaseAnswer) -> Figure:
    """Replicas and busy shares by operator, planners beside each other."""
    names = [row.name for row in next(iter(answer.rows.values()))]
    busy = {PLANNER_TEXTS[name]: [100 * row.busy_frac for row in rows] for name, rows in answer.rows.items()}
    replicas = {
        PLANNER_TEXTS[name]: [float(row.setting.replicas) for row in rows] for name, rows in answer.rows.items()
    }
    work = {
        PLANNER_TEXTS[name]: [row.busy_frac * row.setting.replicas * row.setting.parallel for row in rows]
        for name, rows in answer.rows.items()
    }
    return Figure(
        title=f"{answer.phase}: replicas and utilisation by operator",
        caption="Busy: share of time that one replica keeps its GPUs busy. GPU time: GPUs that all replicas keep busy.",
        panels=[
            Bars(title="Replicas", value_label="replicas", groups=names, values=replicas),
            Bars(title="Busy share of a replica", value_label="busy, %", groups=names, values=busy),
            Bars(title="GPU time", value_label="GPUs busy in the mean", groups=names, values=work),
        ],
        columns=3,
    )


def _savings_figure(answers: Sequence[PhaseAnswer]) -> Figure:
    """Savings against model level by phase."""
    panels = []
    for answer in answers:
        base = answer.plans["model"]
        values: dict[str, Sequence[float | None]] = {}
        for name, plan in answer.plans.items():
            if name != "model":
                part = saved(plan, base, answer.power)
                values[PLANNER_TEXTS[name]] = [100 * part.gpus_frac, 100 * part.memory_frac, 100 * part.power_frac]
        groups = ["GPUs", "memory", "power"]
        panels.append(
            Bars(title=str(answer.phase), value_label="saved against model level, %", groups=groups, values=values)
        )
    caption = "Below 0: the plan needs more than model level."
    if answers[0].fixed_gpus is not None:
        caption += " With fixed GPUs, each plan is for the highest rate of its planner."
    return Figure(title="Savings by phase", caption=caption, panels=panels, columns=len(panels))


def _base(answer: PhaseAnswer) -> Base:
    """The point around which sweeps go; with fixed GPUs the rate that was found."""
    rate = max(answer.rates.values()) if answer.rates else answer.demand.passes_per_s
    return Base(
        subject=answer.subject,
        phase=answer.phase,
        passes_per_s=rate or _REFERENCE_RATES[answer.phase],
        length_tokens=answer.demand.length_tokens,
        slo_s=answer.objective.slo_s if answer.objective.parallel is None else None,
    )


# Passes per second of the sweeps where the demand has none, so that they show anything.
_REFERENCE_RATES = {Phase.PREFILL: 20.0, Phase.DECODE: 5000.0}
