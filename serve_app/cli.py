"""Serve large language models with prefill and decode on separate vLLM engines, on Ray Serve."""

import json
import os
import shlex
import signal
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from autoscale.report import Report
from autoscale.trace import TraceRequest, load_trace, scale_trace
from deployments.environment import serve_environment
from serve_app import cli_cost, cli_drill, cli_key, cli_simulate, cli_topology, cli_trace
from serve_app.cli_scaling import Address, commands, console
from serve_app.cluster import DeployError
from serve_app.output import write_file
from serve_app.validate import ConfigError, load_serve_yaml

cli = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
cli.add_typer(commands)
cli.add_typer(cli_simulate.commands)
cli.add_typer(cli_trace.commands)
cli.add_typer(cli_cost.commands)
cli.add_typer(cli_drill.commands)
cli.add_typer(cli_key.commands)
cli.add_typer(cli_topology.commands)
errors = Console(stderr=True)

ConfigPath = Annotated[Path, typer.Argument(help="A Serve YAML with one Tandem application.")]


def main() -> None:
    """Entry point: one line and exit code 1 for what a user can mend."""
    try:
        cli()
    except (ConfigError, DeployError) as error:
        errors.print(f"tandem: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise SystemExit(1) from None


@cli.command()
def validate(config: ConfigPath) -> None:
    """Check a config without starting anything."""
    from serve_app.ray_schema import check_engines, single_app_config

    app = single_app_config(load_serve_yaml(config))
    with errors.status("asking vLLM about the engine arguments"):
        check_engines(app)
    pools = sum(len(group.pools()) for group in app.groups)
    models = ", ".join(f"model {service.model.id}" for service in app.services)
    console.print(f"{config}: fine ({len(app.groups)} group(s), {pools} pools, {models})")


@cli.command()
def env() -> None:
    """Print what Ray's processes on a cluster of yours need: eval "$(tandem env)" before `ray start`."""
    for name, value in serve_environment().items():
        typer.echo(f"export {name}={shlex.quote(value)}")


@cli.command()
def render(
    config: ConfigPath,
    image: Annotated[str, typer.Option(help="The container image.")] = "tandem:latest",
    namespace: Annotated[str, typer.Option(help="The Kubernetes namespace.")] = "default",
    name: Annotated[str, typer.Option(help="The RayService's name.")] = "tandem",
) -> None:
    """Print a KubeRay RayService for a config."""
    from serve_app.manifest import load_rayservice
    from serve_app.ray_schema import single_app_config

    single_app_config(load_serve_yaml(config))
    typer.echo(load_rayservice(config, image=image, namespace=namespace, name=name), nl=False)


@cli.command()
def deploy(config: ConfigPath, address: Address = "auto") -> None:
    """Deploy onto a running Ray cluster and wait until it answers."""
    from serve_app import sdk

    app = _deploy(sdk, config, address=address)
    console.print(f"{app.name} answers at {app.url}/v1")


@cli.command()
def stage(config: ConfigPath, address: Address = "auto") -> None:
    """Copy models with a stage_folder to the disks of the nodes that may load them; 1 where one could not be."""
    from serve_app import sdk
    from serve_app.ray_schema import single_app_config
    from serve_app.ray_stage import stage as stage_all

    app = single_app_config(load_serve_yaml(config))
    if all(service.model.stage_folder is None for service in app.services):
        raise ConfigError(f"{config}: no model has a stage_folder: nothing is to be copied")
    sdk.connect(address)
    made = stage_all(app)
    for one in made:
        where = one.folder or "not copied: replicas load it from its source (Ray's logs of that node say why)"
        console.print(f"{one.node}: {one.model}: {where} ({one.seconds:.1f} s)", highlight=False, markup=False)
    if not made or any(one.folder is None for one in made):
        raise typer.Exit(1)


@cli.command()
def serve(
    config: Annotated[Path, typer.Argument(help="A Serve YAML.")] = Path("configs/cpu_tiny.yaml"),
    model: Annotated[str | None, typer.Option(help="Serve this model folder instead of the config's.")] = None,
) -> None:
    """Start a cluster on this machine, serve, and stop on Ctrl-C or SIGTERM, once what has begun is answered."""
    from serve_app import sdk

    document = load_serve_yaml(config)
    if model is not None:
        _replace_model(document, model)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda got, _: _interrupt(stop, got))
    with _deploy(sdk, document) as app:
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
    config: Annotated[Path, typer.Argument(help="A Serve YAML.")] = Path("configs/cpu_tiny.yaml"),
    requests: Annotated[int, typer.Option(help="Requests of the trace to replay.")] = 60,
) -> None:
    """Serve on this machine, replay a slice of a real trace, show the figures, stop."""
    from serve_app import quickstart as demo
    from serve_app import sdk

    trace = demo.sample_trace(time_factor=3.0, limit=requests)
    with _deploy(sdk, demo.without_keys(load_serve_yaml(config))) as app:
        before = demo.prefill_metrics(app.metrics_url)
        report = demo.run_trace(app.url, app.config.model.id, trace, console)
        metrics = demo.prefill_metrics(app.metrics_url)
        metrics.subtract(before)
        demo.show(report, metrics, console)
    if not demo.is_complete(report, metrics):
        raise ConfigError("the demonstration is not complete: a request failed, a path was not taken, or no KV moved")


