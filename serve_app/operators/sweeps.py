"""GPUs at operator level against model level by length, by rate and by model, for the page."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autoscale.operators.costs import Phase
from autoscale.operators.demand import Demand, PlanError
from serve_app.operators.inputs import UNITS, Subject, rate_text
from serve_app.operators.panels import Bars, Curve, Figure, Panel
from serve_app.operators.sensitivity import TABLE_1

# The planners of a sweep: the baseline, and the planner that needs the fewest GPUs.
_PLANNERS = {"model": "model level", "search": "search (operator level)"}
_LENGTHS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
_RATES = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0)


@dataclass(frozen=True, kw_only=True)
class Base:
    """The point around which values are changed one at a time. ``slo_s``: None: the default objective of each point."""

    subject: Subject
    phase: Phase
    passes_per_s: float
    length_tokens: int
    slo_s: float | None


def sweep_figures(base: Base) -> list[Figure]:
    """Two figures: by length and by rate, and by model."""
    lengths = [max(1, round(base.length_tokens * factor)) for factor in _LENGTHS]
    rates = [base.passes_per_s * factor for factor in _RATES]
    by_length = _counts(lengths, lambda length: (base.subject, base.passes_per_s, int(length)), base)
    by_rate = _counts(rates, lambda rate: (base.subject, rate, base.length_tokens), base)
    unit = UNITS[base.phase]
    x_length = "tokens of the prompt" if base.phase is Phase.PREFILL else "tokens of context"
    panels = [
        _panel(f"GPUs by length, {rate_text(base.passes_per_s)} {unit}", x_length, lengths, by_length),
        _panel(f"GPUs by rate, {base.length_tokens} tokens", unit, rates, by_rate),
        _saved_panel("GPUs saved, by length", x_length, lengths, by_length),
        _saved_panel("GPUs saved, by rate", unit, rates, by_rate),
    ]
    slo = "the default objective of each length" if base.slo_s is None else f"an objective of {base.slo_s * 1e3:.4g} ms"
    return [
        Figure(
            title=f"{base.subject.name}, {base.phase}: GPUs by length and by rate",
            caption=f"With {slo}. A gap: no plan meets the objective. Below 0: operator level takes more GPUs.",
            panels=panels,
            columns=4,
        ),
        _models(base),
    ]


def _models(base: Base) -> Figure:
    """The models of Table 1 and that of the base, ascending by weights."""
    names = dict.fromkeys((*TABLE_1, base.subject.name))
    subjects = [base.subject if name == base.subject.name else base.subject.with_model(name) for name in names]
    subjects.sort(key=lambda one: one.graph.weights)
    places = list(range(len(subjects)))
    free = Base(
        subject=base.subject,
        phase=base.phase,
        passes_per_s=base.passes_per_s,
        length_tokens=base.length_tokens,
        slo_s=None,
    )
    counts = _counts(places, lambda at: (subjects[int(at)], base.passes_per_s, base.length_tokens), free)
    groups = [f"{one.name.rsplit('/', 1)[-1]} ({one.graph.weights / 1e9:.2g}B)" for one in subjects]
    return Figure(
        title=f"{base.phase}: GPUs by model",
        caption=f"{rate_text(base.passes_per_s)} {UNITS[base.phase]}, {base.length_tokens} tokens; each model with its "
        "own default objective. A missing bar: no plan.",
        panels=[Bars(title="GPUs by model size", value_label="GPUs", groups=groups, values=dict(counts))],
        columns=1,
    )


def _counts(
    points: Sequence[float], at: Callable[[float], tuple[Subject, float, int]], base: Base
) -> dict[str, list[float | None]]:
    """GPUs of each planner at each point; None: it has no plan."""
    found: dict[str, list[float | None]] = {text: [] for text in _PLANNERS.values()}
    for point in points:
        subject, rate, length = at(point)
        for name, text in _PLANNERS.items():
            try:
                slo_s = subject.objective(base.phase, length, base.slo_s).slo_s
                demand = Demand(passes_per_s=rate, length_tokens=length, slo_s=slo_s)
                found[text].append(float(subject.planner(name, base.phase, slo_s).at(demand).gpus))
            except PlanError:
                found[text].append(None)
    return found


def _panel(title: str, x: str, points: Sequence[float], counts: dict[str, list[float | None]]) -> Panel:
    curves = [Curve(name=name, x=points, y=values) for name, values in counts.items()]
    return Panel(title=title, x_label=x, y_label="GPUs", curves=curves, is_log_x=True)


def _saved_panel(title: str, x: str, points: Sequence[float], counts: dict[str, list[float | None]]) -> Panel:
    model, ours = counts.values()
    shares = [
        100.0 * (1.0 - own / whole) if own is not None and whole else None
        for own, whole in zip(ours, model, strict=True)
    ]
    curve = Curve(name="GPUs saved against model level", x=points, y=shares)
    return Panel(title=title, x_label=x, y_label="GPUs saved, %", curves=[curve], is_log_x=True)
