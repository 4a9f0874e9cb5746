"""`tandem curate --from LOG`: a proposal for a running application from the last day of its decision log."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import typer
import yaml
from numpy.random import default_rng
from rich.table import Table

from autoscale.decide.decision_log import load_lines
from autoscale.sim.checks import check_trace, notes
from autoscale.sim.compare import run_named
from autoscale.sim.config import SimConfig
from autoscale.sim.curate import Candidate
from autoscale.sim.logged_day import LoggedDay, read_day, trace_of
from autoscale.sim.proposal import NOW, Proposal, day_config, day_notes, propose
from autoscale.traces.trace import TraceRequest
from serve_app.checks.yaml_checks import ConfigError, config_errors
from serve_app.cli.curate_report import flat
from serve_app.cli.pressure_report import tune_command
from serve_app.cli.sim_report import file_source, print_notes, print_whole
from serve_app.cli.terminal import console, figures_table, time_text
from serve_app.running.ray_control import Control
from serve_app.running.ray_serve import connect

# Longest `tandem tune` that is printed, characters: an engine profile does not fit a command.
_COMMAND_CHARS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Day:
    """A logged day, as it is simulated; ``flags``: what a reader must know, one sentence each."""

    day: LoggedDay
    config: SimConfig
    trace: tuple[TraceRequest, ...]
    flags: list[str]


def load_day(
    logs: Sequence[Path], service: str | None, base: SimConfig, *, hours: float, seed: int, is_strict: bool
) -> Day:
    """Read the logs, the oldest first, and make a trace of their last hours.

    Raises ValueError: a log cannot be read, or has no day to simulate.
    """
    lines = [line for log in logs for line in load_lines(log)]
    place = ", ".join(map(str, logs))
    with config_errors(f"{place}: "):
        day = read_day(lines, service, last_s=3600.0 * hours)
        trace = trace_of(day, default_rng(seed))
    config = day_config(base, day)
    check_trace(config, trace, logs[-1], is_strict=is_strict)
    return Day(day=day, config=config, trace=trace, flags=[*day.notes(), *day_notes(base, day), *notes(config, trace)])


def proposal_of(day: Day, oracle: Any, candidates: Mapping[str, Sequence[Candidate]]) -> Proposal:
    """The proposal for a day. ``oracle``: of the day; ``candidates``: tried settings by kind, the best first."""
    result = run_named(day.config, NOW, oracle.scenario, oracle.first_counts)
    now = Candidate(kind=day.day.config.policy.kind, changes={}, result=result)
    return propose(day.day, day.config, now, [each[0] for each in candidates.values()], oracle.least_frac)


def show_proposal(day: Day, proposal: Proposal, least_frac: float, app: str) -> None:
    """Print what runs now, what is proposed, and how to change it."""
    begin, end = (time_text(day.day.points[index].at_s) for index in (0, -1))
    title = f"{day.day.service}, {begin} to {end}: {len(day.trace):,} requests, simulated"
    table = figures_table("settings", ("SLO met", "GPU-hours"), title)
    table.add_column("policy", overflow="fold")
    _add_row(table, "now", proposal.now, "as they are")
    if proposal.best is not None:
        _add_row(table, "proposed", proposal.best, ", ".join(flat(proposal.best.changes)))
    print_whole(table)
    print_notes(day.flags)
    if proposal.best is None:
        console.print(f"Nothing that was tried is better: keep what runs ({least_frac:.2%} must meet the objectives).")
    elif proposal.redeploy is not None:
        console.print(
            f"Only a new deployment can make these changes ({proposal.redeploy}): put them under args.autoscale.",
            highlight=False,
            markup=False,
        )
    elif len(command := tune_command(proposal.changes, app, day.day.service)) <= _COMMAND_CHARS:
        console.print(f"To change the application:\n  {command}", highlight=False, soft_wrap=True, markup=False)
    else:
        console.print(
            "The changes are too long for a command: give --apply, or --out and put its lines under args.autoscale."
        )


def _add_row(table: Table, name: str, candidate: Candidate, settings: str) -> None:
    outcome = candidate.result.outcome
    cells = (f"{outcome.slo_attainment_frac:.2%}", f"{outcome.gpu_hours:.2f}", f"{candidate.kind}: {settings}")
    table.add_row(name, *cells)


def proposal_yaml(day: Day, proposal: Proposal) -> str:
    """The changes as YAML, with where they come from."""
    assert proposal.best is not None  # there are changes
    now, best = proposal.now.result.outcome, proposal.best.result.outcome
    changes = json.loads(json.dumps(dict(proposal.changes)))  # plain values: YAML cannot write the others
    return (
        f"# Found by `tandem curate --from` for {day.day.service}. Put it under args.autoscale.\n"
        f"# Proposed: {best.slo_attainment_frac:.2%} within the objectives for {best.gpu_hours:.2f} GPU-hours.\n"
        f"# Now: {now.slo_attainment_frac:.2%} for {now.gpu_hours:.2f}.\n"
        f"{yaml.safe_dump(changes, sort_keys=False)}"
    )


def proposal_document(day: Day, proposal: Proposal, logs: Sequence[Path]) -> dict[str, Any]:
    """A proposal as plain values."""
    best = proposal.best
    return {
        "tandem_version": version("tandem-serve"),
        "logs": [file_source(log) for log in logs],
        "service": day.day.service,
        "hours": day.day.span_s / 3600.0,
        "requests": len(day.trace),
        "flags": day.flags,
        "config": day.day.config.model_dump(mode="json"),
        "now": asdict(proposal.now.result.outcome),
        "proposed": None if best is None else {"kind": best.kind, **asdict(best.result.outcome)},
        "changes": dict(proposal.changes),
        "redeploy": proposal.redeploy,
    }


def apply(day: Day, proposal: Proposal, app: str, address: str) -> None:
    """Ask, and make the changes in the running application.

    Raises:
        ConfigError: there is no proposal, only a new deployment can make it, or it is declined.
    """
    if proposal.best is None:
        return
    if proposal.redeploy is not None:
        raise ConfigError("--apply: only a new deployment can make these changes; nothing was changed")
    if not typer.confirm(f"Change {app} ({day.day.service}) now?"):
        raise ConfigError("nothing was changed")
    connect(address)
    control = Control(app, day.day.service)
    if control.status().config != day.day.config:
        raise ConfigError("the application has other settings now than at the end of the log: nothing was changed")
    control.tune(proposal.changes, "curate --from: accepted")
    console.print("tuned; it holds from the next decision on")
