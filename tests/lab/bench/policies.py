"""Every policy live under the same rise and fall of load, on emulated engines: ``make bench-policies``."""

import asyncio
import json
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import psutil
import typer
from rich.console import Console
from rich.table import Table

from autoscale.engines.profile import EngineProfile
from serve_app.local.cluster import driver_environment
from tests.lab.stand.forked_worker import forked
from tests.lab.stand.rise_and_fall import (
    BASE_PER_S,
    INPUT_TOKENS,
    POLICIES,
    PROFILE,
    RISE_PER_S,
    SPEEDS,
    Passage,
    Stand,
    document,
)

# Lengths of the rise and of the fall, seconds. A replica takes 5 s to start, and the time of its process.
_RISE_S, _FALL_S = 90.0, 60.0
_RATE = "prefill_service_rate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one policy did.

    Attributes:
        asked_s: time from the rise until as many prefill replicas were wanted as serve the load; ``None``: never.
        enough_s: end of the first five seconds in which 95 % of the requests were in time; ``None``: none.
        in_time_frac: share of the rise's requests that were in time after ``enough_s``.
        peak: most serving prefill and decode replicas, in fast ones.
        end: serving replicas at the end of the fall.
        changes: changes of the serving replicas.
        lost: requests that failed other than by a refusal.
    """

    policy: str
    asked_s: float | None
    enough_s: float | None
    in_time_frac: float | None
    peak: tuple[float, float]
    end: tuple[float, float]
    changes: int
    lost: int


def row(policy: str, passage: Passage) -> Row:
    """The row of a passage."""
    enough_s = passage.enough_s(passage.fell_s)
    return Row(
        policy=policy,
        asked_s=passage.asked_s,
        enough_s=enough_s,
        in_time_frac=None if enough_s is None else passage.in_time_frac(enough_s, passage.fell_s),
        peak=passage.peak,
        end=passage.counts[-1][1:],
        changes=len(passage.counts) - 1,
        lost=len(passage.lost),
    )


def _table(rows: list[Row]) -> Table:
    table = Table(
        title=f"{BASE_PER_S:g} -> {RISE_PER_S:g} -> {BASE_PER_S:g} requests/s, {_RISE_S:g} s and {_FALL_S:g} s",
        padding=0,  # 80 columns are enough then
    )
    for name in ("policy", "asked s", "enough s", "then in time", "peak", "at the end", "changes", "lost"):
        table.add_column(name, no_wrap=name in ("policy", "peak", "at the end"))
    for each in rows:
        in_time = "-" if each.in_time_frac is None else f"{each.in_time_frac:.0%}"
        asked, enough = ("-" if value is None else f"{value:.0f}" for value in (each.asked_s, each.enough_s))
        peak, end = (f"{prefill:.3g}P{decode:.3g}D" for prefill, decode in (each.peak, each.end))
        table.add_row(each.policy, asked, enough, in_time, peak, end, str(each.changes), str(each.lost))
    return table


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """A quantity that the service learned, and what it is.

    ``truth``: for starts, the median of those that the stand saw last; else the value of the emulated engines.
    """

    name: str
    learned: float
    truth: float


def learned(stand: Stand, passages: dict[str, Passage]) -> list[Learned]:
    """What the service knows at the end, and what ``queue_depth`` learned of prefill."""
    state, found = stand.status().last.plan.state, list[Learned]()
    for key, learned_s in state.starts_s.items():
        seen = [seconds for passage in passages.values() for of, seconds in passage.starts if of == key]
        if seen := seen[-len(learned_s) :]:  # the same starts
            found.append(Learned(name=f"start of {key}, s", learned=median(learned_s), truth=median(seen)))
    profile = EngineProfile.load(Path(PROFILE))
    for group, windows in state.links.items():
        link_bytes_per_s = max(bytes_per_s for _, bytes_per_s in windows)
        truth = profile.handoff.bytes_per_s * SPEEDS[group]
        found.append(Learned(name=f"link of {group}, GB/s", learned=link_bytes_per_s / 1e9, truth=truth / 1e9))
    rates = [passage.shown[_RATE] for passage in passages.values() if _RATE in passage.shown]
    if rates:
        true_rate = 1.0 / profile.prefill.seconds_for(INPUT_TOKENS)
        found.append(Learned(name="prefill service rate, requests/s", learned=rates[-1], truth=true_rate))
    return found


def _learned_table(found: list[Learned]) -> Table:
    table = Table(title="learned while serving")
    for name in ("quantity", "learned", "truth", "error"):
        table.add_column(name)
    for each in found:
        error = f"{each.learned / each.truth - 1.0:+.0%}"
        table.add_row(each.name, f"{each.learned:.3g}", f"{each.truth:.3g}", error)
    return table


def main(out: Path = Path("reports/bench_policies.json")) -> None:
    """Run every policy that sizes by load, one after another, and write the rows as JSON."""
    driver_environment()
    from serve_app.sdk import deploy

    console, rows, passages = Console(), list[Row](), dict[str, Passage]()
    # Processes are forks: their import of vLLM would take most of the rise, and a node of GPUs has more cores for it.
    with deploy(forked(document())) as app:
        stand = Stand(app)
        for policy, changes in POLICIES.items():
            if policy == "periodic":  # its counts follow the clock
                continue
            stand.rest()
            run = stand.passage(changes, most_rise_s=_RISE_S, fall_s=_FALL_S, kill_after_s=None)
            passages[policy] = asyncio.run(run)
            rows.append(row(policy, passages[policy]))
            console.print(rows[-1])
        found = learned(stand, passages)
    console.print(_table(rows))
    console.print(_learned_table(found))
    machine = {"cores": psutil.cpu_count(), "python": platform.python_version(), "at": time.strftime("%Y-%m-%d")}
    out.parent.mkdir(parents=True, exist_ok=True)
    report = {"machine": machine, "rows": [asdict(each) for each in rows], "learned": [asdict(each) for each in found]}
    out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
