"""The page of a trace that is planned window by window."""

from collections.abc import Sequence

from autoscale.operators.over_time import Course
from serve_app.cli.operators_page import drawn, heading, notes, page, paragraph, study_sections, table
from serve_app.cli.operators_trace_view import COURSE_HEADS, course_cells, replanning_text
from serve_app.cli.operators_view import PLANNER_TEXTS, assumption_lines
from serve_app.operators.inputs import UNITS, objective_text
from serve_app.operators.panels import Curve, Figure, Panel
from serve_app.operators.sweeps import Base
from serve_app.operators.trace import Replanning, TraceAnswer, bottleneck

# Operators with curves over time: those with the most GPU time.
_MOST_OPERATORS = 8


def trace_page(answers: Sequence[TraceAnswer], replanning: Replanning) -> str:
    """The page of all phases of a trace."""
    subject = answers[0].subject
    title = f"What operator-level scaling saves over time: {subject.name} on {subject.platform.gpu.name}"
    sections: list[str] = []
    for answer in answers:
        rows = [[PLANNER_TEXTS[name], *course_cells(answer, name)] for name in answer.courses]
        rows += [[PLANNER_TEXTS[name], "no plan"] for name in answer.refusals]
        sections += [
            heading(f"{answer.phase}: {answer.requests:,} requests, mean {answer.length_tokens} tokens"),
            paragraph(objective_text(answer.phase, answer.objective, answer.length_tokens)),
            table(["", *COURSE_HEADS], rows),
            notes(answer.notes),
            drawn(_load_figure(answer)),
            *(drawn(_operators_figure(answer, name)) for name in answer.courses),
        ]
    sections += study_sections([_base(answer) for answer in answers])
    return page(title, [*assumption_lines(subject), replanning_text(replanning)], sections)


def _load_figure(answer: TraceAnswer) -> Figure:
    """The demand, and GPUs, power and attainment of each planner."""
    first = next(iter(answer.courses.values()))
    times = _times(first)
    demand = [window.demand.passes_per_s for window in first.windows]
    lengths = [window.demand.length_tokens or None for window in first.windows]
    gpus, power, within = (
        [_course_curve(name, one, what) for name, one in answer.courses.items()] for what in range(3)
    )
    time = "time, s"
    panels = [
        _over_time("Load", UNITS[answer.phase], [Curve(name="load", x=times, y=demand)]),
        _over_time("Length", "tokens in the mean", [Curve(name="load", x=times, y=lengths)]),
        _over_time("GPUs that are paid for", "GPUs", gpus),
        _over_time("Mean power", "kW", power),
    ]
    panels.append(Panel(title="Within the objective", x_label=time, y_label="requests, %", curves=within))
    return Figure(
        title=f"{answer.phase}: load, GPUs and power over time",
        caption=f"Windows of {first.window_s:g} s. GPUs are paid for from the instant at which they are wanted.",
        panels=panels,
        columns=3,
    )


def _course_curve(name: str, one: Course, what: int) -> Curve:
    """GPUs (0), power in kW (1) or requests within the objective in percent (2) of a planner."""
    values: list[float | None] = []
    for window in one.windows:
        requests = len(window.demand.arrivals_s)
        met = 100.0 * window.met_requests / requests if requests else None
        values.append((float(window.wanted.gpus), window.power_w / 1e3, met)[what])
    return Curve(name=PLANNER_TEXTS[name], x=_times(one), y=values)


def _operators_figure(answer: TraceAnswer, name: str) -> Figure:
    """Replicas, batch and utilisation of operators over time, and the bottleneck of each window."""
    one = answer.courses[name]
    names = _busiest(one)
    replicas = [Curve(name=each, x=_times(one), y=_setting(one, each, "replicas")) for each in names]
    batches = [Curve(name=each, x=_times(one), y=_setting(one, each, "batch")) for each in names]
    busy = [Curve(name=each, x=_times(one), y=_busy(one, each)) for each in names]
    worst = [bottleneck(window) for window in one.windows]
    marks = [
        Curve(name=each, x=_times(one), y=[float(place) if each == now else None for now in worst])
        for place, each in enumerate(names)
    ]
    panels = [
        _over_time("Replicas", "replicas", replicas),
        _over_time("Batch", "requests in a batch", batches),
        _over_time("Utilisation", "busy share of a replica, %", busy),
        Panel(title="Bottleneck", x_label="time, s", y_label="", curves=marks, y_names=names),
    ]
    return Figure(
        title=f"{answer.phase}, {PLANNER_TEXTS[name]}: operators over time",
        caption=f"The {len(names)} operators with the most GPU time, and those that are a bottleneck, which "
        "have the longest service, wait and move. A gap: no request came.",
        panels=panels,
        columns=4,
    )


def _busiest(one: Course) -> tuple[str, ...]:
    """Operators with the most GPU time, and all bottlenecks, in the order of a pass."""
    table = one.windows[0].wanted.table
    work = dict.fromkeys(table.names, 0.0)
    for window in one.windows:
        if window.judged is not None:
            for place, name in enumerate(table.names):
                setting = window.wanted.settings[name]
                busy = float(window.judged.replica_busy_fracs[place])
                work[name] += busy * setting.replicas * setting.parallel
    chosen = set(sorted(work, key=lambda name: -work[name])[:_MOST_OPERATORS])
    chosen |= {worst for window in one.windows if (worst := bottleneck(window)) is not None}
    return tuple(name for name in table.names if name in chosen)


def _setting(one: Course, name: str, what: str) -> list[float | None]:
    return [float(getattr(window.wanted.settings[name], what)) for window in one.windows]


def _busy(one: Course, name: str) -> list[float | None]:
    place = one.windows[0].wanted.table.names.index(name)
    return [
        None if window.judged is None else 100.0 * float(window.judged.replica_busy_fracs[place])
        for window in one.windows
    ]


def _times(one: Course) -> list[float]:
    return [window.demand.start_s for window in one.windows]


def _over_time(title: str, label: str, curves: Sequence[Curve]) -> Panel:
    return Panel(title=title, x_label="time, s", y_label=label, curves=curves, has_steps=True)


def _base(answer: TraceAnswer) -> Base:
    """The mean of the trace, around which sweeps go."""
    windows = next(iter(answer.courses.values())).windows
    return Base(
        subject=answer.subject,
        phase=answer.phase,
        passes_per_s=sum(window.demand.passes_per_s for window in windows) / len(windows),
        length_tokens=answer.length_tokens,
        slo_s=answer.objective.slo_s if answer.objective.parallel is None else None,
    )
