"""Figures of ``tandem operators plan --html``: what is drawn has labels, and its values are those of the operators."""

import math
from pathlib import Path
from xml.etree import ElementTree

import pytest

from autoscale.operators.costs import Phase
from autoscale.operators.demand import Demand
from autoscale.operators.sm_shares import load_shares
from serve_app.operators.figures import svg_of
from serve_app.operators.inputs import Subject, subject
from serve_app.operators.panels import Bars, Curve, Figure, Panel
from serve_app.operators.sensitivity import TABLE_1, sensitivity_figure
from serve_app.operators.sweeps import Base, sweep_figures

CONTENTION = Path(__file__).parents[3] / "configs" / "operators" / "contention"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def qwen() -> Subject:
    return subject("qwen2-0.5b", "A100", "bf16", None, most_parallel=8, has_shares=False)


def texts(svg: str) -> list[str]:
    return ["".join(one.itertext()) for one in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_a_figure_is_one_element_with_all_its_words() -> None:
    curves = [Curve(name="a & b", x=[1, 16384], y=[2.0, None]), Curve(name="c", x=[1, 16384], y=[3.0, 4.0])]
    figure = Figure(
        title='times of "a" & <b>',
        caption="",
        panels=[
            Panel(title="Time", x_label="tokens", y_label="time, ms", curves=curves, is_log_x=True, is_log_y=True),
            Panel(title="GPUs", x_label="time, s", y_label="GPUs", curves=curves, has_steps=True),
            Panel(title="Bottleneck", x_label="time, s", y_label="", curves=curves, y_names=("norm", "experts")),
        ],
        columns=3,
    )
    svg = svg_of(figure)
    assert ElementTree.fromstring(svg).get("aria-label") == figure.title
    assert "<script" not in svg
    found = texts(svg)
    for word in ("Time", "tokens", "time, ms", "16.4k", "GPUs", "time, s", "norm", "experts"):
        assert word in found
    assert found.count("a & b") == 1  # one legend for all panels
    assert svg_of(figure) == svg


@pytest.mark.parametrize("is_stacked", [False, True])
def test_bars_have_their_groups_and_a_unit(is_stacked: bool) -> None:
    values = {"model": [1.0, None], "search": [2.0, 3.0]}
    bars = Bars(title="GPUs", value_label="GPUs, count", groups=["x", "y"], values=values, is_stacked=is_stacked)
    found = texts(svg_of(Figure(title="t", caption="", panels=[bars], columns=1)))
    assert {"GPUs", "GPUs, count", "x", "y", "model", "search"} <= set(found)


@pytest.mark.parametrize("phase", list(Phase))
def test_sensitivities_are_those_of_the_costs(qwen: Subject, phase: Phase) -> None:
    figure = sensitivity_figure(qwen, phase, 1024, load_shares(CONTENTION / "h100_80gb_sm_shares.csv"))
    costs = qwen.costs(phase)
    panels = {panel.title: panel for panel in figure.panels if isinstance(panel, Panel)}
    assert len(panels) == 8
    for panel in panels.values():
        assert panel.x_label and panel.y_label and panel.curves
        assert all(len(curve.x) == len(curve.y) for curve in panel.curves)
        assert all(value is None or math.isfinite(value) for curve in panel.curves for value in curve.y)
    batch = 1 if phase is Phase.PREFILL else 32
    (attention,) = [curve for curve in panels["Time by length (Fig. 2)"].curves if curve.name == "attention"]
    times = [
        costs.time_s("attention", parallel=1, length_tokens=int(length), batch=batch)
        for length in (attention.x[0], attention.x[-1])
    ]
    assert attention.y[-1] == pytest.approx(times[1] / times[0])
    assert attention.y[0] == 1.0
    (exchange,) = [curve for curve in panels["Time by parallelism"].curves if curve.name == "mlp_all_reduce"]
    assert exchange.y[0] is None
    assert exchange.y[1] is not None


def test_the_models_of_table_1_are_shipped(qwen: Subject) -> None:
    for name in TABLE_1:
        assert qwen.with_model(name).graph.weights > 7e9


def test_a_sweep_counts_the_gpus_of_the_planners(qwen: Subject) -> None:
    base = Base(subject=qwen, phase=Phase.PREFILL, passes_per_s=100.0, length_tokens=1024, slo_s=None)
    over, models = sweep_figures(base)
    by_length, by_rate, _, saved = (panel for panel in over.panels if isinstance(panel, Panel))
    assert [curve.name for curve in by_rate.curves] == ["model level", "search (operator level)"]
    slo_s = qwen.objective(Phase.PREFILL, 1024, None).slo_s
    for curve, name in zip(by_rate.curves, ("model", "search"), strict=True):
        plan = qwen.planner(name, Phase.PREFILL, slo_s).at(
            Demand(passes_per_s=curve.x[-1], length_tokens=1024, slo_s=slo_s)
        )
        assert curve.y[-1] == plan.gpus
    whole, own = (curve.y[-1] for curve in by_rate.curves)
    assert whole and own
    assert saved.curves[0].y[-1] == pytest.approx(100 * (1 - own / whole))
    assert by_length.curves[0].y == sorted(by_length.curves[0].y, key=lambda value: value or 0.0)
    (bars,) = models.panels
    assert isinstance(bars, Bars)
    assert bars.groups[0].startswith("qwen2-0.5b ")
    assert len(bars.groups) == 6
