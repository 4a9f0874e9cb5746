"""The commands that watch and change how a running application is sized."""

import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console, Group
from rich.live import Live

from serve_app.validate import ConfigError

console = Console()
commands = typer.Typer()

App = Annotated[str, typer.Option(help="The application's name.")]
Service = Annotated[str | None, typer.Option(help="Its model's name, where the application has several.")]
Address = Annotated[str, typer.Option(help="The Ray cluster that this machine belongs to: auto, or HOST:PORT.")]


@commands.command()
def top(
    app: App = "tandem",
    service: Service = None,
    address: Address = "auto",
    once: Annotated[bool, typer.Option(help="Show it once and leave.")] = False,
) -> None:
    """Watch pools, signal, ratio and decisions; of all services, if none is named."""
    from serve_app.ray_control import statuses
    from serve_app.scaling_view import scaling_view
    from serve_app.sdk import connect

    connect(address)

    def view() -> Group:
        seen = statuses(app)
        if service is not None and service not in seen:
            raise ConfigError(f"{app} has no service {service!r}: it has {', '.join(seen)}")
        shown = seen if service is None else {service: seen[service]}
        return Group(*(scaling_view(name if len(seen) > 1 else app, of, time.time()) for name, of in shown.items()))

    if once or not console.is_terminal:
        console.print(view())
        return
    with Live(console=console, refresh_per_second=4) as live:
        while True:
            live.update(view())
            time.sleep(1.0)


@commands.command()
def tune(
    changes: Annotated[
        list[str] | None, typer.Argument(help="FIELD=VALUE, as under args.autoscale: pd_ratio=1:2 policy.target=500.")
    ] = None,
    reset: Annotated[bool, typer.Option(help="Return to what was deployed.")] = False,
    app: App = "tandem",
    service: Service = None,
    address: Address = "auto",
) -> None:
    """Change ratio, targets, limits or policy of a running application; no replica restarts."""
    if bool(changes) == reset:
        raise ConfigError("give FIELD=VALUE pairs, or --reset alone")
    nested = _nested(changes or [])
    _control(app, address, service).tune(nested, "tune --reset" if reset else f"tune {' '.join(changes or [])}")
    console.print("back to what was deployed" if reset else "tuned; it holds from the next decision on")


@commands.command()
def scale(
    prefill: Annotated[
        int | None, typer.Option(min=0, help="Prefill replicas of all groups together; 0 where groups have none.")
    ] = None,
    decode: Annotated[int | None, typer.Option(min=1, help="Decode replicas of all groups together.")] = None,
    resume: Annotated[bool, typer.Option(help="Let the policy decide again.")] = False,
    app: App = "tandem",
    service: Service = None,
    address: Address = "auto",
) -> None:
    """Set both counts by hand, until --resume."""
    if resume == (prefill is not None or decode is not None) or (prefill is None) != (decode is None):
        raise ConfigError("give both --prefill and --decode, or --resume alone")
    control = _control(app, address, service)
    if prefill is not None and decode is not None:
        control.scale(prefill, decode)
        console.print(f"{prefill}P{decode}D until `tandem scale --resume`")
    else:
        control.resume()
        console.print("the policy decides again")


@commands.command()
def pause(app: App = "tandem", service: Service = None, address: Address = "auto") -> None:
    """Decide nothing, until `tandem scale --resume`."""
    _control(app, address, service).pause()
    console.print("paused until `tandem scale --resume`")


@commands.command()
def replay(
    log: Annotated[Path, typer.Argument(help="A decision log (JSON lines).")],
    config: Annotated[Path | None, typer.Option(help="A Serve YAML whose args.autoscale to use instead.")] = None,
) -> None:
    """Work out every plan of a decision log again and show the differences; exit code 1 if there are any."""
    from autoscale.decision_log import load_lines
    from autoscale.decision_log import replay as work_out
    from serve_app.validate import load_serve_yaml, parse_app_config, sole_application

    other = None
    if config is not None:
        other = parse_app_config(sole_application(load_serve_yaml(config)).get("args")).services[0].autoscale
        if other is None:
            raise ConfigError(f"{config}: it has no args.autoscale to replay with")
    try:
        results = list(work_out(load_lines(log), other))
    except ValueError as error:
        raise ConfigError(f"{log}: {error}" if str(log) not in str(error) else str(error)) from None
    different = [result for result in results if result is not None]
    for result in different:
        at = datetime.fromtimestamp(result.now_s).isoformat(sep=" ", timespec="seconds")
        console.print(f"line {result.line}, {result.service} at {at}:", highlight=False)
        if result.fields.keys() == {"state"}:
            console.print("  only what the controller remembers", highlight=False)
        for name, (logged, again) in result.fields.items():
            if name != "state":
                console.print(f"  {name}: {logged} -> {again}", highlight=False, markup=False)
    console.print(f"{len(results)} decisions, {len(different)} different")
    if different:
        raise typer.Exit(1)


def _control(app: str, address: str, service: str | None = None) -> Any:
    from serve_app.sdk import connect

    connect(address)
    from serve_app.ray_control import Control  # imports ray, which reads its token then

    return Control(app, service)


def _nested(pairs: Sequence[str]) -> dict[str, Any]:
    """``["guard.budget_gpus=8"]`` -> ``{"guard": {"budget_gpus": 8}}``; values are read as YAML."""
    changes: dict[str, Any] = {}
    for pair in pairs:
        path, separator, text = pair.partition("=")
        try:
            # YAML would read 1:2 as a number of base 60.
            value = text if path == "pd_ratio" else yaml.safe_load(text)
        except yaml.YAMLError:
            separator = ""
        if not separator or not all(path.split(".")):
            raise ConfigError(f"{pair!r} is no FIELD=VALUE, such as pd_ratio=1:2 or policy.target=500")
        *parents, last = path.split(".")
        level = changes
        for name in parents:
            level = level.setdefault(name, {})
            if not isinstance(level, dict):
                raise ConfigError(f"{name} is given a value and fields: give one of them")
        level[last] = value
    return changes
