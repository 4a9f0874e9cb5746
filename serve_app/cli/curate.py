"""The command that searches the policy and parameters for a workload on a virtual cluster.

``least_frac`` is the share of requests that must meet their objectives (``autoscale.sim``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option, Typer

from autoscale.policies import POLICIES
from autoscale.sim import curate as search
from autoscale.sim import pressure
from autoscale.sim.checks import check_trace, notes
from autoscale.sim.compare import OracleResult, find_oracle
from autoscale.sim.config import SimConfig
from autoscale.sim.curate import SPACES, Candidate
from autoscale.sim.proposal import Proposal
from autoscale.traces.trace import TraceRequest
from serve_app.checks.yaml_checks import ConfigError, config_errors, load_serve_yaml
from serve_app.cli import curate_report
from serve_app.cli.curate_log import (
    Day,
    apply,
    load_day,
    proposal_document,
    proposal_of,
    proposal_yaml,
    show_proposal,
)
from serve_app.cli.sim_inputs import (
    ConfigFile,
    Duration,
    Gpus,
    Jobs,
    JsonOut,
    RateScale,
    Start,
    Strict,
    check_oracle,
    json_text,
    load_part,
    names_in,
    progress_bar,
    rate_scale_of,
    settings_of,
    worker_pool,
)
from serve_app.cli.sim_report import print_notes, sources
from serve_app.cli.terminal import console, errors
from serve_app.output import write_file

commands = Typer()


Trace = Annotated[Path | None, Option("--trace", help="As for tandem simulate.")]
Out = Annotated[
    Path | None,
    Option(help="Write a configuration with the best policy to this file; with --from: the settings to change."),
]
Logs = Annotated[
    list[Path] | None,
    Option("--from", help="A decision log of a running application instead of a trace; may repeat, the oldest first."),
]
App = Annotated[str, Option(help="The application's name, for --from.")]
Service = Annotated[str | None, Option(help="Model of the service, if the log has several.")]
Address = Annotated[str, Option(help="The Ray cluster that this machine belongs to: auto, or HOST:PORT.")]
Hours = Annotated[float, Option(min=0.2, help="Last hours of the log, for --from.")]
Apply = Annotated[bool, Option("--apply", help="Ask, and change the running application; with --from.")]


@commands.command()
@config_errors()
def curate(
    trace: Trace = None,
    out: Out = None,
    logs: Logs = None,
    policy: Annotated[
        str, Option(help="Kinds of policy, separated by commas; all: every kind that can be searched.")
    ] = "all",
    config: ConfigFile = None,
    serve: Annotated[
        Path | None,
        Option(help="Write this Serve YAML with the policy; left out: write a configuration for tandem simulate."),
    ] = None,
    tries: Annotated[int, Option(min=1, help="Sets of parameters to try for each kind of policy.")] = 12,
    gpus: Gpus = None,
    rate_scale: RateScale = "1",
    start: Start = 0.0,
    duration: Duration = None,
    seed: Annotated[int, Option(min=0, help="Seed of parameters, copies and ties.")] = 0,
    jobs: Jobs = None,
    is_strict: Strict = False,
    json_out: JsonOut = None,
    app: App = "tandem",
    service: Service = None,
    address: Address = "auto",
    hours: Hours = 24.0,
    is_applied: Apply = False,
) -> None:
    """Search the policy and parameters that keep the objectives with the fewest GPU-hours."""
    if bool(logs) == (trace is not None):
        raise ConfigError("give --trace, or a decision log with --from")
    search_options = SearchOptions(gpus=gpus, tries=tries, seed=seed, jobs=jobs)
    if logs:
        if serve is not None or rate_scale != "1" or start or duration is not None:
            raise ConfigError("--serve, --rate-scale, --start and --duration are for --trace: leave them out")
        inputs = {f"--from {number}": log for number, log in enumerate(logs, start=1)}
        _, base = settings_of(config, {"--json": json_out, "--out": out}, inputs)
        day = load_day(logs, service, base, hours=hours, seed=seed, is_strict=is_strict)
        proposal = _propose(day, policy, search_options, app)
        if proposal.best is not None:
            write_file(out, proposal_yaml(day, proposal), "--out")
        write_file(json_out, json_text(proposal_document(day, proposal, logs)), "--json")
        if is_applied:
            apply(day, proposal, app, address)
        return
    if trace is None or out is None or is_applied:
        raise ConfigError("--trace needs --out, and --apply is for --from")
    _curate_trace(
        trace,
        out,
        policy,
        config,
        serve,
        search_options,
        rate_scale=rate_scale_of(rate_scale),
        start_s=start,
        duration_s=duration,
        is_strict=is_strict,
        json_out=json_out,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """GPUs of the pressure test, sets of parameters of each kind, seed, and number of processes."""

    gpus: int | None
    tries: int
    seed: int
    jobs: int | None


def _propose(day: Day, policy: str, options: SearchOptions, app: str) -> Proposal:
    """Search on a logged day, and print the proposal."""
    kinds = _policy_kinds(policy, is_served=True)
    _, oracle, candidates = _search(day.config, day.trace, kinds, options, rate_scale=1.0)
    proposal = proposal_of(day, oracle, candidates)
    show_proposal(day, proposal, oracle.least_frac, app)
    return proposal


def _curate_trace(
    trace: Path,
    out: Path,
    policy: str,
    config: Path | None,
    serve: Path | None,
    options: SearchOptions,
    *,
    rate_scale: float | None,
    start_s: float,
    duration_s: float | None,
    is_strict: bool,
    json_out: Path | None,
) -> None:
    """Search on a trace, and write the best configuration."""
    inputs = {"--trace": trace} | ({} if serve is None else {"--serve": serve})
    config, settings = settings_of(config, {"--json": json_out, "--out": out}, inputs)
    kinds = _policy_kinds(policy, is_served=serve is not None)
    serve_document = None if serve is None else load_serve_yaml(serve)
    requests = load_part(trace, start_s, duration_s)
    check_trace(settings, requests, trace, is_strict=is_strict)
    flags = notes(settings, requests)
    if serve is not None and serve_document is not None:
        flags += curate_report.serve_notes(serve_document, serve, settings)
    ratio_test, oracle, candidates = _search(settings, requests, kinds, options, rate_scale=rate_scale)
    console.print(curate_report.pressure_verdict(ratio_test), highlight=False)
    console.print(curate_report.candidates_table(oracle, candidates))
    if not ratio_test.is_disaggregation_worthwhile:
        flags.append("the policies have a prefill pool, against the advice of the pressure test")
    print_notes(flags)
    best = _best(candidates, oracle.least_frac)
    write_file(out, curate_report.curated_yaml(settings, best, config, serve_document, trace), "--out")
    console.print(f"{out}: {best.kind}", highlight=False)
    figures = curate_report.candidates_document(ratio_test, oracle, candidates)
    write_file(json_out, json_text({**sources(settings, trace, config), "flags": flags, **figures}), "--json")
    check_oracle([kind for kind, each in candidates.items() if oracle.is_beaten_by(each[0].result)])


def _search(
    settings: SimConfig,
    requests: Sequence[TraceRequest],
    kinds: Sequence[str],
    options: SearchOptions,
    *,
    rate_scale: float | None,
) -> tuple[pressure.PressureResult, OracleResult, Mapping[str, Sequence[Candidate]]]:
    """The pressure test, the oracle, and the candidates of each kind, the best one first; shows the progress."""
    gpus, seed = options.gpus, options.seed
    with worker_pool(options.jobs) as pool, progress_bar() as progress:
        task = progress.add_task("pressure test", total=None)
        ratio_test = pool.submit(pressure.pressure_test, settings, requests, gpus=gpus, seed=seed).result()
        progress.update(task, description="oracle")
        oracle = pool.submit(find_oracle, settings, requests, rate_scale=rate_scale, seed=seed).result()
        progress.update(task, description="policies", total=options.tries * len(kinds), completed=0)

        def on_done(candidate: Candidate) -> None:
            progress.update(task, advance=1)

        candidates = search.curate(
            settings, oracle, ratio_test, kinds, tries=options.tries, seed=seed, pool=pool, on_done=on_done
        )
    return ratio_test, oracle, candidates


def _best(candidates: Mapping[str, Sequence[Candidate]], least_frac: float) -> Candidate:
    """The best candidate of all kinds; prints a note if it keeps the objectives of too few requests.

    ``candidates``: of each kind, the best one first.
    """
    best = max((each[0] for each in candidates.values()), key=lambda one: one.score(least_frac))
    is_attained, _ = best.score(least_frac)
    if not is_attained:
        errors.print(
            f"note: no candidate kept the objectives of {least_frac:.2%} of the requests; the nearest one is written",
            style="yellow",
        )
    return best


def _policy_kinds(policy: str, *, is_served: bool) -> list[str]:
    """The kinds of policy to search. Raises ValueError: a kind has no search space, or cannot be served.

    ``is_served``: whether the best policy goes into a Serve YAML. Only kinds in ``POLICIES`` can be served. The other
    kinds in ``SPACES`` are policies of other systems, for the simulator only.
    """
    choices = sorted(kind for kind in SPACES if kind in POLICIES or not is_served)
    kinds = choices if policy == "all" else names_in(policy)
    for kind in kinds:
        if kind not in SPACES:
            raise ValueError(f"--policy {kind}: cannot be searched; choose among {', '.join(choices)}")
        if kind not in choices:
            raise ValueError(
                f"--policy {kind}: for the simulator only, not with --serve; choose among {', '.join(choices)}"
            )
    return kinds
