"""Which policy is best on real traces: tuned on one slice of each, reported on another: ``make quality``."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from autoscale.sim.checks import check_trace
from autoscale.sim.compare import PEAK_REPLICAS, OracleResult, find_oracle
from autoscale.sim.config import SimConfig
from autoscale.sim.curate import SPACES, Candidate, curate
from autoscale.sim.pressure import pressure_test
from autoscale.sim.simulations import run_study
from autoscale.sim.study import Study, mean_row
from autoscale.traces.trace import TraceRequest, cut, load_trace
from serve_app.cli.curate_report import candidates_table
from serve_app.cli.sim_inputs import worker_pool
from serve_app.cli.sim_report import document, print_notes, print_whole, summary_table

_CONFIG = Path(__file__).parents[3] / "configs" / "sim" / "h100_llama70b.yaml"
# GPU-hours that our policy may use on steady traffic, as a multiple of the oracle's.
_STEADY_OVER_ORACLE = 1.35
# The same, as a multiple of the causal bound's.
_STEADY_OVER_CAUSAL = 1.10
# GPU-hours that it may use on bursts, as a share of the smallest fixed counts'.
_BURSTY_OVER_STATIC = 0.85


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A public trace; slices are (begin, seconds) of it.

    ``rate_scale``: multiplies the requests, so that the oracle's peak in the reported slice is 40 replicas.
    ``warm_up_s``: start of the reported slice that is not measured, since policies that forecast need a history.
    """

    name: str
    file: str
    tuning: tuple[float, float]
    reporting: tuple[float, float]
    rate_scale: float
    is_bursty: bool
    warm_up_s: float


