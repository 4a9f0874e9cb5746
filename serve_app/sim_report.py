"""A simulated comparison as a table, as JSON and as a page with pictures."""

import base64
import hashlib
import html
import io
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from itertools import cycle
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from autoscale.sim.config import BOUNDS, SimConfig, needs_profiles
from autoscale.sim.study import Bounds, Seed, Study, interval_row, mean_row
from kvtransfer.topology import Role

_BOUNDS = {name: name.replace("_", " ") for name in BOUNDS}
# More curves than these hide each other.
_MOST_CURVES = 4
_BOUND_MARKERS = ("x", "+", "s", "D")

Row = Mapping[str, Any]
# Each column: its head, and its text from the mean of a policy's figures.
_Columns = tuple[tuple[str, Callable[[Row], str]], ...]
_COLUMNS: _Columns = (
    ("TTFT p99 s", lambda row: _number(row["ttft_p99_s"], 1, 2)),
    ("TPOT p90 ms", lambda row: _number(row["tpot_p90_s"], 1e3, 1)),
    ("scale events", lambda row: f"{row['scale_events']:.0f}"),
    ("in band", lambda row: _percent(row["ratio_within_band_frac"])),
)
# Those that have an interval: head, figure and digits; the last two are of bounds.
_Spread = tuple[str, str, str]
_SPREADS: tuple[_Spread, ...] = (
    ("SLO met", "slo_attainment_frac", ".2%"),
    ("GPU hours", "gpu_hours", ".2f"),
    ("/oracle", "gpu_hours_over_oracle", ".2f"),
    ("/causal", "gpu_hours_over_causal_bound", ".2f"),
)
# With several groups, where there are no bounds to take multiples of.
_GROUPS_COLUMNS: _Columns = (
    (
        "by type",
        lambda row: "\n".join(f"{name} {hours:.2f}" for name, hours in sorted(row["gpu_hours_by_type"].items())),
    ),
    ("cost", lambda row: f"{row['cost']:.2f}"),
)
_MORE_COLUMNS: _Columns = (
    ("TTFT p50 s", lambda row: _number(row["ttft_p50_s"], 1, 2)),
    ("E2E p50 s", lambda row: _number(row["e2e_p50_s"], 1, 2)),
    ("goodput /s", lambda row: f"{row['goodput_requests_per_s']:.1f}"),
    ("peak replicas", lambda row: f"{row['peak_replicas']:.0f}"),
    ("flaps", lambda row: f"{row['flaps']:.0f}"),
    ("prefill busy", lambda row: _percent(row["prefill_utilization_frac"])),
    ("decode busy", lambda row: _percent(row["decode_utilization_frac"])),
    ("preemptions", lambda row: f"{row['preemptions']:.0f}"),
    ("failed", lambda row: f"{row['failed_requests']:.0f}"),
    ("cost", lambda row: f"{row['cost']:.2f}"),
    ("kWh", lambda row: _number(row["energy_kwh"], 1, 2)),
)


def caption(study: Study) -> str:
    """What was simulated, and what it was held to."""
    slo, measured = study.config.slo, len(study.seeds[0].scenario.measured_trace)
    seeds = f", mean of {len(study.seeds)} seeds and 95 % interval" if len(study.seeds) > 1 else ""
    return (
        f"{study.requests:,} requests x {study.rate_scale:.4g}, {measured:,} after the warm-up{seeds}; "
        f"{study.least_frac:.2%} within TTFT "
        f"max({slo.ttft_least_s:g} s, {slo.ttft_unloaded_factor:g} x unloaded) and TPOT {slo.tpot_s * 1e3:g} ms"
    )


def summary_table(study: Study) -> Table:
    """One line per policy and bound; with several seeds the mean and half the interval."""
    table = Table(
        title=caption(study),
        title_style="",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 0, 0, 1),
    )
    names = [*study.names, *_BOUNDS.values()]
    table.add_column("", no_wrap=True, min_width=max(len(name) for name in names))
    spreads, columns = _columns(study, _COLUMNS)
    for name in (*(head for head, _, _ in spreads), *(head for head, _ in columns)):
        table.add_column(name.replace(" ", "\n", 1), justify="right", no_wrap=True)
    for name in study.names:
        table.add_row(name, *_cells(study.rows(name), spreads, columns))
    table.add_section()
    for name, rows in study.bound_rows().items():
        table.add_row(_BOUNDS[name], *_cells(rows, spreads, columns), style="dim")
    return table


def print_whole(table: Table, console: Console) -> None:
    """Wider than the terminal where the names are long: lines then wrap, but no figure is cut."""
    needed = Measurement.get(console, console.options.update(max_width=1000), table).maximum
    Console(file=console.file, width=max(console.width, needed)).print(table)


def print_notes(flags: Sequence[str], console: Console) -> None:
    """Below a table, a line each."""
    for line in flags:
        console.print(f"[yellow]note:[/] {line}", highlight=False)


