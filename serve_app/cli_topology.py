"""The commands that look at nodes and places: topology, explain, fits, cordon and uncordon."""

import json
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kvtransfer.topology import Role
from serve_app.cli_scaling import Address, App, Service
from serve_app.validate import ConfigError

console = Console()
commands = typer.Typer()

_HISTORY = 20


@commands.command()
def topology(app: App = "tandem", address: Address = "auto") -> None:
    """Show data centres, switches and nodes, their GPUs, who is on them, and what is wrong with labels."""
    from autoscale.tuning import Pools
    from serve_app.ray_control import statuses
    from serve_app.sdk import connect
    from serve_app.topology_view import fragmentation, label_findings, nodes_of, pools_now, topology_tree

    connect(address)
    of = statuses(app)
    status = next(iter(of.values()))
    nodes, places = nodes_of(status), status.get("places") or {}
    if nodes is None:
        raise ConfigError(f"{app} does not look at nodes: give it args.topology, or wait for its first decision")
    console.print(topology_tree(nodes, places), highlight=False)
    pools = [pool for one in of.values() for pool in pools_now(one, Pools.model_validate(one["pools"]), places)]
    if (line := fragmentation(nodes, pools)) is not None:
        console.print(line, highlight=False)
    for finding in label_findings(nodes):
        console.print(f"labels: {finding}", highlight=False, markup=False)


@commands.command()
def explain(
    service: Annotated[str | None, typer.Argument(help="Its model's name; the one that there is.")] = None,
    app: App = "tandem",
    address: Address = "auto",
) -> None:
    """Why a service's replicas are where they are, where its next unit would go, and how they came there."""
    control, status, pools, nodes, places, limits = _placed(app, address, service)
    from autoscale.ratio import PdRatio, pd_text
    from serve_app.topology_view import explain_table, would_fit

    ratio = PdRatio.parse(status["plan"]["decision"]["ratio"] or status["config"]["pd_ratio"])
    console.print(f"{control.service}: ratio {ratio}, priority {status['config']['priority']}", highlight=False)
    console.print(explain_table(pools, nodes, places))
    waiting = {role: status["plan"]["pending"].get(role, 0) for role in Role}
    if any(waiting.values()):
        console.print(
            f"{pd_text(waiting)} that it wants have no place, and are tried again every cycle", highlight=False
        )
    unit = {Role.PREFILL: ratio.prefill, Role.DECODE: ratio.decode}
    gained, pending, passed_over = would_fit(pools, ratio, nodes, unit, limits)
    where = ", ".join(f"{p}P{d}D to {group}" for group, (p, d) in gained.items()) or "nowhere"
    console.print(f"a unit more ({pd_text(unit)}) would go {where}", highlight=False)
    if any(pending.values()):
        console.print(f"of it {pd_text(pending)} would be pending", highlight=False)
    for group, why in passed_over.items():
        console.print(f"  not to {group}: {why}", highlight=False, markup=False)
    for at, line in _history(Path(status["log_path"]), control.service):
        console.print(f"{at}  {line}", highlight=False, markup=False)


@commands.command()
def fits(
    prefill: Annotated[int, typer.Option(min=0, help="So many prefill replicas more.")],
    decode: Annotated[int, typer.Option(min=0, help="So many decode replicas more.")],
    service: Service = None,
    app: App = "tandem",
    address: Address = "auto",
) -> None:
    """Whether a service's replicas would find room now, and where; 1 where some would not."""
    _, status, pools, nodes, _, limits = _placed(app, address, service)
    from autoscale.ratio import PdRatio, pd_text
    from serve_app.topology_view import would_fit

    ratio = PdRatio.parse(status["plan"]["decision"]["ratio"] or status["config"]["pd_ratio"])
    more = {Role.PREFILL: prefill, Role.DECODE: decode}
    gained, pending, passed_over = would_fit(pools, ratio, nodes, more, limits)
    for group, (more_prefill, more_decode) in gained.items():
        console.print(f"{more_prefill}P{more_decode}D in {group}", highlight=False)
    for group, why in passed_over.items():
        console.print(f"not in {group}: {why}", highlight=False, markup=False)
    if any(pending.values()):
        console.print(f"no room for {pd_text(pending)}", highlight=False)
        raise typer.Exit(1)


@commands.command()
def cordon(
    name: Annotated[str, typer.Argument(help="A node's id or its beginning, a host name, or the name of a switch.")],
    app: App = "tandem",
    address: Address = "auto",
) -> None:
    """Start no replica of the application on a node, or under a switch, any more; those that are there stay."""
    from serve_app.topology_view import cordonable, nodes_of

    status, control = _any(app, address)
    known = cordonable(name, nodes_of(status) or [])
    if known is None:
        raise ConfigError(f"no one node, host or switch is called {name!r}: `tandem topology` shows them")
    control.cordon(known, True)
    console.print(f"{known} takes nothing new until `tandem uncordon {name}`", highlight=False)


@commands.command()
def uncordon(
    name: Annotated[str, typer.Argument(help="What was cordoned.")], app: App = "tandem", address: Address = "auto"
) -> None:
    """Let replicas start there again."""
    from serve_app.topology_view import cordonable, nodes_of

    status, control = _any(app, address)
    known, cordoned = cordonable(name, nodes_of(status) or []) or name, status["cordoned"]
    if known not in cordoned:
        raise ConfigError(f"{name!r} is not cordoned; {', '.join(cordoned) or 'nothing'} is")
    control.cordon(known, False)
    console.print(f"{known} takes replicas again", highlight=False)


def _any(app: str, address: str) -> tuple[dict[str, Any], Any]:
    """The status of any service, and a control of the application."""
    from serve_app.ray_control import Control, statuses
    from serve_app.sdk import connect

    connect(address)
    name, status = next(iter(statuses(app).items()))
    return status, Control(app, name)


def _placed(app: str, address: str, service: str | None) -> tuple[Any, Any, Any, Any, Any, Any]:
    """A service's control and status, its pools, the nodes, who is where, and GPUs that budgets leave."""
    from autoscale.tuning import Pools
    from serve_app.ray_control import Control, statuses
    from serve_app.sdk import connect
    from serve_app.topology_view import gpus_left, nodes_of, pools_now

    connect(address)
    control = Control(app, service)
    of = statuses(app)
    status = of[control.service]
    nodes, places = nodes_of(status), status.get("places") or {}
    if nodes is None:
        raise ConfigError(f"{app} does not look at nodes: give it args.topology, or wait for its first decision")
    limits = gpus_left(of, control.service, places)
    return control, status, pools_now(status, Pools.model_validate(status["pools"]), places), nodes, places, limits


def _history(log: Path, service: str) -> list[tuple[str, str]]:
    """The last changes of where a service's replicas should be, from its decision log, if that is on this machine."""
    changes: list[tuple[str, str]] = []
    before: dict[str, int] = {}
    try:
        lines = log.read_text().splitlines()
    except OSError:
        return [("", f"(the history is in {log} on the head node)")]
    for line in lines:
        record = json.loads(line)
        if record.get("service") != service or "plan" not in record:
            continue
        desired = record["plan"]["state"]["desired"]
        moved = {pool: count - before.get(pool, 0) for pool, count in desired.items() if count != before.get(pool, 0)}
        if moved and before:
            at = datetime.fromtimestamp(record["snapshot"]["now_s"]).isoformat(sep=" ", timespec="seconds")
            steps = ", ".join(f"{pool} {step:+d}" for pool, step in moved.items())
            changes.append((at, f"{steps}: {record['plan']['decision']['reason']}"))
        before = desired
    return changes[-_HISTORY:]
