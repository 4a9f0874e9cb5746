"""A simulated comparison as a table, as JSON and as a page with pictures.

Policies are compared with bounds: the oracle knows the whole trace, the causal bound only requests that have arrived
(``autoscale.sim`` explains these words, ``autoscale.sim.outcome`` the figures). A row has the figures of one seed.
"""

import base64
import hashlib
import html
import io
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from autoscale.sim.config import BOUNDS, SimConfig, needs_profiles
from autoscale.sim.study import Bounds, SeedResults, Study, interval_row, is_smallest_static, mean_row
from kvtransfer.topology import Role
from serve_app.cli.terminal import console, figure

# The bounds: name in a study -> name in a table.
_BOUNDS = {name: name.replace("_", " ") for name in BOUNDS}
# The most policies with a curve in a picture: more curves hide each other.
_MOST_CURVES = 4
# Matplotlib's markers of the bounds, in the order of BOUNDS.
_BOUND_MARKERS = ("x", "+", "s", "D")


class _Column(NamedTuple):
    """A column: its head, the name of its figure in a result, and the format of ``factor`` times the figure."""

    head: str
    figure: str
    form: str
    factor: float = 1.0


# Shown with an interval if there are several seeds. The last two are GPU-hours divided by those of a bound.
_SPREADS = (
    _Column("SLO met", "slo_attainment_frac", ".2%"),
    _Column("GPU hours", "gpu_hours", ".2f"),
    _Column("/oracle", "gpu_hours_over_oracle", ".2f"),
    _Column("/causal", "gpu_hours_over_causal_bound", ".2f"),
)
# They replace the last two of _SPREADS for a study of several groups, which has no bounds.
_GROUPS_COLUMNS = (_Column("by type", "gpu_hours_by_type", ".2f"), _Column("cost", "cost", ".2f"))
# In every table. "in band": share of the decisions with counts within one replica of the policy's ratio.
_COLUMNS = (
    _Column("TTFT p99 s", "ttft_p99_s", ".2f"),
    _Column("TPOT p90 ms", "tpot_p90_s", ".1f", 1e3),
    _Column("scale events", "scale_events", ".0f"),
    _Column("in band", "ratio_within_band_frac", ".0%"),
)
# Further columns, on the page only.
_MORE_COLUMNS = (
    _Column("TTFT p50 s", "ttft_p50_s", ".2f"),
    _Column("E2E p50 s", "e2e_p50_s", ".2f"),
    _Column("goodput /s", "goodput_requests_per_s", ".1f"),
    _Column("peak replicas", "peak_replicas", ".0f"),
    _Column("flaps", "flaps", ".0f"),
    _Column("prefill busy", "prefill_utilization_frac", ".0%"),
    _Column("decode busy", "decode_utilization_frac", ".0%"),
    _Column("preemptions", "preemptions", ".0f"),
    _Column("failed", "failed_requests", ".0f"),
    _Column("cost", "cost", ".2f"),
    _Column("kWh", "energy_kwh", ".2f"),
)


def caption(study: Study) -> str:
    """The simulated requests and their objectives, in one line."""
    slo, measured = study.config.slo, len(study.seeds[0].scenario.measured_trace)
    seeds = f", mean of {len(study.seeds)} seeds and 95 % interval" if len(study.seeds) > 1 else ""
    return (
        f"{study.requests:,} requests x {study.rate_scale:.4g}, {measured:,} after the warm-up{seeds}; "
        f"{study.least_frac:.2%} within TTFT "
        f"max({slo.ttft_least_s:g} s, {slo.ttft_unloaded_factor:g} x unloaded) and TPOT {slo.tpot_s * 1e3:g} ms"
    )


def summary_table(study: Study) -> Table:
    """A table with one line per policy and bound; with several seeds the mean and half the interval."""
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
    columns = _columns(study, _COLUMNS)
    for column in columns:
        table.add_column(column.head.replace(" ", "\n", 1), justify="right", no_wrap=True)
    for name in study.names:
        table.add_row(name, *_cells(study.rows(name), columns))
    table.add_section()
    for name, rows in study.bound_rows().items():
        table.add_row(_BOUNDS[name], *_cells(rows, columns), style="dim")
    return table


def print_whole(table: Table) -> None:
    """Print a table, wider than the terminal if names are long: lines wrap then, but no figure is cut."""
    needed = Measurement.get(console, console.options.update(max_width=1000), table).maximum
    Console(file=console.file, width=max(console.width, needed)).print(table)