def _columns(study: Study, columns: _Columns) -> tuple[Sequence[_Spread], _Columns]:
    """The columns of a study, those with an interval first."""
    return (_SPREADS, columns) if study.bounds else (_SPREADS[:2], (*_GROUPS_COLUMNS, *columns))


def _cells(rows: Sequence[Row], spreads: Sequence[_Spread], columns: _Columns) -> list[str]:
    mean, interval = mean_row(rows), interval_row(rows)

    def spread(name: str, digits: str) -> str:
        if mean[name] is None:
            return "-"
        low, high = interval.get(name, (0.0, 0.0))
        half = (high - low) / 2 * (100.0 if digits.endswith("%") else 1.0)
        # One digit less, or the table is wider than a terminal.
        return f"{mean[name]:{digits}}" + (f"\n±{half:.{'2' if half < 1.0 else '1'}f}" if name in interval else "")

    return [*(spread(name, digits) for _, name, digits in spreads), *(text(mean) for _, text in columns)]


def _number(value: float | None, factor: float, digits: int) -> str:
    return "-" if value is None else f"{value * factor:.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def sources(settings: SimConfig, trace: Path, config: Path) -> dict[str, Any]:
    """What figures were made from, with hashes."""
    return {
        "tandem_version": version("tandem-serve"),
        "trace": {"file": trace.name, "sha256": hashlib.sha256(trace.read_bytes()).hexdigest()},
        "config": {"file": config.name, "sha256": hashlib.sha256(config.read_bytes()).hexdigest()},
        "profiles": {
            str(pool): {"name": profile.name, "sha256": hashlib.sha256(profile.model_dump_json().encode()).hexdigest()}
            for pool, profile in settings.profiles().items()
        },
    }


def document(
    study: Study, *, trace: Path, config: Path, start_s: float, duration_s: float | None, time_scale: float
) -> dict[str, Any]:
    """Everything as plain values, with hashes of what it was made from."""
    made_from = sources(study.config, trace, config)
    return {
        **made_from,
        "trace": {
            **made_from["trace"],
            "requests": study.requests,
            "simulated_requests": len(study.seeds[0].scenario.trace),
            "impossible_requests": study.impossible_requests,
            "start_s": start_s,
            "duration_s": duration_s,
            "time_scale": time_scale,
            "rate_scale": study.rate_scale,
        },
        "slo": {**study.config.slo.model_dump(), "least_frac": study.least_frac},
        "seeds": [seed.seed for seed in study.seeds],
        "flags": study.flags,
        **{name: _figures(rows) for name, rows in study.bound_rows().items()},
        **(_bound_sizes(study.bounds[0]) if study.bounds else {}),
        "policies": {
            name: {**_figures(study.rows(name)), "parameters": _parameters(study, name)} for name in study.names
        },
    }


def _bound_sizes(bounds: Bounds) -> dict[str, Any]:
    return {
        "causal_bound_sizes": {str(role): size for role, size in bounds.causal.sizes.items()},
        "smallest_static_counts": bounds.oracle.static.counts,
        "oracle_peak_replicas": bounds.oracle.plan.peak_replicas,
    }


def _figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    figures = mean_row(rows)
    if len(rows) > 1:
        figures["intervals"] = {name: list(each) for name, each in interval_row(rows).items()}
        figures["seeds"] = [dict(row) for row in rows]
    return figures


def _parameters(study: Study, name: str) -> dict[str, Any]:
    """What the policy ran with; profiles by name."""
    if name == "static" and name not in study.config.policies:
        return {"counts": study.bounds[0].oracle.static.counts}
    parameters = study.config.autoscale_config(name).model_dump(mode="json")
    for role in Role:
        if needs_profiles(parameters["policy"]["kind"]):
            parameters["policy"][str(role)] = parameters["policy"][str(role)]["name"]
    return parameters


def save_html(study: Study, report: Mapping[str, Any]) -> str:
    """One page that needs nothing else.

    Raises:
        ImportError: matplotlib is not installed.
    """
    pictures = "".join(
        f'<figure><img alt="{alt}" src="{source}"><figcaption class="small">{alt}</figcaption></figure>'
        for alt, source in _pictures(study)
    )
    trace = report["trace"]
    spreads, columns = _columns(study, (*_COLUMNS, *_MORE_COLUMNS))
    lines = [(name, study.rows(name)) for name in study.names]
    lines += [(_BOUNDS[name], rows) for name, rows in study.bound_rows().items()]
    rows = "".join(
        f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in (label, *_cells(each, spreads, columns)))}</tr>"
        for label, each in lines
    )
    names = ("", *(head for head, _, _ in spreads), *(head for head, _ in columns))
    heads = "".join(f"<th>{name}</th>" for name in names)
    flags = "".join(f"<li>{html.escape(line)}</li>" for line in study.flags)
    parameters = html.escape(_yaml({name: report["policies"][name]["parameters"] for name in study.names}))
    return _PAGE.format(
        title=html.escape(f"{trace['file']}: {', '.join(study.names)}"),
        caption=html.escape(caption(study)),
        hashes=html.escape(
            f"trace {trace['sha256'][:12]}, config {report['config']['file']} {report['config']['sha256'][:12]}, "
            f"seeds {report['seeds']}"
        ),
        heads=heads,
        rows=rows,
        flags=f"<h2>Notes</h2><ul>{flags}</ul>" if flags else "",
        pictures=pictures,
        parameters=parameters,
    )


