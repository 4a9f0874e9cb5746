"""Draws savings by length and by rate, as the paper's Figs. 10 and 11."""

from pathlib import Path

from tests.lab.operators.paper_figures import Curves
from tests.lab.operators.readings import OWN_QUEUES, Saved

_MEASURES = {"GPUs": "gpu_frac", "energy": "energy_frac", "memory": "memory_frac"}


def draw(curves: Curves, path: Path) -> None:
    """Write a picture with a column for each measure, lengths above and rates below."""
    from matplotlib.figure import Figure  # a development dependency

    figure = Figure(figsize=(13, 7), layout="constrained")
    panels = figure.subplots(2, len(_MEASURES), sharey="row")
    for row, (found, words) in enumerate(
        ((curves.lengths, "tokens of a prompt"), (curves.rates, "prompts per second"))
    ):
        for panel, (name, field) in zip(panels[row], _MEASURES.items(), strict=True):
            for (model, reading), curve in found.items():
                style = "-" if reading == OWN_QUEUES else "--"
                values = [_percent(one, field) for one in curve.values()]
                panel.plot(list(curve), values, style, label=f"{model}, {reading}")
            panel.set_title(f"{name} saved, %")
            panel.set_xlabel(words)
            panel.axhline(0.0, color="grey", linewidth=0.5)
            if row == 0:
                panel.set_xscale("log", base=2)
    panels[0][0].legend(fontsize=8)
    figure.savefig(path)


def _percent(one: Saved, field: str) -> float:
    return 100.0 * float(getattr(one, field))