def print_notes(notes: Sequence[str]) -> None:
    """Print notes below a table, one per line."""
    for note in notes:
        console.print(f"[yellow]note:[/] {note}", highlight=False)


def _columns(study: Study, columns: Sequence[_Column]) -> Sequence[_Column]:
    """The columns of a study, those with an interval first."""
    return (*_SPREADS, *columns) if study.bounds else (*_SPREADS[:2], *_GROUPS_COLUMNS, *columns)


def _cells(rows: Sequence[Mapping[str, Any]], columns: Sequence[_Column]) -> list[str]:
    """The cells of a policy or bound; ``rows``: its figures, one row for each seed."""
    mean, intervals = mean_row(rows), interval_row(rows)

    def cell(column: _Column) -> str:
        value = mean[column.figure]
        if isinstance(value, dict):  # GPU-hours by GPU type
            return "\n".join(f"{name} {part:{column.form}}" for name, part in sorted(value.items()))
        text = figure(value, column.form, column.factor)
        if value is None or column not in _SPREADS or column.figure not in intervals:
            return text
        low, high = intervals[column.figure]
        half = (high - low) / 2 * (100.0 if column.form.endswith("%") else 1.0)
        digits = 2 if half < 1.0 else 1  # with more, the table is wider than a terminal
        return f"{text}\n±{half:.{digits}f}"

    return [cell(column) for column in columns]


def sources(settings: SimConfig, trace: Path, config: Path) -> dict[str, Any]:
    """The files from which figures were made, with hashes."""
    return {
        "tandem_version": version("tandem-serve"),
        "trace": file_source(trace),
        "config": file_source(config),
        "profiles": {
            str(pool): {"name": profile.name, "sha256": _sha256(profile.model_dump_json().encode())}
            for pool, profile in settings.profiles().items()
        },
    }


def file_source(path: Path) -> dict[str, str]:
    """A file's name and hash."""
    return {"file": path.name, "sha256": _sha256(path.read_bytes())}


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def document(
    study: Study, *, trace: Path, config: Path, start_s: float, duration_s: float | None, time_scale: float
) -> dict[str, Any]:
    """A study as plain values, with hashes of its files."""
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
    """The sizes of the bounds with one seed; the report has those of the first seed."""
    return {
        "causal_bound_sizes": {str(role): size for role, size in bounds.causal.sizes.items()},
        "smallest_static_counts": bounds.oracle.static.fixed_counts,
        "oracle_peak_replicas": bounds.oracle.peak_replicas,
    }


def _figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The mean of each figure over the rows; with several rows also its interval, and the rows themselves."""
    figures = mean_row(rows)
    if len(rows) > 1:
        figures["intervals"] = {name: list(each) for name, each in interval_row(rows).items()}
        figures["seeds"] = [dict(row) for row in rows]
    return figures


def _parameters(study: Study, name: str) -> dict[str, Any]:
    """The policy's parameters, with the name of each profile instead of its content."""
    if is_smallest_static(study.config, name):
        return {"counts": study.bounds[0].oracle.static.fixed_counts}
    parameters = study.config.autoscale_config(name).model_dump(mode="json")
    for role in Role:
        if needs_profiles(parameters["policy"]["kind"]):
            parameters["policy"][str(role)] = parameters["policy"][str(role)]["name"]
    return parameters


def html_page(study: Study, report: Mapping[str, Any]) -> str:
    """A study as one HTML page, pictures included. ``report``: its ``document``. Raises ImportError: no matplotlib."""
    columns = _columns(study, (*_COLUMNS, *_MORE_COLUMNS))
    lines = [(name, study.rows(name)) for name in study.names]
    lines += [(_BOUNDS[name], rows) for name, rows in study.bound_rows().items()]
    rows = [[name, *_cells(each, columns)] for name, each in lines]
    flags = "".join(f"<li>{html.escape(line)}</li>" for line in study.flags)
    parameters = {name: report["policies"][name]["parameters"] for name in study.names}
    trace, config = report["trace"], report["config"]
    return _PAGE.format(
        title=html.escape(f"{trace['file']}: {', '.join(study.names)}"),
        caption=html.escape(caption(study)),
        hashes=html.escape(
            f"trace {trace['sha256'][:12]}, config {config['file']} {config['sha256'][:12]}, seeds {report['seeds']}"
        ),
        heads="".join(f"<th>{name}</th>" for name in ("", *(column.head for column in columns))),
        rows="".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows),
        flags=f"<h2>Notes</h2><ul>{flags}</ul>" if flags else "",
        pictures="".join(
            f'<figure><img alt="{alt}" src="{source}"><figcaption class="small">{alt}</figcaption></figure>'
            for alt, source in _pictures(study)
        ),
        parameters=html.escape(yaml.safe_dump(parameters, sort_keys=False)),
    )


