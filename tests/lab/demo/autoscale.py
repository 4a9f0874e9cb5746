"""A compressed day through real Ray Serve with emulated engines: ``make demo-autoscale``.

Two services have a day each: one at 1:3, where prefill becomes ready first, and one at 3:1, where decode does. Each has
a morning in the other order of readiness, with the readiness gate on and off. At last the worse day runs on fixed
counts: the fewest that serve it as well on engine models, and the next smaller ones.
"""

import asyncio
import json
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from autoscale.engines.profile import EngineProfile
from autoscale.ratio import pd_text
from autoscale.report import Slo
from autoscale.traces.trace import TraceRequest
from autoscale.types import PoolKey
from deployments.machine.claims import run_at_once
from kvtransfer.topology import Role
from router.config import RouterConfig
from serve_app.checks.yaml_checks import load_serve_yaml
from serve_app.load.generator import LoadGenerator
from serve_app.local.cluster import driver_environment
from tests.lab.demo.day import (
    CHAT,
    CODE,
    DAY_S,
    HIGHEST_LEADERS,
    LOWEST_LEADERS,
    MORNING_SLOWER,
    TPOT_S,
    TTFT_FLOOR_S,
    TTFT_TIMES_UNLOADED,
    Service,
    objectives,
)
from tests.lab.demo.figures import Run, Sample, plot, summary
from tests.lab.demo.sampling import sampling
from tests.lab.stand.static_search import StaticCounts, StaticSearch

_ROOT = Path(__file__).parents[3]
_CONFIG = _ROOT / "configs" / "emulated.yaml"
_GROUP = "g0"
# Start of an emulated engine in seconds, for the role that is ready first and the other; a process takes 13 s before.
_START_S = {True: 7.0, False: 17.0}
_LOW_PRIORITY = 15
# Most replicas of one role.
_MOST_REPLICAS = 12
_CHUNK_S = 0.5
# The autoscaler takes over after this time, in seconds: the longest request (30 s), and a window of rates.
_TAKES_OVER_S = 45.0
_SETTLE_S = 180.0
_SAMPLE_S = 1.0
_AUTOSCALE = {
    "slo": {"ttft_s": 2.0, "tpot_s": TPOT_S, "quantile_frac": 0.95},
    "interval_s": 1.0,
    "window_s": 12.0,
    "no_room_s": 120.0,
    "guard": {
        "cooldown_out_s": 3.0,
        "cooldown_in_s": 6.0,
        "hysteresis_in_frac": 0.05,
        "damping_in_frac": 1.0,
        "step_in_replicas": 4,
        "shortfall_replicas": 0.5,
    },
}
_GATE = {"observation_s": 5.0}


