"""``tandem operators settings``: what of an operator-level plan engines can have today, as a checked config."""

import itertools
import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import yaml
from typer import Argument, Option

from autoscale.operators.gpu import Gpu, gpu_named
from autoscale.operators.graph import OperatorGraph, OperatorPrecision, operator_graph
from autoscale.operators.pair_load import PairLoad
from autoscale.operators.pool_pair import Objectives
from autoscale.operators.role_settings import RoleEngines
from autoscale.operators.tables import load_operator_tables
from autoscale.operators.times import OperatorTimes
from autoscale.traces.trace import TraceRequest, poisson_arrivals, scale_rate
from deployments.config import ServiceConfig
from deployments.pool_config import GroupConfig
from kvtransfer.topology import Role
from serve_app.checks.numbers import above_0
from serve_app.checks.ray_schema import check_engines, single_app_config
from serve_app.checks.yaml_checks import ConfigError, config_errors, load_serve_yaml
from serve_app.cli.settings_view import as_document, show
from serve_app.cli.sim_inputs import check_outputs, json_text, load_part
from serve_app.cli.terminal import errors
from serve_app.local.shipped import shipped
from serve_app.operators.model import longest_tokens, model_config
from serve_app.operators.settings_check import SettingsCheck
from serve_app.operators.settings_config import RoleState, changed, json_patch, only_group, role_state
from serve_app.operators.settings_experts import with_experts
from serve_app.operators.settings_result import found_settings
from serve_app.output import write_file

# Requests of a load that is given as a rate and two lengths: enough for a share of 95 % within half a point.
_DRAWN_REQUESTS = 6_000
_SIZES = ("hidden_size", "num_hidden_layers")  # fields of a config.json that tell models apart
# Requests of a load that one simulation takes a minute for; a run has about ten simulations.
_MOST_REQUESTS = 200_000
_SEED = 0


@config_errors()
def settings(
    config: Annotated[Path, Argument(help="A Serve YAML with one Tandem application of one group.")],
    model: Annotated[str, Option(help="A config.json, a folder with one, or a shipped model such as llama-3.1-8b.")],
    gpu: Annotated[str, Option(help="The GPU type, such as H100.")],
    trace: Annotated[Path | None, Option(help="The load: a trace (CSV or .gz).")] = None,
    requests_per_s: Annotated[
        float | None, Option(help="The mean rate; with --trace, its rate is scaled to this.")
    ] = None,
    input_tokens: Annotated[int | None, Option(min=1, help="Without --trace: tokens of each prompt.")] = None,
    output_tokens: Annotated[int | None, Option(min=1, help="Without --trace: tokens of each answer.")] = None,
    duration: Annotated[
        float | None, Option(min=1.0, help="Length of the load, seconds; left out: the whole trace.")
    ] = None,
    ttft_s: Annotated[float, Option(min=1e-3, help="Objective of the time to first token.")] = 1.0,
    tpot_s: Annotated[float, Option(min=1e-4, help="Objective of the time per output token.")] = 0.05,
    attained_frac: Annotated[
        float, Option(min=0.5, max=0.999, help="Share of requests that must keep both objectives.")
    ] = 0.95,
    gpus: Annotated[int | None, Option(min=2, help="Most GPUs; left out: the fewest that keep the objectives.")] = None,
    dtype: Annotated[str, Option(help="Type of the weights: bf16 or fp8.")] = "bf16",
    expert_skew: Annotated[
        float | None, Option(min=1.0, help="Load of the busiest expert over the mean, with expert parallelism.")
    ] = None,
    tables: Annotated[Path | None, Option(help="Folder with measured tables; by default the shipped ones.")] = None,
    out: Annotated[Path | None, Option(help="Write the whole config with the settings to this YAML.")] = None,
    patch: Annotated[Path | None, Option(help="Write the changes alone to this file: a JSON Patch (RFC 6902).")] = None,
    json_out: Annotated[Path | None, Option("--json", help="Write all figures to this JSON file.")] = None,
) -> None:
    """Choose the settings of a config by the times of operators, and check them in the simulator."""
    inputs = {"CONFIG": config, **({} if trace is None else {"--trace": trace})}
    check_outputs({"--out": out, "--patch": patch, "--json": json_out}, inputs)
    document = load_serve_yaml(config)
    service, group = only_group(single_app_config(document).services)
    requests = _requests(trace, above_0("--requests-per-s", requests_per_s), input_tokens, output_tokens, duration)
    shape = model_config(model)
    _check_same_model(service, model, shape)
    requests, notes = _within_context(service, longest_tokens(shape), requests)
    kind = _gpu(gpu, group)
    graph = operator_graph(shape, OperatorPrecision(weights=dtype, kv=_kv_type(service, group)))
    times = OperatorTimes(kind, load_operator_tables(tables or shipped(f"operators/tables/{kind.name}")))
    objectives = Objectives(ttft_s=ttft_s, tpot_s=tpot_s, attained_frac=attained_frac)
    engines = RoleEngines(service.model.id, graph, times, PairLoad.of_requests(requests), tpot_s)
    check = SettingsCheck(engines.profile, requests, service.router, objectives)
    with errors.status("simulating settings"):
        states = _states(service, group, kind, graph, requests, expert_skew)
        result = found_settings(service, states, engines, check, gpus, expert_skew)
    notes = [f"times are those of {model} in {dtype}; the config serves {service.model.source}", *notes]
    if trace is None:
        notes.append("arrivals are drawn at random, so the simulated rate differs a little from --requests-per-s")
    show(result, notes)
    whole = changed(document, result.written)
    written = single_app_config(whole)
    if out is not None or patch is not None:
        check_engines(written)  # takes half a minute
    write_file(out, yaml.safe_dump(whole, sort_keys=False, allow_unicode=True, width=120), "--out")
    write_file(patch, json.dumps(json_patch(document, whole), indent=1) + "\n", "--patch")
    write_file(json_out, json_text(as_document(result, notes)), "--json")