@cli.command()
def profile(
    config: ConfigPath,
    out: Annotated[Path, typer.Option(help="Where to write the profile.")],
    name: Annotated[str | None, typer.Option(help="The profile's name; the file's.")] = None,
    group: Annotated[str | None, typer.Option(help="The group to measure; the first.")] = None,
) -> None:
    """Measure a config's engines: an EngineProfile for the emulated engine."""
    from serve_app.ray_schema import single_app_config

    app = single_app_config(load_serve_yaml(config))
    groups = {each.name: (service, each) for service in app.services for each in service.groups}
    found = groups.get(group or app.groups[0].name)
    if found is None:
        raise ConfigError(f"there is no group {group!r} in {config}: it has {', '.join(groups)}")
    service, chosen = found
    from deployments import profiler

    try:
        with errors.status("starting") as line:
            measured = profiler.profile(
                name or out.stem,
                model=service.model,
                group=chosen,
                engine_kwargs=service.engine_kwargs,
                kv_transfer=app.kv_transfer,
                on_progress=line.update,
            )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(measured.model_dump_json(indent=1) + "\n")
    console.print(f"{out}: {measured.name}, {measured.kv_tokens} tokens of KV, {measured.max_running} requests")


@cli.command()
def status(address: Address = "auto") -> None:
    """Show the applications of a running cluster."""
    from serve_app.sdk import connect

    connect(address)
    from ray import serve as ray_serve

    table = Table("application", "deployment", "state", "replicas")
    for name, application in ray_serve.status().applications.items():
        for deployment, details in application.deployments.items():
            table.add_row(name, deployment, str(details.status.value), str(dict(details.replica_states)))
    console.print(table)


@cli.command()
def delete(
    name: Annotated[str, typer.Argument(help="The application's name.")],
    address: Address = "auto",
    timeout_s: Annotated[float, typer.Option(min=0.0, help="How long requests may take to end, seconds.")] = 300.0,
) -> None:
    """Delete an application from a running cluster, once it has answered what it has begun."""
    from serve_app import ray_drain
    from serve_app.sdk import connect

    connect(address)
    from ray import serve as ray_serve

    if name not in ray_serve.status().applications:
        raise ConfigError(f"there is no application {name!r} on this cluster; `tandem status` lists them")
    if left := ray_drain.said(ray_drain.delete(name, timeout_s)):
        errors.print(left, highlight=False)
    console.print(f"{name} deleted")


