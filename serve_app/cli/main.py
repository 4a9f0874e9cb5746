"""Serve large language models with prefill and decode on separate vLLM engines, on Ray Serve."""

import asyncio
import json
import os
import shlex
import signal
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from typer import Argument, Exit, Option, Typer

from autoscale.report import Report
from autoscale.traces.trace import TraceRequest, load_trace, scale_trace
from deployments.serve_seam.environment import serve_environment
from serve_app import sdk
from serve_app.checks.ray_schema import check_engines, single_app_config
from serve_app.checks.yaml_checks import ConfigError, config_errors, load_serve_yaml
from serve_app.cli import (
    cost,
    curate,
    keys,
    operators,
    placement,
    pressure,
    profiles,
    ratio,
    scaling,
    schema,
    simulate,
    traces,
)
from serve_app.cli.terminal import Address, console, errors
from serve_app.kube.manifest import manifest_text, render_rayservice
from serve_app.load.generator import LoadGenerator
from serve_app.local import quickstart as demo
from serve_app.local.cluster import DeployError
from serve_app.local.shipped import copy_examples, shipped
from serve_app.output import write_file
from serve_app.running import ray_drain
from serve_app.running.ray_stage import stage as stage_all

cli = Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
for family in (scaling, simulate, profiles, ratio, pressure, curate, traces, cost, keys, schema, placement, operators):
    cli.add_typer(family.commands)

# The shipped configuration that needs no GPU.
_TINY = "cpu_tiny.yaml"

ConfigPath = Annotated[Path, Argument(help="A Serve YAML with one Tandem application.")]


def main() -> None:
    """Entry point of ``tandem``."""
    run(cli)