WORKLOADS = (
    Workload(
        name="Azure code 2023",
        file="azure_code_2023.csv.gz",
        tuning=(0.0, 853.0),
        reporting=(253.0, 1453.0),
        rate_scale=13.4,
        is_bursty=True,
        warm_up_s=600.0,
    ),
    Workload(
        name="Mooncake conversation",
        file="mooncake_conversation.csv.gz",
        tuning=(0.0, 1350.0),
        reporting=(750.0, 1950.0),
        rate_scale=2.1,
        is_bursty=True,
        warm_up_s=600.0,
    ),
    Workload(
        name="ServeGen M-large",
        file="servegen_mlarge_3day.csv.gz",
        tuning=(28800.0, 240.0),
        reporting=(114900.0, 600.0),
        rate_scale=255.0,
        is_bursty=False,
        warm_up_s=240.0,
    ),
    Workload(
        name="Azure conversation 2023",
        file="azure_conv_2023.csv.gz",
        tuning=(300.0, 240.0),
        reporting=(875.0, 1200.0),
        rate_scale=27.0,
        is_bursty=False,
        warm_up_s=300.0,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Report:
    """The comparison of all policies on a workload, and the tuned parameters of each."""

    workload: Workload
    tuned_on: OracleResult
    candidates: Mapping[str, Sequence[Candidate]]
    study: Study

    def better(self, name: str = "default") -> list[str]:
        """Policies that attain at least the same with at most the same GPU-hours, and are better in one of the two."""
        rows = {each: mean_row(self.study.rows(each)) for each in self.study.names}
        attained, hours = _point(rows[name])
        return [
            other
            for other, row in rows.items()
            if other != name
            and _point(row) != (attained, hours)
            and row["slo_attainment_frac"] >= attained
            and row["gpu_hours"] <= hours
        ]

    def verdicts(self) -> dict[str, tuple[str, bool]]:
        """Each goal of our policy: the figure, and whether it is reached."""
        row = mean_row(self.study.rows("default"))
        static = mean_row(self.study.bound_rows()["smallest_static"])
        over_static = row["gpu_hours"] / static["gpu_hours"]
        better, peak = self.better(), min(each.oracle.peak_replicas for each in self.study.bounds)
        found = {
            f"oracle's peak >= {PEAK_REPLICAS} replicas": (str(peak), peak >= PEAK_REPLICAS),
            "no policy is better on both": (", ".join(better) or "none", not better),
        }
        if self.workload.is_bursty:
            return {
                f"GPU-hours <= {_BURSTY_OVER_STATIC} x smallest static": (
                    f"{over_static:.2f} x",
                    over_static <= _BURSTY_OVER_STATIC,
                ),
                **found,
            }
        attained, least = row["slo_attainment_frac"], self.study.least_frac
        over_oracle, over_causal = (
            math.inf if row[name] is None else row[name]
            for name in ("gpu_hours_over_oracle", "gpu_hours_over_causal_bound")
        )
        return {
            f"SLO met >= {least:.2%}": (f"{attained:.2%}", attained >= least),
            f"<= {_STEADY_OVER_ORACLE} x the oracle": (f"{over_oracle:.2f} x", over_oracle <= _STEADY_OVER_ORACLE),
            f"<= {_STEADY_OVER_CAUSAL} x the causal bound": (
                f"{over_causal:.2f} x",
                over_causal <= _STEADY_OVER_CAUSAL,
            ),
            **found,
        }


def report(
    config: SimConfig,
    workload: Workload,
    trace: Sequence[TraceRequest],
    *,
    kinds: Sequence[str],
    tries: int,
    seeds: int,
    pool: Executor,
    say: Callable[[str], None],
) -> Report:
    """Tune the policies ``kinds`` on one slice, and compare them and ``default`` on the other.

    Our policy has the parameters of the configuration on every workload. Each other policy has the best parameters of
    its tries on the tuning slice of this workload.
    """
    tuning, reporting = cut(trace, *workload.tuning), cut(trace, *workload.reporting)
    say("pressure test, and the oracle of the tuning slice")
    pressed = pool.submit(pressure_test, config, tuning)
    oracle: OracleResult = pool.submit(find_oracle, config, tuning, rate_scale=workload.rate_scale).result()
    done = 0

    def on_done(candidate: Candidate) -> None:
        nonlocal done
        done += 1
        say(f"tuning: {done} of {tries * len(kinds)} tries")

    found = curate(config, oracle, pressed.result(), kinds, tries=tries, seed=0, pool=pool, on_done=on_done)
    chosen = {kind: each[0].changes for kind, each in found.items()}
    policies = {"default": config.policies.get("default", {}), **chosen}
    named = config.model_copy(update={"policies": policies, "warm_up_s": workload.warm_up_s})
    say("oracles of the reporting slice")
    study = run_study(
        named,
        reporting,
        ["default", *kinds],
        rate_scale=workload.rate_scale,
        seeds=range(seeds),
        pool=pool,
        on_step=lambda line, done, total: say(f"reporting: {line}, {done} of {total}"),
    )
    return Report(workload=workload, tuned_on=oracle, candidates=found, study=study)


def main(
    traces: Annotated[Path, typer.Argument(help="The folder with the traces.")],
    config: Annotated[Path, typer.Option(help="Cluster, objectives and policies.")] = _CONFIG,
    only: Annotated[
        list[str] | None, typer.Option(help="Run only workloads with this beginning of their name.")
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="Compare `default` with these policies only; left out: with all.")
    ] = None,
    tries: Annotated[int, typer.Option(min=1, help="Tries of parameters for each policy but ours.")] = 8,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of the reported runs.")] = 3,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes; default: one per core.")] = None,
    out: Annotated[Path, typer.Option(help="Write everything here.")] = Path("reports/quality.json"),
) -> None:
    """Compare all policies on every workload, print the tables and write them."""
    settings, console = SimConfig.load(config), Console()
    workloads = [each for each in WORKLOADS if not only or any(each.name.startswith(name) for name in only)]
    if not workloads:
        raise typer.BadParameter(f"--only: begin one of {', '.join(each.name for each in WORKLOADS)}")
    others = sorted(set(SPACES) - {"default"})
    if unknown := sorted(set(policy or ()) - set(others)):
        raise typer.BadParameter(f"--policy {unknown[0]}: not one of {', '.join(others)}")
    kinds = [each for each in others if not policy or each in policy]
    if missing := [each.file for each in workloads if not (traces / each.file).is_file()]:
        raise typer.BadParameter(f"{traces / missing[0]}: not there; see configs/traces/README.md")
    loaded = {}
    try:
        for workload in workloads:
            loaded[workload.name] = trace = load_trace(traces / workload.file)
            measured = settings.model_copy(update={"warm_up_s": workload.warm_up_s})
            for slice_s, its in ((workload.tuning, settings), (workload.reporting, measured)):
                if not (part := cut(trace, *slice_s)):
                    raise ValueError(
                        f"{traces / workload.file}: no request from {_slice(*slice_s)}: give the whole trace"
                    )
                check_trace(its, part, traces / workload.file)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    documents = {}
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with (
        worker_pool(jobs) as pool,
        ThreadPoolExecutor(len(workloads)) as threads,
        Progress(*columns, console=Console(stderr=True), transient=True) as progress,
    ):

        def compare(workload: Workload) -> Report:
            task = progress.add_task(workload.name, total=1)

            def say(line: str) -> None:
                progress.update(task, description=f"{workload.name}: {line}")
                if not progress.console.is_terminal:  # a log has no spinner
                    typer.echo(f"{datetime.now():%H:%M:%S} {workload.name}: {line}", err=True)

            trace = loaded[workload.name]
            found = report(settings, workload, trace, kinds=kinds, tries=tries, seeds=seeds, pool=pool, say=say)
            progress.update(task, completed=1, description=f"{workload.name}: done")
            return found

        # One thread per workload: an oracle is one process, and would leave the other cores idle.
        for future in as_completed([threads.submit(compare, workload) for workload in workloads]):
            found = future.result()
            _show(found, console)
            documents[found.workload.name] = _document(found, traces / found.workload.file, config)
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(documents, indent=1) + "\n")
    console.print(f"written to {out}", highlight=False)