def _yaml(value: Any) -> str:
    import yaml

    return str(yaml.safe_dump(value, sort_keys=False))


def _pictures(study: Study) -> list[tuple[str, str]]:
    import matplotlib  # an extra, which no other report needs

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "tandem"  # the same study, the same bytes
    from matplotlib import pyplot

    seed = study.seeds[0]
    which = f" of the first {_MOST_CURVES} policies" if len(study.names) > _MOST_CURVES else ""
    plots = [
        (f"GPU-hours and attainment, seed {seed.seed}", _plot_front),
        (f"replicas that ran over time{which}, seed {seed.seed}", _plot_replicas),
    ]
    drawn = []
    for alt, plot in plots:
        figure = plot(pyplot, study, seed)
        data = io.BytesIO()
        figure.savefig(data, format="svg", bbox_inches="tight", metadata={"Date": None})
        pyplot.close(figure)
        drawn.append((alt, "data:image/svg+xml;base64," + base64.b64encode(data.getvalue()).decode()))
    return drawn


def _plot_front(pyplot: Any, study: Study, seed: Seed) -> Any:
    figure, axes = pyplot.subplots(figsize=(9, 4.5))
    bounds = {} if seed.bounds is None else {_BOUNDS[name]: of for name, of in seed.bounds.results.items()}
    colors = _colors(pyplot, study)
    for (name, result), marker in zip(bounds.items(), _BOUND_MARKERS, strict=False):
        point = (result.outcome.gpu_hours, 100 * result.outcome.slo_attainment_frac)
        axes.plot(*point, marker, color="black", markersize=9, alpha=0.8, linestyle="none", label=name)
    for name, result in seed.policies.items():
        point = (result.outcome.gpu_hours, 100 * result.outcome.slo_attainment_frac)
        axes.plot(*point, "o", color=colors[name], markersize=9, alpha=0.8, linestyle="none", label=name)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    axes.axhline(100 * study.least_frac, color="black", linewidth=0.8, linestyle=":")
    axes.margins(x=0.15, y=0.1)
    axes.set(xlabel="GPU-hours", ylabel="requests within their objectives, %", title="Cheaper is left, better is up")
    axes.grid(alpha=0.3)
    return figure


def _colors(pyplot: Any, study: Study) -> dict[str, Any]:
    """A policy has the same in every picture."""
    return dict(zip(study.names, cycle(pyplot.get_cmap("tab20").colors), strict=False))


def _plot_replicas(pyplot: Any, study: Study, seed: Seed) -> Any:
    names = study.names[:_MOST_CURVES]
    figure, rows = pyplot.subplots(2, 1, figsize=(9, 6), sharex=True)
    end_s = seed.scenario.end_s
    colors = {**_colors(pyplot, study), "oracle": "black"}
    curves = {name: seed.policies[name].timeline for name in names}
    if seed.bounds is not None:
        curves = {"oracle": seed.bounds.oracle.result.timeline, **curves}
    for index, (role, axes) in enumerate(zip(Role, rows, strict=True), start=1):
        for name, timeline in curves.items():
            times = [point[0] for point in timeline] + [end_s]
            counts = [point[index] for point in timeline] + [timeline[-1][index]]
            width = 1.0 if name == "oracle" else 1.5
            axes.step(times, counts, where="post", label=name, color=colors[name], linewidth=width)
        axes.axvspan(0, seed.scenario.warm_up_s, color="0.9", label="warm-up, not measured")
        axes.set_ylabel(f"{role} replicas")
        axes.set_xlim(0, end_s)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    rows[0].legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=5, fontsize="small", frameon=False)
    rows[1].set_xlabel("seconds")
    return figure


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #222 }}
table {{ border-collapse: collapse; font-size: 13px }} td, th {{ padding: .25rem .35rem; text-align: right }}
th {{ border-bottom: 2px solid #444 }} td {{ border-bottom: 1px solid #ddd }}
td:first-child, th:first-child {{ text-align: left }} img {{ max-width: 100% }} figure {{ margin: 1.5rem 0 }}
pre {{ background: #f5f5f5; padding: 1rem; overflow-x: auto; font-size: 12px }}
.small {{ color: #666; font-size: 13px }} .wide {{ overflow-x: auto }}
</style></head><body>
<h1>{title}</h1><p>{caption}</p><p class="small">{hashes}</p>
<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>
{flags}{pictures}
<h2>What each policy ran with</h2><pre>{parameters}</pre>
</body></html>
"""
