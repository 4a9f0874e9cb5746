"""The commands that watch and change how a running application is sized."""

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import yaml
from rich.console import Group
from rich.live import Live
from typer import Argument, Exit, Option, Typer

from autoscale.decide import decision_log
from serve_app.checks.yaml_checks import ConfigError, config_errors, load_serve_yaml, parse_app_config, sole_application
from serve_app.cli.scaling_view import scaling_view
from serve_app.cli.terminal import Address, App, Service, console, time_text
from serve_app.running.ray_control import Control, service_name, status_of
from serve_app.running.ray_serve import connect

commands = Typer()


@commands.command()
def top(
    app: App = "tandem",
    service: Service = None,
    address: Address = "auto",
    once: Annotated[bool, Option(help="Show once and exit.")] = False,
) -> None:
    """Watch pools, signal, ratio and decisions; of all services, if none is named."""
    connect(address)

    def view() -> Group:
        status = status_of(app)
        services = status.services
        shown = services if service is None else [service_name(app, status, service)]
        titles = {name: name if len(services) > 1 else app for name in shown}
        return Group(*(scaling_view(titles[name], services[name], status, time.time()) for name in shown))

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
        list[str] | None, Argument(help="FIELD=VALUE, as under args.autoscale: pd_ratio=1:2 policy.target=500.")
    ] = None,
    reset: Annotated[bool, Option(help="Return to what was deployed.")] = False,
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
        int | None, Option(min=0, help="Prefill replicas of all groups, in those of the first; 0: no group has any.")
    ] = None,
    decode: Annotated[int | None, Option(min=1, help="Decode replicas of all groups, in those of the first.")] = None,
    resume: Annotated[bool, Option(help="Let the policy decide again.")] = False,
    app: App = "tandem",
    service: Service = None,
    address: Address = "auto",
) -> None:
    """Set both counts by hand, until --resume."""
    given_counts = [count for count in (prefill, decode) if count is not None]
    if len(given_counts) != (0 if resume else 2):
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
    log: Annotated[Path, Argument(help="A decision log (JSON lines).")],
    config: Annotated[Path | None, Option(help="A Serve YAML whose args.autoscale to use instead.")] = None,
) -> None:
    """Work out every plan of a decision log again and show the differences; exit code 1 if there are any."""
    replay_config = None
    if config is not None:
        args = sole_application(load_serve_yaml(config)).get("args")
        replay_config = parse_app_config(args).services[0].autoscale
        if replay_config is None:
            raise ConfigError(f"{config}: it has no args.autoscale to replay with")
    with config_errors():
        lines = decision_log.load_lines(log)
    with config_errors(f"{log}: "):
        results = list(decision_log.replay(lines, replay_config))
    different = [result for result in results if result is not None]
    for result in different:
        console.print(f"line {result.line}, {result.service} at {time_text(result.now_s)}:", highlight=False)
        if result.fields.keys() == {"state"}:
            console.print("  only what the controller remembers", highlight=False)
        for name, (logged, again) in result.fields.items():
            if name != "state":
                console.print(f"  {name}: {logged} -> {again}", highlight=False, markup=False)
    console.print(f"{len(results)} decisions, {len(different)} different")
    if different:
        raise Exit(1)


def _control(app: str, address: str, service: str | None) -> Control:
    connect(address)
    return Control(app, service)


def _nested(pairs: Sequence[str]) -> dict[str, Any]:
    """``["guard.budget_gpus=8"]`` -> ``{"guard": {"budget_gpus": 8}}``; values are read as YAML."""
    changes: dict[str, Any] = {}
    for pair in pairs:
        path, separator, text = pair.partition("=")
        try:
            # YAML would read 1:2 as a number of base 60.
            is_ratio = path == "pd_ratio" or re.fullmatch(r"\d+:\d+", text)
            value = text if is_ratio else yaml.safe_load(text)
            is_pair = bool(separator) and all(path.split("."))
        except yaml.YAMLError:
            is_pair = False
        if not is_pair:
            raise ConfigError(f"{pair!r} is no FIELD=VALUE, such as pd_ratio=1:2 or policy.target=500")
        *parents, last = path.split(".")
        level = changes
        for name in parents:
            level = level.setdefault(name, {})
            if not isinstance(level, dict):
                raise ConfigError(f"{name} is given a value and fields: give one of them")
        level[last] = value
    return changes
