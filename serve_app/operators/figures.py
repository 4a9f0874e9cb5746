"""Draws panels as SVG with matplotlib, an optional dependency: axes with units, one legend, no scripts."""

import html
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

from serve_app.operators.panels import Bars, Curve, Figure, Panel

_PANEL_INCHES = (3.9, 3.0)
_BAR_PANEL_INCHES = (5.8, 4.2)
_MOST_TICKS = 6  # numbers on a logarithmic axis
# Width of the first of few curves, and of the others: the first one stays in view where others lie on it.
_FIRST_WIDTH, _WIDTH, _FEW_CURVES = 3.2, 1.3, 3


def svg_of(figure: Figure) -> str:
    """A figure as an <svg> element. Raises ImportError: matplotlib is missing."""
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    rows = -(-len(figure.panels) // figure.columns)
    width, height = _BAR_PANEL_INCHES if isinstance(figure.panels[0], Bars) else _PANEL_INCHES
    # Texts stay texts, and the same figure has the same bytes.
    settings: dict[str, Any] = {"svg.fonttype": "none", "svg.hashsalt": figure.title, "font.size": 9}
    with matplotlib.rc_context(settings):
        canvas = Canvas(figsize=(width * figure.columns, height * rows + 0.6), layout="constrained")
        colors = _colors(matplotlib, figure.panels)
        for place, panel in enumerate(figure.panels, start=1):
            axes = canvas.add_subplot(rows, figure.columns, place)
            if isinstance(panel, Bars):
                _draw_bars(axes, panel, colors)
            else:
                _draw_curves(axes, panel, colors)
        _legend(canvas)
        data = io.BytesIO()
        canvas.savefig(data, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return _inline(data.getvalue().decode(), figure.title)


def _colors(matplotlib: Any, panels: Sequence[Panel | Bars]) -> Mapping[str, Any]:
    """One color for each name, the same in all panels."""
    names = dict.fromkeys(
        name
        for panel in panels
        for name in (panel.values if isinstance(panel, Bars) else [curve.name for curve in panel.curves])
    )
    table = matplotlib.color_sequences["tab10" if len(names) <= 10 else "tab20"]
    return {name: table[place % len(table)] for place, name in enumerate(names)}


def _draw_curves(axes: Any, panel: Panel, colors: Mapping[str, Any]) -> None:
    for number, curve in enumerate(panel.curves):
        is_wide = number == 0 and 1 < len(panel.curves) <= _FEW_CURVES
        style = {
            "color": colors[curve.name],
            "label": curve.name,
            "linewidth": _FIRST_WIDTH if is_wide else _WIDTH,
        }
        if panel.has_steps:
            x, y = _held(curve)
            axes.step(x, y, where="post", **style)
        else:
            axes.plot(curve.x, _gaps(curve), marker="o", markersize=2.5, **style)
    axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
    if panel.is_log_x:
        _log_x(axes, panel)
    axes.set_yscale("log" if panel.is_log_y else "linear")
    if panel.y_names:
        axes.set_yticks(range(len(panel.y_names)), panel.y_names)
        axes.set_ylim(-0.5, len(panel.y_names) - 0.5)
    elif not panel.is_log_y:
        _from_0(axes, panel)
    axes.grid(alpha=0.3)


def _from_0(axes: Any, panel: Panel) -> None:
    """An axis of values that begins at 0, with room above the largest one; values below 0 stay in view."""
    values = [value for curve in panel.curves for value in curve.y if value is not None]
    if values and min(values) >= 0.0:
        axes.set_ylim(0.0, 1.08 * max(values) or 1.0)


def _held(curve: Curve) -> tuple[list[float], list[float]]:
    """The points of a step curve; the last value holds as long as the one before."""
    x, y = list(curve.x), _gaps(curve)
    if len(x) > 1:
        x, y = [*x, 2 * x[-1] - x[-2]], [*y, y[-1]]
    return x, y


def _log_x(axes: Any, panel: Panel) -> None:
    """A logarithmic axis with the values of the points as its numbers, and few of them, so that none overlap."""
    values = sorted({value for curve in panel.curves for value in curve.x})
    shown = values[:: -(-len(values) // _MOST_TICKS)]
    axes.set_xscale("log")
    axes.set_xticks(shown, [f"{value / 1e3:.3g}k" if value >= 1e4 else f"{value:.4g}" for value in shown])
    axes.set_xticks([], minor=True)


def _gaps(curve: Curve) -> list[float]:
    return [float("nan") if value is None else value for value in curve.y]


def _draw_bars(axes: Any, panel: Bars, colors: Mapping[str, Any]) -> None:
    """Horizontal bars, the first group at the top."""
    places = range(len(panel.groups))
    left = [0.0] * len(panel.groups)
    thick = 0.8 if panel.is_stacked else 0.8 / len(panel.values)
    for number, (name, values) in enumerate(panel.values.items()):
        shift = 0.0 if panel.is_stacked else (number - (len(panel.values) - 1) / 2) * thick
        widths = [value or 0.0 for value in values]
        at = [place + shift for place in places]
        axes.barh(at, widths, height=thick, left=left, color=colors[name], label=name)
        if panel.is_stacked:
            left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set(title=panel.title, xlabel=panel.value_label)
    if panel.most is not None:
        axes.set_xlim(0.0, panel.most * 1.05)
    axes.set_yticks(list(places), panel.groups)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)


def _legend(canvas: Any) -> None:
    """One legend below all panels, with each name once."""
    found: dict[str, Any] = {}
    for axes in canvas.axes:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(name, handle)
    canvas.legend(
        list(found.values()), list(found), loc="outside lower center", ncols=min(len(found), 6), frameon=False
    )


def _inline(text: str, title: str) -> str:
    """An SVG file as an element of a page: without its header, and without ids that nothing refers to."""
    body = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    used = set(re.findall(r'(?:url\(#|href="#)([\w-]+)', body))
    body = re.sub(r' id="([\w.-]+)"', lambda found: found.group(0) if found.group(1) in used else "", body)
    return body.replace("<svg", f'<svg role="img" aria-label="{html.escape(title)}"', 1)
