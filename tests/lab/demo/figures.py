"""Results of the demonstration: figures of a run, the worst of several, and the picture (pure)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from autoscale.ratio import PdRatio
from autoscale.report import Report, RequestRecord, Slo
from kvtransfer.topology import Role
from tests.lab.stand.static_search import StaticCounts

_DAY_H = 24.0
_MOST_CPU_FRAC = 0.8
_LEAST_SAVED_FRAC = 0.3
_LEAST_PEAK_REPLICAS = 12
_GATED = ("day", "gate_on")
_COLOURS = {Role.PREFILL: "tab:orange", Role.DECODE: "tab:blue"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Replicas at one instant, by role: in service, ready, planned for, and all that hold a GPU in whatever state."""

    at_s: float
    serving: Mapping[Role, int]
    ready: Mapping[Role, int]
    planned: Mapping[Role, int]
    held_gpus: Mapping[Role, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One day, or the morning of one, through the live cluster."""

    service: str
    ratio: PdRatio
    first_ready: Role
    kind: str
    day_s: float
    samples: Sequence[Sample]
    records: Sequence[RequestRecord]
    slos: Sequence[Slo]
    cpu_busy_frac: float

    @property
    def name(self) -> str:
        """The run's name in tables."""
        return f"{self.service} {self.ratio}, {self.first_ready} first, {self.kind.replace('_', ' ')}"

    def deviations(self) -> list[float]:
        """How far from the ratio the serving replicas were at each sample, replicas of the smaller role."""
        return [self.ratio.deviation(s.serving[Role.PREFILL], s.serving[Role.DECODE]) for s in self.samples]

    def report(self) -> Report:
        """Latencies, attainment and failures of its requests."""
        return Report.of(self.records, self.slos)

    def figures(self) -> dict[str, Any]:
        """Everything that is a number; GPU-hours are those of the uncompressed day, one GPU per replica."""
        report = self.report()
        planned = [tuple(sample.planned.values()) for sample in self.samples]
        return {
            "name": self.name,
            "kind": self.kind,
            "pd_ratio": str(self.ratio),
            "first_ready": str(self.first_ready),
            "requests": len(self.records),
            "failed": report.requests_failed,
            "slo_attainment_frac": report.slo_attainment_frac,
            "ratio_within_band_frac": float(np.mean([deviation <= 1.0 + 1e-9 for deviation in self.deviations()])),
            "gpu_hours": self.gpu_s() * _DAY_H / self.day_s,
            "replicas_peak": max(sum(sample.ready.values()) for sample in self.samples),
            "scale_events": sum(before != after for before, after in pairwise(planned)),
            "cpu_busy_frac": self.cpu_busy_frac,
            "ttft_s": report.ttft_s,
            "tpot_s": report.tpot_s,
            "errors": report.errors,
        }

    def gpu_s(self) -> float:
        """GPU-seconds from the start to the end of each replica, held and draining ones included."""
        return sum(
            sum(before.held_gpus.values()) * (after.at_s - before.at_s) for before, after in pairwise(self.samples)
        )


def summary(runs: Sequence[Mapping[str, Any]], peers: Mapping[str, StaticCounts]) -> dict[str, Any]:
    """The figures of all runs, those of the worst day at top level, and what is invalid or missed.

    GPU-hours and attainment are those of the day that saved least, the fixed counts' attainment as it was seen live.

    Args:
        runs: ``Run.figures`` of each; of the worst day's fixed counts, and the next smaller ones, too.
        peers: for each day, by its run's name, the fewest fixed counts that serve it as well on engine models.
    """
    rows = []
    for run in runs:
        if (fixed := peers.get(run["name"])) is not None:
            run = {
                **run,
                "static_counts": f"{fixed.prefill}P{fixed.decode}D",
                "slo_attainment_static_model_frac": fixed.attainment_frac,
                "gpu_hours_static_peak": fixed.replicas * _DAY_H,
                "gpu_hours_saved_frac": 1 - run["gpu_hours"] / (fixed.replicas * _DAY_H),
            }
        rows.append(run)
    days = [run for run in rows if run["kind"] == "day"]
    gated = [run for run in rows if run["kind"] in _GATED]
    worst = min(days, key=lambda run: run["gpu_hours_saved_frac"])
    peer, smaller = (run for run in rows if run["kind"].startswith("static"))
    of_worst = ("gpu_hours", "gpu_hours_static_peak", "gpu_hours_saved_frac", "slo_attainment_frac")
    return {
        "requests": sum(run["requests"] for run in rows),
        "failed": sum(run["failed"] for run in rows),
        "ratio_within_band_frac": min(run["ratio_within_band_frac"] for run in gated),
        "ratio_within_band_frac_gate_off": min(
            run["ratio_within_band_frac"] for run in rows if run["kind"] == "gate_off"
        ),
        **{key: worst[key] for key in of_worst},
        "slo_attainment_static_frac": peer["slo_attainment_frac"],
        "scale_events": min(run["scale_events"] for run in days),
        "cpu_busy_frac": max(run["cpu_busy_frac"] for run in rows),
        "invalid": [
            f"{run['name']}: the machine was {run['cpu_busy_frac']:.0%} busy, so the figures are its own, not the "
            f"engines': at most {_MOST_CPU_FRAC:.0%} count; run it on an idle machine"
            for run in rows
            if run["cpu_busy_frac"] > _MOST_CPU_FRAC
        ],
        "missed": [*(text for run in rows for text in _missed(run)), *_served_by_fewer(worst, smaller)],
        "runs": rows,
    }


def _missed(run: Mapping[str, Any]) -> Iterator[str]:
    """The goals that a run missed."""
    name, kind, within = run["name"], run["kind"], run["ratio_within_band_frac"]
    if run["failed"]:
        yield f"{name}: {run['failed']} of {run['requests']} requests failed: {run['errors']}"
    if kind in _GATED and within < 1.0:
        yield f"{name}: within one replica of the ratio {within:.1%} of the time, not always"
    if kind == "gate_off" and within >= 1.0:
        yield f"{name}: as near to the ratio as with the gate, so it shows nothing"
    if kind == "day" and run["gpu_hours_saved_frac"] < _LEAST_SAVED_FRAC:
        saved = f"{run['gpu_hours_saved_frac']:.1%} of the GPU-hours of {run['static_counts']}"
        yield f"{name}: saved {saved}, not {_LEAST_SAVED_FRAC:.0%}"
    if kind == "day" and run["replicas_peak"] < _LEAST_PEAK_REPLICAS:
        yield f"{name}: {run['replicas_peak']} replicas at its peak, not {_LEAST_PEAK_REPLICAS}"


def _served_by_fewer(day: Mapping[str, Any], smaller: Mapping[str, Any]) -> Iterator[str]:
    """A line if the next smaller fixed counts serve the day as well, live."""
    if smaller["slo_attainment_frac"] >= day["slo_attainment_frac"]:
        yield (
            f"{smaller['name']}: serves {smaller['slo_attainment_frac']:.3f}, as much as {day['name']}: live, fewer "
            "fixed replicas would do than on engine models"
        )


def plot(runs: Sequence[Run], path: Path) -> None:
    """Load, tokens/s, replicas per role, ratio and TTFT over time: whole days above, mornings below, a column each."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    rows = (
        "requests/s",
        "output tokens/s",
        "prefill replicas",
        "decode replicas",
        "off the ratio, replicas",
        "TTFT, s",
    )
    mornings = [run for run in runs if run.kind.startswith("gate")]
    blocks = [block for block in ([run for run in runs if run not in mornings], mornings) if block]
    width = max(len(block) for block in blocks)
    figure = pyplot.figure(figsize=(4.6 * width, 12.0 * len(blocks)), layout="constrained")
    for part, block in zip(figure.subfigures(len(blocks), 1, squeeze=False)[:, 0], blocks, strict=True):
        axes = part.subplots(len(rows), width, sharex="col", sharey="row", squeeze=False)
        for column, run in enumerate(block):
            _plot_run(run, [axes[row][column] for row in range(len(rows))])
        for column in range(len(block), width):
            for row in range(len(rows)):
                axes[row][column].axis("off")
        for row, name in enumerate(rows):
            axes[row][0].set_ylabel(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def _plot_run(run: Run, axes: Sequence[Any]) -> None:
    hours = _DAY_H / run.day_s
    bin_s = run.day_s / 96
    edges = np.arange(0.0, max(sample.at_s for sample in run.samples) + bin_s, bin_s)
    axes[0].set_title(run.name, fontsize=9)
    axes[0].stairs(np.histogram([r.sent_s for r in run.records], edges)[0] / bin_s, edges * hours, color="black")
    axes[1].stairs(_tokens_per_s(run.records, edges), edges * hours, color="black")
    at_h = [sample.at_s * hours for sample in run.samples]
    for axis, role in zip(axes[2:4], (Role.PREFILL, Role.DECODE), strict=True):
        axis.step(at_h, [s.held_gpus[role] for s in run.samples], color="0.75", where="post", label="holding a GPU")
        axis.step(at_h, [s.planned[role] for s in run.samples], "k:", where="post", linewidth=0.8, label="planned")
        axis.step(at_h, [s.serving[role] for s in run.samples], color=_COLOURS[role], where="post", label="serving")
        axis.set_ylim(0, 12.5)  # room for the legend
    axes[2].legend(fontsize=7, loc="upper center", ncols=3)
    axes[4].step(at_h, run.deviations(), color="tab:green", where="post")
    axes[4].axhline(1.0, color="red", linewidth=0.8, linestyle="--", label="band")
    axes[4].legend(fontsize=7, loc="upper left")
    seen = [(r.sent_s * hours, r.ttft_s) for r in run.records if r.ttft_s is not None]
    axes[5].plot(*zip(*seen, strict=True), ".", markersize=2, color="tab:purple")
    axes[5].axhline(1.0, color="red", linewidth=0.8, linestyle="--", label="least objective")
    axes[5].set_yscale("log")
    axes[5].legend(fontsize=7, loc="upper left")
    axes[5].set_xlabel("hour")


def _tokens_per_s(records: Sequence[RequestRecord], edges: np.ndarray) -> np.ndarray:
    """Output tokens per second in each bin, each request's spread evenly from its first to its last."""
    total = np.zeros(len(edges) - 1)
    for record in records:
        if record.first_token_s is None or record.last_token_s is None:
            continue
        until = max(record.last_token_s, record.first_token_s + 1e-3)
        inside = np.clip(np.minimum(edges[1:], until) - np.maximum(edges[:-1], record.first_token_s), 0.0, None)
        total += record.output_tokens * inside / (until - record.first_token_s)
    return total / np.diff(edges)