def _requests(
    trace: Path | None,
    requests_per_s: float | None,
    input_tokens: int | None,
    output_tokens: int | None,
    duration: float | None,
) -> Sequence[TraceRequest]:
    """The load: a trace, perhaps at another rate, or random arrivals of one length."""
    rng = random.Random(_SEED)
    if trace is None:
        if requests_per_s is None or input_tokens is None or output_tokens is None:
            raise ConfigError("no load is given: add --trace, or --requests-per-s, --input-tokens and --output-tokens")
        one = TraceRequest(at_s=0.0, input_tokens=input_tokens, output_tokens=output_tokens)
        _check_number(requests_per_s * (duration or 0.0))
        drawn = poisson_arrivals(itertools.repeat(one), requests_per_s, rng)
        if duration is not None:
            return tuple(itertools.takewhile(lambda request: request.at_s < duration, drawn))
        return tuple(itertools.islice(drawn, _DRAWN_REQUESTS))
    if input_tokens is not None or output_tokens is not None:
        raise ConfigError("--trace gives the lengths: leave --input-tokens and --output-tokens out")
    part = load_part(trace, 0.0, duration)
    rate = PairLoad.of_requests(part).requests_per_s
    _check_number(len(part) * (requests_per_s or rate) / rate)
    return part if requests_per_s is None else scale_rate(part, requests_per_s / rate, rng)


def _within_context(
    service: ServiceConfig, models_own: int | None, requests: Sequence[TraceRequest]
) -> tuple[Sequence[TraceRequest], list[str]]:
    """The requests that engines accept, and a note about those that they refuse.

    ``models_own``: ``max_position_embeddings``, which vLLM takes where the config has no ``max_model_len``.
    """
    most = service.max_model_len or models_own or math.inf
    name = "max_model_len" if service.max_model_len else "the model's max_position_embeddings"
    accepted = [request for request in requests if request.input_tokens + request.output_tokens <= most]
    if len(accepted) == len(requests):
        return requests, []
    if not accepted:
        raise ConfigError(
            f"all requests are longer than {name} {most:g}: give shorter lengths, or engines that take longer ones"
        )
    longer = len(requests) - len(accepted)
    return accepted, [f"{longer} of {len(requests)} requests are longer than {name} {most:g}, and left out"]


def _check_same_model(service: ServiceConfig, model: str, shape: Mapping[str, Any]) -> None:
    """Refuse a model other than that of the config, where its files are here."""
    source = Path(service.model.source)
    if not (source / "config.json").is_file():
        return
    own = model_config(str(source))
    if other := next((name for name in _SIZES if own.get(name) != shape.get(name)), None):
        raise ConfigError(
            f"--model {model} has {other} {shape.get(other)}, and the config's model {source} has {own.get(other)}: "
            f"give --model {source}"
        )


def _check_number(requests: float) -> None:
    """Refuse a load that takes hours to simulate."""
    if requests > _MOST_REQUESTS:
        raise ConfigError(
            f"the load has {requests:,.0f} requests, and {_MOST_REQUESTS:,} are the most: give a shorter --duration, "
            "or a lower --requests-per-s"
        )


def _gpu(name: str, group: GroupConfig) -> Gpu:
    kind = gpu_named(name)
    for key, pool in group.pools().items():
        own = pool.placement.accelerator_type or ""
        if not own.upper().replace("_", "-").startswith(kind.name):
            raise ConfigError(f"--gpu is {kind.name}, and {key} has accelerator_type {own}: give the same type")
    return kind


def _kv_type(service: ServiceConfig, group: GroupConfig) -> str:
    """Type of the KV cache as the config has it; ``auto`` is that of the activations."""
    types = {str(service.engine_kwargs_of(pool).get("kv_cache_dtype", "auto")) for pool in group.pools().values()}
    if len(types) > 1:
        raise ConfigError(f"kv_cache_dtype differs between the roles ({', '.join(sorted(types))}): give both the same")
    return "fp8" if types.pop().startswith("fp8") else "bf16"


def _states(
    service: ServiceConfig,
    group: GroupConfig,
    kind: Gpu,
    graph: OperatorGraph,
    requests: Sequence[TraceRequest],
    skew: float | None,
) -> Mapping[Role, RoleState]:
    longest = max(2048, *(request.input_tokens + request.output_tokens for request in requests))
    return {
        key.role: with_experts(
            role_state(service, pool, kind, longest), key.role, service.engine_kwargs_of(pool), graph, skew
        )
        for key, pool in group.pools().items()
    }
