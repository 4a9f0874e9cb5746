"""The commands that look at nodes and places: topology, explain, fits, cordon and uncordon."""

import json
import time
from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option, Typer

from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.status import Status
from autoscale.ratio import PdRatio, pd_text
from autoscale.types import Plan, PoolKey
from kvtransfer.topology import Node, Role
from serve_app.checks.yaml_checks import ConfigError
from serve_app.cli import placement_view as view
from serve_app.cli.terminal import Address, App, Service, console, time_text
from serve_app.running.ray_control import ask, service_name, status_of
from serve_app.running.ray_serve import connect

commands = Typer()

# The most past changes of the wanted replicas that `tandem explain` shows.
_HISTORY_LINES = 20


@commands.command()
def topology(app: App = "tandem", address: Address = "auto") -> None:
    """Show switches and nodes with their GPUs and replicas, nodes that may be added, and what is wrong with labels."""
    status, nodes = _status_and_nodes(app, address)
    places = status.places or {}
    console.print(view.topology_tree(nodes, places), highlight=False)
    pools = [pool for service in status.services.values() for pool in view.pools_now(service, places)]
    if (line := view.fragmentation(nodes, pools)) is not None:
        console.print(line, highlight=False)
    for line in view.type_lines(status, nodes, time.time()):
        console.print(line, highlight=False, markup=False)
    for finding in view.label_findings(nodes):
        console.print(f"labels: {finding}", highlight=False, markup=False)


@commands.command()
def explain(
    service: Annotated[str | None, Argument(help="Its model's name, if the application has several.")] = None,
    app: App = "tandem",
    address: Address = "auto",
) -> None:
    """Why a service's replicas are where they are, where further ones would go, and how they came there."""
    status, nodes = _status_and_nodes(app, address)
    name, plan, config, ratio = _planned(app, status, service)
    pools = view.pools_now(status.services[name], status.places or {})
    console.print(f"{name}: ratio {ratio}, priority {config.priority}", highlight=False)
    console.print(view.explain_table(pools, nodes, status.places or {}))
    pending = {role: plan.pending.get(role, 0) for role in Role}
    if any(pending.values()):
        console.print(f"{pd_text(pending)} have no place yet, and are tried again every cycle", highlight=False)
    more = ratio.unit()
    all_nodes = [*nodes, *view.nodes_to_come(status, nodes, time.time())]
    gained, placed = view.would_fit(pools, ratio, all_nodes, more, view.gpus_left(status, name))
    new = view.waits_for(placed, (pool.key for pool in pools), all_nodes)
    where = ", ".join(f"{prefill}P{decode}D to {group}" for group, (prefill, decode) in gained.items()) or "nowhere"
    console.print(f"{pd_text(more)} more would go {where}{new}", highlight=False)
    if any(placed.pending.values()):
        console.print(f"of these {pd_text(placed.pending)} would be pending", highlight=False)
    for group, why in placed.passed_over.items():
        console.print(f"  not to {group}: {why}", highlight=False, markup=False)
    for line in _history(Path(status.log_path), name):
        console.print(line, highlight=False, markup=False)


@commands.command()
def fits(
    prefill: Annotated[int, Option(min=0, help="Number of further prefill replicas.")],
    decode: Annotated[int, Option(min=0, help="Number of further decode replicas.")],
    service: Service = None,
    app: App = "tandem",
    address: Address = "auto",
) -> None:
    """Whether further replicas of a service would find room now, and where; exit code 1 if some would not."""
    status, nodes = _status_and_nodes(app, address)
    name, _, _, ratio = _planned(app, status, service)
    pools = view.pools_now(status.services[name], status.places or {})
    more = {Role.PREFILL: prefill, Role.DECODE: decode}
    all_nodes = [*nodes, *view.nodes_to_come(status, nodes, time.time())]
    gained, placed = view.would_fit(pools, ratio, all_nodes, more, view.gpus_left(status, name))
    for group, (more_prefill, more_decode) in gained.items():
        new = view.waits_for(placed, (PoolKey(group, role) for role in Role), all_nodes)
        console.print(f"{more_prefill}P{more_decode}D in {group}{new}", highlight=False)
    for group, why in placed.passed_over.items():
        console.print(f"not in {group}: {why}", highlight=False, markup=False)
    if any(placed.pending.values()):
        console.print(f"no room for {pd_text(placed.pending)}", highlight=False)
        raise Exit(1)


@commands.command()
def cordon(
    name: Annotated[str, Argument(help="A node's id or its beginning, a host name, or the name of a switch.")],
    app: App = "tandem",
    address: Address = "auto",
) -> None:
    """Start no further replica of the application on a node, or under a switch; those that are there stay."""
    status = _status(app, address)
    target = view.cordonable(name, status.nodes or ())
    if target is None:
        raise ConfigError(
            f"{name!r} names no node, host or switch, or begins the ids of several nodes: `tandem topology` shows them"
        )
    ask(app, "cordon", target, True)
    console.print(f"{target} takes nothing new until `tandem uncordon {name}`", highlight=False)


@commands.command()
def uncordon(
    name: Annotated[str, Argument(help="What was cordoned.")], app: App = "tandem", address: Address = "auto"
) -> None:
    """Allow new replicas again on a node, or under a switch, that was cordoned."""
    status = _status(app, address)
    target = view.cordonable(name, status.nodes or ()) or name
    if target not in status.cordoned:
        raise ConfigError(f"{name!r} is not cordoned; {', '.join(status.cordoned) or 'nothing'} is")
    ask(app, "cordon", target, False)
    console.print(f"{target} takes replicas again", highlight=False)


def _status(app: str, address: str) -> Status:
    connect(address)
    return status_of(app)


def _status_and_nodes(app: str, address: str) -> tuple[Status, tuple[Node, ...]]:
    status = _status(app, address)
    if status.nodes is None:
        raise ConfigError(f"{app} does not look at nodes: give it args.topology, or wait for its first decision")
    return status, status.nodes


def _planned(app: str, status: Status, service: str | None) -> tuple[str, Plan, AutoscaleConfig, PdRatio]:
    """A service's name, its last plan, its configuration and the ratio that its last plan follows."""
    name = service_name(app, status, service)
    config, last = status.services[name].config, status.services[name].last
    if last is None:
        raise ConfigError(f"{name} has no plan yet: wait for its first decision")
    return name, last.plan, config, last.plan.ratio(config.ratio)


def _history(log: Path, service: str) -> list[str]:
    """The last changes of the wanted replicas of each pool, from the decision log if it is on this machine."""
    changes: list[str] = []
    before: dict[str, int] = {}  # wanted replicas by pool in the line before; the first line shows no change
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return [f"  (the history is in {log} on the head node)"]
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:  # the coordinator is writing this line, or was killed while it did
            continue
        if record.get("service") != service or "plan" not in record:
            continue
        desired = record["plan"]["state"]["desired"]
        steps = {pool: count - before.get(pool, 0) for pool, count in desired.items()}
        change = ", ".join(f"{pool} {step:+d}" for pool, step in steps.items() if step)
        if change and before:
            reason = record["plan"]["decision"]["reason"]
            changes.append(f"{time_text(record['snapshot']['now_s'])}  {change}: {reason}")
        before = desired
    return changes[-_HISTORY_LINES:]