@cli.command()
def bench(
    url: Annotated[str, typer.Option(help="The endpoint, without /v1.")] = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="The model's name.")] = "tiny",
    trace: Annotated[Path | None, typer.Option(help="Replay this trace (CSV); else synthetic load.")] = None,
    time_factor: Annotated[float, typer.Option(help="Multiplies the trace's times.")] = 1.0,
    length_factor: Annotated[float, typer.Option(help="Multiplies the trace's lengths.")] = 1.0,
    requests: Annotated[int, typer.Option(min=1, help="How many requests.")] = 60,
    input_tokens: Annotated[int, typer.Option(min=1, help="Synthetic prompt length.")] = 128,
    output_tokens: Annotated[int, typer.Option(min=1, help="Synthetic output length.")] = 32,
    concurrency: Annotated[int, typer.Option(min=1, help="Synthetic requests in flight.")] = 1,
    seed: Annotated[int | None, typer.Option(help="Of the prompts; without it each run has new ones.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Where the endpoint wants one.")] = None,
    json_out: Annotated[
        Path | None, typer.Option("--json", help="Write the report and every request's timeline here.")
    ] = None,
) -> None:
    """Load any OpenAI endpoint and report."""
    import asyncio

    from serve_app.bench import LoadGenerator

    generator = LoadGenerator(url, model, seed=seed, api_key=api_key)
    if trace is not None:
        try:
            load = scale_trace(load_trace(trace), time_factor=time_factor, length_factor=length_factor, limit=requests)
        except ValueError as error:
            raise ConfigError(f"--trace: {error}") from None
        records = asyncio.run(generator.replay(load))
    else:
        one = TraceRequest(at_s=0.0, input_tokens=input_tokens, output_tokens=output_tokens)
        records = asyncio.run(generator.keep_in_flight([one] * requests, concurrency))
    report = Report.of(records)
    typer.echo(json.dumps(report.as_dict(), indent=1))
    whole = {**report.as_dict(), "requests": [asdict(r) for r in records]}
    write_file(json_out, json.dumps(whole) + "\n", "--json")
    if not report.requests_ok:
        raise ConfigError(f"no request to {url} ended well: {report.errors}")


def _deploy(sdk: Any, source: Path | dict[str, Any], **options: Any) -> Any:
    """Deploy with visible progress: a line that changes, or one line per change where there is no terminal."""
    with console.status("") as line:
        show = line.update if console.is_terminal else console.print
        show("checking the config, this machine and the engine arguments")
        return sdk.deploy(source, on_status=lambda status: show(_progress(status)), **options)


def _progress(status: Any) -> str:
    parts = []
    for name, states in sorted(status.replicas.items()):
        ready, total = states.get("RUNNING", 0), sum(states.values())
        parts.append(f"{name} {ready}/{total}")
    return f"{status.state.lower()}: {', '.join(parts) or 'building the application'}"


def _replace_model(document: dict[str, Any], source: str) -> None:
    path = Path(source)
    try:
        is_here = path.exists()
    except OSError:  # the check of the machine says what is wrong with it
        is_here = False
    model = {"id": path.absolute().name, "source": str(path.resolve()) if is_here else source}
    try:
        document["applications"][0]["args"]["model"] = model
    except (KeyError, IndexError, TypeError):
        raise ConfigError("the config has no applications.0.args.model to replace") from None


def _interrupt(stop: threading.Event, number: int) -> None:
    if stop.is_set():
        os._exit(128 + number)
    stop.set()
    raise SystemExit(128 + number)


def _finish(app: Any) -> None:
    from serve_app import ray_drain

    most_s = app.config.ingress.request_timeout_s
    console.print(f"\nFinishing what has begun, for at most {most_s:g} s; once more ends it at once", highlight=False)
    if left := ray_drain.said(app.drain()):
        console.print(left, highlight=False)


def _curl(url: str, config: Any) -> str:
    message = {"role": "user", "content": "Hello"}
    body = json.dumps({"model": config.model.id, "messages": [message], "max_tokens": 16})
    key = "" if config.ingress.api_keys_file is None else " -H 'Authorization: Bearer KEY'"
    return f"curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'"


if __name__ == "__main__":
    main()
