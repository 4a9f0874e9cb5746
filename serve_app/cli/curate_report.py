"""Results of a pressure test and of a search of policies: tables, JSON, and a configuration to serve.

A pressure test tries splits of GPUs between prefill and decode, and aggregated engines, which do both. The oracle plans
with the whole trace (``autoscale.sim``). A candidate is a policy with parameters, and the result of its run.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from rich.table import Table

from autoscale.decide.tuning import merged
from autoscale.policies.heteroscale import Signal
from autoscale.sim.compare import OracleResult
from autoscale.sim.config import SimConfig
from autoscale.sim.curate import Candidate
from autoscale.sim.pressure import PressureResult
from kvtransfer.topology import Role
from serve_app.checks.ray_schema import JOINT_POLICY
from serve_app.checks.yaml_checks import ConfigError, parse_app_config, sole_application
from serve_app.cli.terminal import figure, figures_table


def pressure_table(result: PressureResult) -> Table:
    """A table with one line per split."""
    heads = ("requests/s", "per GPU", "decode tokens/s\nper replica", "prefill\nbusy", "TTFT\np50 s", "TPOT\np50 ms")
    title = f"{result.gpus} GPUs: the most requests per second that keep the objectives"
    table = figures_table("split", heads, title)
    for point in (*result.points, result.aggregated):
        signals = point.signals
        table.add_row(
            point.name,
            f"{point.requests_per_s:.1f}",
            f"{point.requests_per_s / result.gpus:.2f}",
            figure(signals[Signal.DECODE_TPS], ".0f"),
            figure(signals[Signal.PREFILL_GPU_UTILIZATION], ".0%"),
            figure(signals[Signal.TTFT], ".2f"),
            figure(signals[Signal.TPOT], ".1f", 1e3),
            style="bold" if point is result.best else None,
        )
    return table


def pressure_verdict(result: PressureResult) -> str:
    """The advice of a pressure test, in one sentence."""
    best, aggregated = result.best, result.aggregated
    if not result.is_disaggregation_worthwhile:
        return (
            f"Do not disaggregate: {aggregated.name} engines serve {aggregated.requests_per_s:.1f} requests/s, the "
            f"best split, {best.name}, {best.requests_per_s:.1f}."
        )
    factor = ""
    if aggregated.requests_per_s:
        factor = f", {best.requests_per_s / aggregated.requests_per_s:.2f} x aggregated"
    expected = best.signals[Signal.DECODE_TPS]
    return (
        f"pd_ratio {result.pd_ratio}: {best.requests_per_s:.1f} requests/s{factor}; expect decode_tps of "
        f"{expected:.0f} per decode replica there, and set a target below it."
    )


def pressure_document(result: PressureResult) -> dict[str, Any]:
    """A pressure test as plain values."""
    return {
        "gpus": result.gpus,
        "pd_ratio": str(result.pd_ratio),
        "is_worth_disaggregating": result.is_disaggregation_worthwhile,
        "best": asdict(result.best),
        "aggregated": asdict(result.aggregated),
        "splits": [asdict(point) for point in result.points],
    }


def candidates_table(oracle: OracleResult, candidates: Mapping[str, Sequence[Candidate]]) -> Table:
    """A table with the best candidate of each kind of policy, the best kind first.

    ``candidates``: tried parameters of each kind, the best first.
    """
    least_frac, oracle_gpu_hours = oracle.least_frac, oracle.result.outcome.gpu_hours
    title = f"best of each policy; {least_frac:.2%} must be within the objectives, then the fewest GPU-hours"
    table = figures_table("policy", ("SLO met", "GPU\nhours", "/oracle", "tried"), title)
    table.add_column("parameters", overflow="fold")
    for best, *others in sorted(candidates.values(), key=lambda each: each[0].score(least_frac), reverse=True):
        outcome = best.result.outcome
        table.add_row(
            best.kind,
            f"{outcome.slo_attainment_frac:.2%}",
            f"{outcome.gpu_hours:.2f}",
            f"{outcome.gpu_hours / oracle_gpu_hours:.2f}",
            str(1 + len(others)),
            ", ".join(flat(best.changes)),
        )
    return table


def flat(changes: Mapping[str, Any]) -> list[str]:
    """Changed parameters as ``name value``; the names of sections that need no explanation are left out."""
    lines = []
    for name, value in changes.items():
        if isinstance(value, Mapping):
            prefix = "" if name in ("policy", "guard", "gate") else f"{name}."
            lines += [f"{prefix}{line}" for line in flat(value)]
        elif name != "kind":
            lines.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
    return lines


def candidates_document(
    pressure: PressureResult, oracle: OracleResult, candidates: Mapping[str, Sequence[Candidate]]
) -> dict[str, Any]:
    """All candidates as plain values."""
    return {
        "pressure_test": pressure_document(pressure),
        "rate_scale": oracle.rate_scale,
        "oracle": asdict(oracle.result.outcome),
        "policies": {
            kind: [{"changes": one.changes, **asdict(one.result.outcome)} for one in each]
            for kind, each in candidates.items()
        },
    }


def serve_notes(serve: Mapping[str, Any], path: Path, settings: SimConfig) -> list[str]:
    """A note if a Serve YAML has other engines than were simulated, since found parameters may not fit them.

    Raises:
        ConfigError: the YAML does not have exactly one application, or the application is not autoscaled.
    """
    app = parse_app_config(sole_application(serve).get("args"))
    if not app.is_autoscaled:
        raise ConfigError(
            f"{path}: its application is not autoscaled: add autoscale to args, and max_replicas to every role"
        )
    # Engines are compared by their GPUs, and emulated ones also by their profile.
    simulated = {(key.role, pool.gpus_per_replica) for key, pool in settings.pools().items()}
    pools = [pool for service in app.pools().values() for pool in service.root.items()]
    served = {(key.role, limits.gpus_per_replica) for key, limits in pools}
    role_configs = [(key.role, pool) for group in app.groups for key, pool in group.pools().items()]
    emulated = {(role, pool.emulator.profile.stem) for role, pool in role_configs if pool.emulator is not None}
    profiles = {(key.role, profile.name) for key, profile in settings.profiles().items()}
    if served <= simulated and emulated <= profiles:
        return []
    return [f"{path.name} serves other engines than were simulated; parameters such as targets may not fit them"]


def curated_yaml(
    config: SimConfig, best: Candidate, config_path: Path, serve: dict[str, Any] | None, trace: Path
) -> str:
    """A configuration with the best policy: of an application to serve, or of the simulator.

    Args:
        config: the simulated configuration.
        best: the policy.
        config_path: the configuration's file.
        serve: the Serve YAML to put the policy into; ``None``: make a configuration of the simulator.
        trace: the trace of the search.
    """
    outcome = best.result.outcome
    comment = (
        f"# Found by `tandem curate` on {trace.name} ({config_path.name}): {best.kind}, "
        f"{outcome.slo_attainment_frac:.2%} within the objectives, {outcome.gpu_hours:.2f} GPU-hours.\n"
    )
    if serve is None:
        document = yaml.safe_load(config_path.read_text())
        # Whole paths: a relative one counts from the configuration's folder, and the new file may be in another.
        for group in document["groups"]:
            for role in Role:
                profile = config_path.parent / group[role]["profile"]
                group[role]["profile"] = str(profile.resolve())
        changes = json.loads(json.dumps(best.changes))  # plain values: YAML cannot write the others
        document["policies"] = {**document.get("policies", {}), best.kind: changes}
        return comment + yaml.safe_dump(document, sort_keys=False)
    # Only fields that the simulator's configuration sets: the Serve YAML keeps its own values of the others.
    with_best = config.model_copy(update={"policies": {best.kind: best.changes}})
    tuned = with_best.autoscale_config(best.kind).model_dump(mode="json", exclude_unset=True)
    application = sole_application(serve)
    autoscale = merged(application["args"].get("autoscale", {}), tuned)
    # The policy is replaced and not merged: the old one may have fields that the new kind does not know.
    application["args"]["autoscale"] = {**autoscale, "policy": tuned["policy"]}
    application.setdefault("autoscaling_policy", JOINT_POLICY)
    return comment + yaml.safe_dump(serve, sort_keys=False)