def run(commands: Typer) -> None:
    """Run commands; an error that the user can mend is printed as one line, and the exit code is 1."""
    try:
        commands()
    except (ConfigError, DeployError) as error:
        errors.print(f"tandem: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise SystemExit(1) from None


@cli.command()
def validate(config: ConfigPath) -> None:
    """Check a config without starting anything."""
    app = single_app_config(load_serve_yaml(config))
    with errors.status("asking vLLM about the engine arguments"):
        check_engines(app)
    for sentence in (each for service in app.services for each in service.profile_differences()):
        errors.print(f"note: {sentence}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    pools = sum(len(group.pools()) for group in app.groups)
    models = ", ".join(f"model {service.model.id}" for service in app.services)
    console.print(f"{config}: fine ({len(app.groups)} group(s), {pools} pools, {models})")


@cli.command()
def examples(folder: Annotated[Path, Argument(help="Where the folder configs/ is made.")] = Path()) -> None:
    """Copy the shipped configurations, engine profiles and traces to FOLDER/configs."""
    console.print(f"{copy_examples(folder)}: configurations, profiles/, sim/ and traces/", highlight=False)


@cli.command()
def env() -> None:
    """Print what Ray's processes on a cluster of yours need: eval "$(tandem env)" before `ray start`."""
    for name, value in serve_environment().items():
        typer.echo(f"export {name}={shlex.quote(value)}")


@cli.command()
def render(
    config: ConfigPath,
    image: Annotated[str, Option(help="The container image.")] = "tandem:latest",
    namespace: Annotated[str, Option(help="The Kubernetes namespace.")] = "default",
    name: Annotated[str, Option(help="The RayService's name.")] = "tandem",
) -> None:
    """Print a KubeRay RayService for a config."""
    document = load_serve_yaml(config)
    app = single_app_config(document)
    manifest = render_rayservice(document, app, image=image, namespace=namespace, name=name)
    typer.echo(manifest_text(manifest), nl=False)


@cli.command()
def deploy(config: ConfigPath, address: Address = "auto") -> None:
    """Deploy onto a running Ray cluster and wait until it answers."""
    app = _deploy(config, address=address)
    console.print(f"{app.name} answers at {app.url}/v1")


@cli.command()
def stage(config: ConfigPath, address: Address = "auto") -> None:
    """Copy models with a stage_folder to the disks of the nodes that may load them; exit code 1 if a copy failed."""
    app = single_app_config(load_serve_yaml(config))
    if all(service.model.stage_folder is None for service in app.services):
        raise ConfigError(f"{config}: no model has a stage_folder: add one to the models to copy")
    sdk.connect(address)
    copies = stage_all(app)
    for copy in copies:
        where = copy.folder or "not copied: replicas load it from its source (Ray's logs of that node say why)"
        console.print(f"{copy.node}: {copy.model}: {where} ({copy.seconds:.1f} s)", highlight=False, markup=False)
    if not copies or any(copy.folder is None for copy in copies):
        raise Exit(1)


@cli.command()
def serve(
    config: Annotated[Path | None, Argument(help="A Serve YAML; without it the tiny model's.")] = None,
    model: Annotated[str | None, Option(help="Serve this model folder instead of the config's.")] = None,
) -> None:
    """Start a cluster on this machine and serve; Ctrl-C or SIGTERM stops it once running requests are answered."""
    document = load_serve_yaml(config or shipped(_TINY))
    if model is not None:
        _replace_model(document, model)
    demo.build_missing_model(document)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: _interrupt(stop, received))
    with _deploy(document) as app:
        console.print(f"\nServing [bold]{app.config.model.id}[/] at {app.url}/v1 (Ctrl-C stops it). Try:\n")
        console.print(_curl(app.url, app.config), highlight=False, soft_wrap=True)
        console.print(f"\nMetrics, for this machine alone: {app.metrics_url}", highlight=False, soft_wrap=True)
        try:
            while not stop.wait(1.0):
                if not app.is_alive:
                    raise DeployError("the local Ray cluster has ended")
        finally:
            if stop.is_set():
                _finish(app)


@cli.command()
def quickstart(
    config: Annotated[Path | None, Argument(help="A Serve YAML; without it the tiny model's.")] = None,
    requests: Annotated[int, Option(help="Requests of the trace to replay.")] = 60,
) -> None:
    """Serve on this machine, replay a slice of a real trace, print the figures, and stop."""
    trace = demo.sample_trace(time_factor=3.0, limit=requests)
    document = load_serve_yaml(config or shipped(_TINY))
    demo.build_missing_model(document)
    with _deploy(demo.without_keys(document)) as app:
        before = demo.prefill_metrics(app.metrics_url)
        report = demo.run_trace(app.url, app.config.model.id, trace, console)
        metrics = demo.prefill_metrics(app.metrics_url)
        metrics.subtract(before)
        demo.show(report, metrics, console)
    if not demo.is_complete(report, metrics):
        raise ConfigError("the demonstration is not complete: a request failed, a path was unused, or no KV moved")


@cli.command()
def status(address: Address = "auto") -> None:
    """Show the applications of a running cluster."""
    sdk.connect(address)
    from ray import serve as ray_serve

    table = Table("application", "deployment", "state", "replicas")
    for name, application in ray_serve.status().applications.items():
        for deployment, details in application.deployments.items():
            table.add_row(name, deployment, str(details.status.value), str(dict(details.replica_states)))
    console.print(table)


@cli.command()
def delete(
    name: Annotated[str, Argument(help="The application's name.")],
    address: Address = "auto",
    timeout_s: Annotated[float, Option(min=0.0, help="How long requests may take to end, seconds.")] = 300.0,
) -> None:
    """Delete an application from a running cluster once its running requests are answered."""
    sdk.connect(address)
    from ray import serve as ray_serve

    if name not in ray_serve.status().applications:
        raise ConfigError(f"there is no application {name!r} on this cluster; `tandem status` lists them")
    if message := ray_drain.unanswered_message(ray_drain.delete(name, timeout_s)):
        errors.print(message, highlight=False)
    console.print(f"{name} deleted")


@cli.command()
def bench(
    url: Annotated[str, Option(help="The endpoint, without /v1.")] = "http://127.0.0.1:8000",
    model: Annotated[str, Option(help="The model's name.")] = "tiny",
    trace: Annotated[Path | None, Option(help="Replay this trace (CSV); without it the load is synthetic.")] = None,
    time_factor: Annotated[float, Option(help="Multiplies the trace's times.")] = 1.0,
    length_factor: Annotated[float, Option(help="Multiplies the trace's lengths.")] = 1.0,
    requests: Annotated[int, Option(min=1, help="How many requests.")] = 60,
    input_tokens: Annotated[int, Option(min=1, help="Synthetic prompt length.")] = 128,
    output_tokens: Annotated[int, Option(min=1, help="Synthetic output length.")] = 32,
    concurrency: Annotated[int, Option(min=1, help="Synthetic requests in flight.")] = 1,
    seed: Annotated[int | None, Option(help="Seed of the prompts; without it each run has new ones.")] = None,
    api_key: Annotated[str | None, Option(envvar="OPENAI_API_KEY", help="Sent if the endpoint requires a key.")] = None,
    json_out: Annotated[
        Path | None, Option("--json", help="Write the report and every request's timeline here.")
    ] = None,
) -> None:
    """Send load to any OpenAI endpoint and print a report."""
    generator = LoadGenerator(url, model, seed=seed, api_key=api_key)
    if trace is not None:
        with config_errors("--trace: "):
            load = scale_trace(load_trace(trace), time_factor=time_factor, length_factor=length_factor, limit=requests)
        records = asyncio.run(generator.replay(load))
    else:
        one = TraceRequest(at_s=0.0, input_tokens=input_tokens, output_tokens=output_tokens)
        records = asyncio.run(generator.keep_in_flight([one] * requests, concurrency))
    report = Report.of(records)
    typer.echo(json.dumps(report.as_dict(), indent=1))
    whole = {**report.as_dict(), "requests": [asdict(r) for r in records]}
    write_file(json_out, json.dumps(whole) + "\n", "--json")
    if not report.requests_ok:
        raise ConfigError(f"no request to {url} succeeded: {report.errors}")


def _deploy(source: Path | dict[str, Any], **options: Any) -> sdk.App:
    """Deploy and show the progress: on a terminal in one line that changes, elsewhere in a new line for each change."""
    with console.status("") as line:
        show = line.update if console.is_terminal else console.print
        show("checking the config, this machine and the engine arguments")
        return sdk.deploy(source, on_status=lambda status: show(_progress(status)), **options)


def _progress(status: sdk.Status) -> str:
    parts = [
        f"{name} {states.get('RUNNING', 0)}/{sum(states.values())}" for name, states in sorted(status.replicas.items())
    ]
    return f"{status.state.lower()}: {', '.join(parts) or 'building the application'}"


def _replace_model(document: dict[str, Any], source: str) -> None:
    """Put another model into a Serve YAML. ``source``: a folder or a hub id."""
    path = Path(source)
    try:
        is_here = path.exists()
    except OSError:  # the folder cannot be looked at, which check_machine reports
        is_here = False
    model = {"id": path.absolute().name, "source": str(path.resolve()) if is_here else source}
    try:
        document["applications"][0]["args"]["model"] = model
    except (KeyError, IndexError, TypeError):
        raise ConfigError("the config has no applications.0.args.model to replace") from None


def _interrupt(stop: threading.Event, number: int) -> None:
    """Handle a signal: the first one ends the command in order, a further one at once."""
    exit_code = 128 + number  # as a shell reports it
    if stop.is_set():
        os._exit(exit_code)
    stop.set()
    raise SystemExit(exit_code)


def _finish(app: sdk.App) -> None:
    most_s = app.config.ingress.request_timeout_s
    console.print(f"\nFinishing running requests, at most {most_s:g} s; Ctrl-C again ends at once", highlight=False)
    if message := ray_drain.unanswered_message(app.drain()):
        console.print(message, highlight=False)


def _curl(url: str, config: Any) -> str:
    message = {"role": "user", "content": "Hello"}
    body = json.dumps({"model": config.model.id, "messages": [message], "max_tokens": 16})
    key = "" if config.ingress.api_keys_file is None else " -H 'Authorization: Bearer KEY'"
    return f"curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'"


if __name__ == "__main__":
    main()
