"""Results of the day on a cluster that grows: figures, what was missed, and the picture (pure)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from autoscale.report import Report, RequestRecord, Slo
from kvtransfer.topology import Role

_DAY_H = 24.0
_COLOURS = {"cheapest": "tab:red", "spot": "tab:green", "reserved": "tab:gray"}
_ROLE_COLOURS = {Role.PREFILL: "tab:orange", Role.DECODE: "tab:blue"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Nodes by type, and replicas by role, at one instant; ``refused``: node types that are given up."""

    at_s: float
    nodes: Mapping[str, int]
    serving: Mapping[Role, int]
    planned: Mapping[Role, int]
    refused: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wake:
    """A request of the rarely used model; ``before``: what its replica did when the request came."""

    at_s: float
    before: str
    ttft_s: float | None
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Day:
    """The whole day.

    Attributes:
        notice_s: when a node was said to leave, and when it was gone; ``None``: it stayed, or no node was there.
        prices: cost of a node hour by type.
    """

    day_s: float
    records: Sequence[RequestRecord]
    slos: Sequence[Slo]
    samples: Sequence[Sample]
    wakes: Sequence[Wake]
    notice_s: tuple[float, float | None] | None
    prices: Mapping[str, float]

    def cost(self) -> float:
        """Cost of all nodes, if the day had 24 hours."""
        hours = _DAY_H / self.day_s
        return sum(
            self.prices[name] * count * (after.at_s - before.at_s) * hours
            for before, after in pairwise(self.samples)
            for name, count in before.nodes.items()
        )

    def fixed_cost(self) -> float:
        """Cost of as many nodes as the day ever had at once, all day, of the type that is always there."""
        return self.prices["reserved"] * max(sum(one.nodes.values()) for one in self.samples) * _DAY_H

    def ended_s(self, node_type: str) -> float | None:
        """When a node type was given up; ``None``: it was not."""
        return next((one.at_s for one in self.samples if node_type in one.refused), None)

    def figures(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "day_s": self.day_s,
            "report": Report.of(self.records, self.slos).as_dict(),
            "first_answer_s": self.records[0].ttft_s,
            "given_up_s": {name: self.ended_s(name) for name in self.prices},
            "most_nodes": {name: max(one.nodes.get(name, 0) for one in self.samples) for name in self.prices},
            "nodes_at_end": dict(self.samples[-1].nodes),
            "given_back_s": self.samples[-1].at_s - self.day_s,
            "cost": self.cost(),
            "fixed_cost": self.fixed_cost(),
            "notice_s": self.notice_s,
            "wakes": [asdict(wake) for wake in self.wakes],
        }

    def rows(self) -> list[tuple[str, str]]:
        """The table: names and texts."""
        figures = self.figures()
        report = figures["report"]
        rows = [
            ("requests, lost", f"{len(self.records)}, {report['requests_failed']}"),
            ("within TTFT and TPOT objectives", f"{report['slo_attainment_frac']:.1%}"),
            ("first answer, from zero nodes", f"{figures['first_answer_s'] or 0.0:.0f} s"),
            ("cheapest type, which never comes", _given_up(figures["given_up_s"]["cheapest"])),
            ("most nodes at once", ", ".join(f"{count} {name}" for name, count in figures["most_nodes"].items())),
            ("nodes at the end", f"{sum(figures['nodes_at_end'].values())}, {figures['given_back_s']:.0f} s later"),
            (
                "cost of a day of 24 hours",
                f"{figures['cost']:.0f}; as many reserved nodes all day: {figures['fixed_cost']:.0f}",
            ),
        ]
        if self.notice_s is not None:
            at_s, gone_s = self.notice_s
            left = f"gone after {gone_s - at_s:.0f} s" if gone_s else "stayed"
            rows.append(("spot node", f"notice at {at_s:.0f} s, {left}"))
        return [
            *rows,
            *((f"rare model, {wake.before}", f"first token after {wake.ttft_s or 0.0:.1f} s") for wake in self.wakes),
        ]

    def complaints(self) -> list[str]:
        """What the day should have shown and did not."""
        return list(self._complaints())

    def _complaints(self) -> Iterator[str]:
        figures = self.figures()
        if errors := figures["report"]["errors"]:
            yield f"requests were lost: {errors}"
        if lost := [wake for wake in self.wakes if wake.error is not None]:
            yield f"requests of the rare model were lost: {[wake.error for wake in lost]}"
        if figures["given_up_s"]["cheapest"] is None:
            yield "the node type that never comes was not given up"
        if not figures["most_nodes"]["spot"]:
            yield "no spot node came"
        if figures["nodes_at_end"]:
            yield f"nodes were not given back: {figures['nodes_at_end']}"
        if self.notice_s is None or self.notice_s[1] is None:
            yield "no node was taken away"
        if missing := {"at zero", "asleep"} - {wake.before for wake in self.wakes}:
            yield f"no request of the rare model came while it was {' or '.join(sorted(missing))}"


def _given_up(at_s: float | None) -> str:
    return "not given up" if at_s is None else f"given up after {at_s:.0f} s"


def plot(day: Day, path: Path) -> None:
    """Load, nodes by type with their cost, replicas, and TTFT over the day."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(4, 1, figsize=(10.0, 11.0), sharex=True, layout="constrained")
    at_s = [one.at_s for one in day.samples]
    edges = np.linspace(0.0, day.day_s, 61)
    load = np.histogram([record.sent_s for record in day.records], edges)[0] / np.diff(edges)
    axes[0].stairs(load, edges, color="black")
    axes[0].set_ylabel("requests/s")
    names = list(day.prices)
    counts = [[one.nodes.get(name, 0) for one in day.samples] for name in names]
    labels = [f"{name}, {day.prices[name]:g} per node hour" for name in names]
    axes[1].stackplot(at_s, counts, step="post", labels=labels, colors=[_COLOURS[name] for name in names])
    axes[1].set_ylabel("nodes")
    for role in Role:
        colour = _ROLE_COLOURS[role]
        axes[2].step(at_s, [one.planned[role] for one in day.samples], ":", color=colour, where="post")
        axes[2].step(at_s, [one.serving[role] for one in day.samples], color=colour, where="post", label=str(role))
    axes[2].set_ylabel("replicas (dotted: planned)")
    answered = [(record.sent_s, record.ttft_s) for record in day.records if record.ttft_s is not None]
    axes[3].plot(*zip(*answered, strict=True), ".", markersize=3, color="tab:purple", label="service on GPUs")
    for word, marker in (("at zero", "^"), ("asleep", "o"), ("awake", "s")):
        ours = [(wake.at_s, wake.ttft_s) for wake in day.wakes if wake.before == word and wake.ttft_s]
        if ours:
            axes[3].plot(*zip(*ours, strict=True), marker, color="tab:red", label=f"rare model, {word}")
    axes[3].set_yscale("log")
    axes[3].set_ylabel("TTFT, s")
    axes[3].set_xlabel("s")
    if (given_up_s := day.ended_s("cheapest")) is not None:
        axes[1].axvline(given_up_s, color=_COLOURS["cheapest"], linestyle="--", label="cheapest given up")
    if day.notice_s is not None:
        for axis in axes:
            axis.axvspan(
                day.notice_s[0], day.notice_s[1] or at_s[-1], color="0.9", zorder=0, label="notice of a spot node"
            )
    for axis in axes[1:]:
        axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    pyplot.close(figure)