def _point(row: Mapping[str, Any]) -> tuple[float, float]:
    return row["slo_attainment_frac"], row["gpu_hours"]


def _slice(begin_s: float, duration_s: float) -> str:
    return f"{begin_s:g} to {begin_s + duration_s:g} s"


def _show(found: Report, console: Console) -> None:
    workload = found.workload
    console.print(f"[bold]{workload.name}[/], tuned on {_slice(*workload.tuning)}:", highlight=False)
    console.print(candidates_table(found.tuned_on, found.candidates))
    measured_s = workload.reporting[0] + workload.warm_up_s
    console.print(
        f"[bold]{workload.name}[/], reported on {_slice(*workload.reporting)}, measured from {measured_s:g} s:",
        highlight=False,
    )
    print_whole(summary_table(found.study))
    print_notes(found.study.flags)
    for what, (figure, is_reached) in found.verdicts().items():
        mark = "[green]reached[/]" if is_reached else "[yellow]missed[/]"
        console.print(f"  default: {what}: {figure}, {mark}", highlight=False)
    console.print()


def _document(found: Report, trace: Path, config: Path) -> dict[str, Any]:
    workload = found.workload
    begin_s, duration_s = workload.reporting
    return {
        **document(found.study, trace=trace, config=config, start_s=begin_s, duration_s=duration_s, time_scale=1.0),
        "warm_up_s": workload.warm_up_s,
        "tuning": {
            "start_s": workload.tuning[0],
            "duration_s": workload.tuning[1],
            "oracle_gpu_hours": found.tuned_on.result.outcome.gpu_hours,
            "tries": {
                kind: [
                    {
                        "changes": one.changes,
                        "slo_attainment_frac": one.result.outcome.slo_attainment_frac,
                        "gpu_hours": one.result.outcome.gpu_hours,
                    }
                    for one in each
                ]
                for kind, each in found.candidates.items()
            },
        },
        "default_must": {
            what: {"figure": figure, "is_reached": is_reached}
            for what, (figure, is_reached) in found.verdicts().items()
        },
    }


if __name__ == "__main__":
    typer.run(main)
