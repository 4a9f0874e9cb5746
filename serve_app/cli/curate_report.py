"""Results of a pressure test and of a search of policies: tables, JSON, and a configuration to serve."""

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
        shown = point.signals
        table.add_row(
            point.name,
            f"{point.requests_per_s:.1f}",
            f"{point.requests_per_s / result.gpus:.2f}",
            figure(shown[Signal.DECODE_TPS], ".0f"),
            figure(shown[Signal.PREFILL_GPU_UTILIZATION], ".0%"),
            figure(shown[Signal.TTFT], ".2f"),
            figure(shown[Signal.TPOT], ".1f", 1e3),
            style="bold" if point is result.best else None,
        )
    return table


def pressure_verdict(result: PressureResult) -> str:
    """The advice of a pressure test, in one sentence."""
    best, other = result.best, result.aggregated
    if not result.is_disaggregation_worthwhile:
        return (
            f"Do not disaggregate: {other.name} engines serve {other.requests_per_s:.1f} requests/s, the best split, "
            f"{best.name}, {best.requests_per_s:.1f}."
        )
    more = "" if not other.requests_per_s else f", {best.requests_per_s / other.requests_per_s:.2f} x aggregated"
    expected = best.signals[Signal.DECODE_TPS]
    return (
        f"pd_ratio {result.pd_ratio}: {best.requests_per_s:.1f} requests/s{more}; expect decode_tps of "
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


def candidates_table(oracle: OracleResult, found: Mapping[str, Sequence[Candidate]]) -> Table:
    """A table with the best candidate of each policy, the best policy first."""
    least, hours = oracle.least_frac, oracle.result.outcome.gpu_hours
    title = f"best of each policy; {least:.2%} must be within the objectives, then the fewest GPU-hours"
    table = figures_table("policy", ("SLO met", "GPU\nhours", "/oracle", "tried"), title)
    table.add_column("parameters", overflow="fold")
    for best, *others in sorted(found.values(), key=lambda each: each[0].score(least), reverse=True):
        outcome = best.result.outcome
        table.add_row(
            best.kind,
            f"{outcome.slo_attainment_frac:.2%}",
            f"{outcome.gpu_hours:.2f}",
            f"{outcome.gpu_hours / hours:.2f}",
            str(1 + len(others)),
            ", ".join(_flat(best.changes)),
        )
    return table


def _flat(changes: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, value in changes.items():
        if isinstance(value, Mapping):
            lines += [f"{name}.{line}" if name not in ("policy", "guard", "gate") else line for line in _flat(value)]
        elif name != "kind":
            lines.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
    return lines


def candidates_document(
    pressure: PressureResult, oracle: OracleResult, found: Mapping[str, Sequence[Candidate]]
) -> dict[str, Any]:
    """All candidates as plain values."""
    return {
        "pressure_test": pressure_document(pressure),
        "rate_scale": oracle.rate_scale,
        "oracle": asdict(oracle.result.outcome),
        "policies": {
            kind: [{"changes": one.changes, **asdict(one.result.outcome)} for one in each]
            for kind, each in found.items()
        },
    }


def autoscaled(serve: Mapping[str, Any], path: Path, settings: SimConfig) -> list[str]:
    """Notes about the use of found parameters in this Serve YAML, such as that it serves other engines.

    Raises:
        ConfigError: it has not exactly one application, or that is not autoscaled.
    """
    app = parse_app_config(sole_application(serve).get("args"))
    if not app.is_autoscaled:
        raise ConfigError(
            f"{path}: its application is not autoscaled: add autoscale to args, and max_replicas to every role"
        )
    simulated = {(key.role, pool.gpus_per_replica) for key, pool in settings.pools().items()}
    pools = [pool for service in app.pools().values() for pool in service.root.items()]
    served = {(key.role, limits.gpus_per_replica) for key, limits in pools}
    roles = [(key.role, pool) for group in app.groups for key, pool in group.pools().items()]
    emulated = {(role, pool.emulator.profile.stem) for role, pool in roles if pool.emulator is not None}
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
    head = (
        f"# Found by `tandem curate` on {trace.name} ({config_path.name}): {best.kind}, "
        f"{outcome.slo_attainment_frac:.2%} within the objectives, {outcome.gpu_hours:.2f} GPU-hours.\n"
    )
    if serve is None:
        document = yaml.safe_load(config_path.read_text())
        for group in document["groups"]:
            for role in Role:
                profile = config_path.parent / group[role]["profile"]
                group[role]["profile"] = str(profile.resolve())
        document["policies"] = {**document.get("policies", {}), best.kind: json.loads(json.dumps(best.changes))}
        return head + yaml.safe_dump(document, sort_keys=False)
    named = config.model_copy(update={"policies": {best.kind: best.changes}})
    tuned = named.autoscale_config(best.kind).model_dump(mode="json", exclude_unset=True)
    application = sole_application(serve)
    autoscale = merged(application["args"].get("autoscale", {}), tuned)
    application["args"]["autoscale"] = {**autoscale, "policy": tuned["policy"]}
    application.setdefault("autoscaling_policy", JOINT_POLICY)
    return head + yaml.safe_dump(serve, sort_keys=False)