class Demo:
    """One deployment, in which one role becomes ready first, and the days that go through it."""

    def __init__(self, app: Any, first_ready: Role, profile: EngineProfile, day_s: float, console: Console) -> None:
        from serve_app.running.ray_control import Control

        self._app = app
        self._control = Control(app.name)
        self._first_ready = first_ready
        self._profiles = dict.fromkeys(Role, profile)
        self._day_s = day_s
        self._console = console

    def day(self, service: Service) -> Run:
        """A day, sized by the autoscaler from its third hour on.

        Its first hours are its busiest: it begins with the highest counts, which stay until its rates are its load's.
        """
        self._settle(service.tuning(), service.counts(HIGHEST_LEADERS))
        takes_over = threading.Timer(_TAKES_OVER_S, self._take_over)
        takes_over.start()
        try:
            return self._replay(service, "day", service.day(self._day_s), self._day_s)
        finally:
            takes_over.cancel()

    def morning(self, service: Service, *, is_gated: bool) -> Run:
        """A morning that comes as a surge: few replicas, and a target that asks for many at once."""
        tuning = service.tuning(is_gated=is_gated, target_frac=service.surge_target_frac)
        self._settle(tuning, service.counts(LOWEST_LEADERS))
        self._take_over()
        kind = "gate_on" if is_gated else "gate_off"
        return self._replay(service, kind, service.morning(self._day_s), self._day_s * MORNING_SLOWER)

    def _take_over(self) -> None:
        self._control.tune({"override": None}, "load has begun")

    def static_day(self, service: Service, counts: StaticCounts) -> Run:
        """A day on fixed counts."""
        tuning = service.tuning(is_gated=False)
        del tuning["bounds"]  # the counts need not be at the ratio
        self._settle(tuning, {Role.PREFILL: counts.prefill, Role.DECODE: counts.decode})
        kind = f"static_{counts.prefill}P{counts.decode}D"
        return self._replay(service, kind, service.day(self._day_s), self._day_s)

    def _settle(self, tuning: Mapping[str, Any], counts: Mapping[Role, int]) -> None:
        override = {"override": {str(role): count for role, count in counts.items()}}
        self._control.tune({}, "as deployed")
        self._control.tune({**tuning, **override}, "the day before")
        started_s = time.monotonic()
        while True:
            sample = self._sample(0.0)
            if sample.serving == sample.ready == sample.held_gpus == counts:
                break
            if time.monotonic() - started_s > _SETTLE_S:
                last = self._control.status().last
                raise TimeoutError(
                    f"the cluster has not come to {pd_text(counts)} in {_SETTLE_S:g} s, but to "
                    f"{pd_text(sample.serving)} serving of {pd_text(sample.ready)} ready; last decision: "
                    f"{last and last.plan.decision.reason}, held back: {last and last.plan.held_back}. A machine "
                    "that does anything else beside is too busy for twelve replicas that start"
                )
            time.sleep(_SAMPLE_S)
        time.sleep(_SAMPLE_S)

    def _replay(self, service: Service, kind: str, trace: Sequence[TraceRequest], day_s: float) -> Run:
        slos: list[Slo] = objectives(trace, self._profiles)
        generator = LoadGenerator(self._app.url, self._app.config.model.id, seed=1)
        self._console.print(
            f"{time.strftime('%H:%M:%S')} {service.name} {service.ratio}, {kind}: {len(trace)} requests"
        )
        before = psutil.cpu_times()
        with sampling(self._sample, _SAMPLE_S) as samples:
            records = asyncio.run(generator.replay(trace))
        run = Run(
            service=service.name,
            ratio=service.ratio,
            first_ready=self._first_ready,
            kind=kind,
            day_s=day_s,
            samples=samples,
            records=records,
            slos=slos,
            cpu_busy_frac=_busy_frac(before, psutil.cpu_times()),
        )
        figures = run.figures()
        self._console.print(
            f"  failed {figures['failed']}, SLO {figures['slo_attainment_frac']:.3f}, within band "
            f"{figures['ratio_within_band_frac']:.3f}, GPU-hours {figures['gpu_hours']:.0f}, CPU "
            f"{figures['cpu_busy_frac']:.2f}"
        )
        return run

    def _sample(self, at_s: float) -> Sample:
        last = self._control.status().last
        assert last is not None
        held = self._app.status().replicas
        names = {role: str(PoolKey(_GROUP, role)) for role in Role}
        ready = {role: set(last.running.get(PoolKey(_GROUP, role), ())) for role in Role}
        admitted = set(last.plan.admitted)
        return Sample(
            at_s=at_s,
            serving={role: len(ready[role] & admitted) for role in Role},
            ready={role: len(ready[role]) for role in Role},
            planned={role: last.plan.counts[PoolKey(_GROUP, role)] for role in Role},
            held_gpus={role: sum(held[names[role]].values()) for role in Role},
        )


@contextmanager
def _run_at_once(console: Console) -> Any:
    """Run the load generator and all serving processes before ordinary ones; engines do so when they are ready."""
    me = psutil.Process()
    try:
        run_at_once(me.pid)
        for process in me.children(recursive=True):
            with suppress(psutil.NoSuchProcess, FileNotFoundError):
                if process.nice() == _LOW_PRIORITY:
                    run_at_once(process.pid)
    except PermissionError:
        console.print("this user may not schedule processes ahead of others: latencies suffer while replicas start")
    try:
        yield
    finally:
        with suppress(PermissionError):
            run_at_once(me.pid, is_on=False)  # the next cluster is its child


def _busy_frac(before: Any, after: Any) -> float:
    spent = [b - a for a, b in zip(before, after, strict=True)]
    idle = after.idle - before.idle + after.iowait - before.iowait
    return float(1 - idle / sum(spent))


def _document(first_ready: Role) -> dict[str, Any]:
    document = load_serve_yaml(_CONFIG)
    args = document["applications"][0]["args"]
    for role in Role:
        pool = args["groups"][0][role]
        pool |= {"replicas": 1, "max_replicas": _MOST_REPLICAS}
        pool["emulator"] |= {"start_s": _START_S[role is first_ready], "chunk_s": _CHUNK_S}
    args["autoscale"] |= {**_AUTOSCALE, "gate": _GATE}
    return document