def _pictures(study: Study) -> list[tuple[str, str]]:
    """Pictures of the first seed, each as its description and a data URL."""
    import matplotlib  # an optional dependency

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "tandem"  # the same study, the same bytes
    from matplotlib import pyplot

    seed = study.seeds[0]
    which = f" of the first {_MOST_CURVES} policies" if len(study.names) > _MOST_CURVES else ""
    # The color of each policy, the same in every picture.
    colors = dict(zip(study.names, cycle(matplotlib.color_sequences["tab20"]), strict=False))
    drawn = []
    for alt, plot in (
        (f"GPU-hours and attainment, seed {seed.seed}", _plot_front(pyplot, study, seed, colors)),
        (f"replicas that ran over time{which}, seed {seed.seed}", _plot_replicas(pyplot, study, seed, colors)),
    ):
        data = io.BytesIO()
        plot.savefig(data, format="svg", bbox_inches="tight", metadata={"Date": None})
        pyplot.close(plot)
        drawn.append((alt, "data:image/svg+xml;base64," + base64.b64encode(data.getvalue()).decode()))
    return drawn


def _plot_front(pyplot: Any, study: Study, seed: SeedResults, colors: Mapping[str, Any]) -> Any:
    """One point for each policy and bound. The dotted line is the share of requests that must meet their objectives."""
    picture, axes = pyplot.subplots(figsize=(9, 4.5))
    bounds = {} if seed.bounds is None else {_BOUNDS[name]: result for name, result in seed.bounds.results.items()}
    marked = [(*bound, marker, "black") for bound, marker in zip(bounds.items(), _BOUND_MARKERS, strict=False)]
    marked += [(name, result, "o", colors[name]) for name, result in seed.policies.items()]
    for name, result, marker, color in marked:
        point = (result.outcome.gpu_hours, 100 * result.outcome.slo_attainment_frac)
        axes.plot(*point, marker, color=color, markersize=9, alpha=0.8, linestyle="none", label=name)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    axes.axhline(100 * study.least_frac, color="black", linewidth=0.8, linestyle=":")
    axes.margins(x=0.15, y=0.1)
    axes.set(xlabel="GPU-hours", ylabel="requests within their objectives, %", title="Cheaper is left, better is up")
    axes.grid(alpha=0.3)
    return picture


def _plot_replicas(pyplot: Any, study: Study, seed: SeedResults, colors: Mapping[str, Any]) -> Any:
    """One picture for each role, with a curve for the oracle and for each of the first policies."""
    names = study.names[:_MOST_CURVES]
    picture, rows = pyplot.subplots(2, 1, figsize=(9, 6), sharex=True)
    end_s = seed.scenario.end_s
    curves = {name: seed.policies[name].timeline for name in names}
    if seed.bounds is not None:
        curves = {"oracle": seed.bounds.oracle.result.timeline, **curves}
    # A point of a timeline is (time, prefill replicas, decode replicas).
    for index, (role, axes) in enumerate(zip(Role, rows, strict=True), start=1):
        for name, timeline in curves.items():
            times = [point[0] for point in timeline] + [end_s]
            counts = [point[index] for point in timeline] + [timeline[-1][index]]
            width = 1.0 if name == "oracle" else 1.5
            axes.step(times, counts, where="post", label=name, color=colors.get(name, "black"), linewidth=width)
        axes.axvspan(0, seed.scenario.warm_up_s, color="0.9", label="warm-up, not measured")
        axes.set_ylabel(f"{role} replicas")
        axes.set_xlim(0, end_s)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    rows[0].legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=5, fontsize="small", frameon=False)
    rows[1].set_xlabel("seconds")
    return picture


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
<h2>Parameters of each policy</h2><pre>{parameters}</pre>
</body></html>
"""