def _search(service: Service, profiles: Mapping[Role, EngineProfile], day_s: float) -> StaticSearch:
    trace = service.day(day_s)
    slos = objectives(trace, profiles)
    return StaticSearch(trace, slos, profiles, router=RouterConfig(), highest_replicas=_MOST_REPLICAS)


def _fixed_counts(run: Run, search: StaticSearch) -> tuple[StaticCounts, StaticCounts]:
    """The fewest fixed counts that serve a day as well, and the best counts with one replica less."""
    attained = run.report().slo_attainment_frac
    assert attained is not None
    peer = search.smallest(attained)
    if peer is None:
        raise RuntimeError(f"{run.name}: no fixed counts attain {attained:.4f} on engine models")
    return peer, search.best_of(peer.replicas - 1)


def main(day_s: float = DAY_S, out: Path = Path("reports")) -> None:
    """Run the days, each in ``day_s`` seconds; print, write and plot."""
    console = Console()
    driver_environment()  # before anything imports ray
    from serve_app.sdk import deploy

    started_s = time.monotonic()
    document = _document(Role.PREFILL)
    profile = EngineProfile.load(
        Path(document["applications"][0]["args"]["groups"][0]["decode"]["emulator"]["profile"])
    )
    console.print(
        f"objectives: TTFT <= max({TTFT_FLOOR_S:g} s, {TTFT_TIMES_UNLOADED:g} x the unloaded TTFT of that length), "
        f"TPOT <= {TPOT_S * 1e3:g} ms; a day takes {day_s:g} s; engines: {profile.name}"
    )
    searches = {service.name: _search(service, dict.fromkeys(Role, profile), day_s) for service in (CHAT, CODE)}
    runs: list[Run] = []
    for first_ready in Role:
        console.print(f"{time.strftime('%H:%M:%S')} deploying: {first_ready} becomes ready first")
        # A starting replica imports for 10 core-seconds; at high priority it would starve serving ones.
        low = {"RAY_worker_niceness": str(_LOW_PRIORITY), "RAY_worker_maximum_startup_concurrency": "12"}
        with (
            deploy(_document(first_ready), environment=low, on_status=lambda status: None) as app,
            _run_at_once(console),
        ):
            demo = Demo(app, first_ready, profile, day_s, console)
            if first_ready is Role.PREFILL:
                runs += [demo.morning(CODE, is_gated=True), demo.morning(CODE, is_gated=False), demo.day(CHAT)]
            else:
                runs += [demo.day(CODE), demo.morning(CHAT, is_gated=True), demo.morning(CHAT, is_gated=False)]
                console.print(f"{time.strftime('%H:%M:%S')} looking for fixed counts that serve the days as well")
                days = [run for run in runs if run.kind == "day"]
                fixed = {run.service: _fixed_counts(run, searches[run.service]) for run in days}
                worst = max(days, key=lambda run: run.gpu_s() / fixed[run.service][0].replicas)
                service = CHAT if worst.service == CHAT.name else CODE
                runs += [demo.static_day(service, counts) for counts in fixed[worst.service]]
    report = {
        **summary([run.figures() for run in runs], {run.name: fixed[run.service][0] for run in days}),
        "day_s": day_s,
        "slo": {"ttft_floor_s": TTFT_FLOOR_S, "ttft_times_unloaded": TTFT_TIMES_UNLOADED, "tpot_s": TPOT_S},
        "wall_s": time.monotonic() - started_s,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "autoscale_demo.json").write_text(json.dumps(report, indent=1) + "\n")
    plot(runs, out / "autoscale_demo.png")
    console.print(_table(report["runs"]))
    console.print(f"{out / 'autoscale_demo.json'} and .png, {report['wall_s'] / 60:.0f} min")
    complaints = [*report["invalid"], *report["missed"]]
    for complaint in complaints:
        console.print(complaint, style="red")
    raise typer.Exit(1 if complaints else 0)


def _table(runs: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("run", "failed", "SLO", "in band", "GPU-h", "static", "CPU", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for run in runs:
        static = run.get("gpu_hours_static_peak")
        table.add_row(
            run["name"],
            f"{run['failed']}/{run['requests']}",
            f"{run['slo_attainment_frac']:.3f}",
            f"{run['ratio_within_band_frac']:.3f}",
            f"{run['gpu_hours']:.0f}",
            "" if static is None else f"{static:.0f} {run['static_counts']}",
            f"{run['cpu_busy_frac']:.2f}",
        )
    return table


if __name__ == "__main__":
    typer.run(main)
