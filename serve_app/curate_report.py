"""What a pressure test and a search of policies have found: tables, JSON, and a configuration to serve."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from rich.box import SIMPLE_HEAD
from rich.table import Table

from autoscale.policies.heteroscale import Signal
from autoscale.sim.compare import OracleResult
from autoscale.sim.config import SimConfig
from autoscale.sim.curate import Candidate
from autoscale.sim.pressure import PressurePoint, PressureResult
from autoscale.tuning import merged
from kvtransfer.topology import Role
from serve_app.validate import ConfigError, parse_app_config, sole_application


def _titled(title: str) -> Table:
    return Table(title=title, title_style="", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)


def pressure_table(result: PressureResult) -> Table:
    """One line per split."""
    table = _titled(f"{result.gpus} GPUs: the most requests per second that keep the objectives")
    table.add_column("split", no_wrap=True)
    for name in (
        "requests/s",
        "per GPU",
        "decode tokens/s\nper replica",
        "prefill\nbusy",
        "TTFT\np50 s",
        "TPOT\np50 ms",
    ):
        table.add_column(name, justify="right")
    for point in (*result.points, result.aggregated):
        is_best = point is result.best
        shown = point.signals
        table.add_row(
            point.name,
            f"{point.requests_per_s:.1f}",
            f"{point.requests_per_s / result.gpus:.2f}",
            _text(shown[Signal.DECODE_TPS], ".0f"),
            _text(shown[Signal.PREFILL_GPU_UTILIZATION], ".0%"),
            _text(shown[Signal.TTFT], ".2f"),
            _text(shown[Signal.TPOT], ".1f", 1e3),
            style="bold" if is_best else None,
        )
    return table


def pressure_verdict(result: PressureResult) -> str:
    """What to do."""
    best, other = result.best, result.aggregated
    if not result.is_worth_disaggregating:
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
    """All of it as plain values."""
    return {
        "gpus": result.gpus,
        "pd_ratio": str(result.pd_ratio),
        "is_worth_disaggregating": result.is_worth_disaggregating,
        "best": _point(result.best),
        "aggregated": _point(result.aggregated),
        "splits": [_point(point) for point in result.points],
    }


def _point(point: PressurePoint) -> dict[str, Any]:
    return {**asdict(point), "signals": {str(name): value for name, value in point.signals.items()}}


def _text(value: float | None, form: str, factor: float = 1.0) -> str:
    return "-" if value is None else f"{value * factor:{form}}"


def candidates_table(oracle: OracleResult, found: Mapping[str, Sequence[Candidate]]) -> Table:
    """The best of each policy, the best policy first."""
    least, hours = oracle.least_frac, oracle.result.outcome.gpu_hours
    table = _titled(f"best of each policy; {least:.2%} must be within the objectives, then the fewest GPU-hours")
    table.add_column("policy", no_wrap=True)
    for name in ("SLO met", "GPU\nhours", "/oracle", "tried"):
        table.add_column(name, justify="right")
    table.add_column("parameters", overflow="fold")
    for each in sorted((each for each in found.values()), key=lambda each: each[0].score(least), reverse=True):
        best = each[0]
        outcome = best.result.outcome
        table.add_row(
            best.kind,
            f"{outcome.slo_attainment_frac:.2%}",
            f"{outcome.gpu_hours:.2f}",
            f"{outcome.gpu_hours / hours:.2f}",
            str(len(each)),
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
    """Everything that was tried."""
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
    """What a reader must know who puts parameters into this Serve YAML that were found for those engines.

    Raises:
        ConfigError: its application is none, or none that is autoscaled.
    """
    application = sole_application(serve)
    app = parse_app_config(application.get("args"))
    if not app.is_autoscaled:
        raise ConfigError(
            f"{path}: its application is not autoscaled: add autoscale to args, and max_replicas to every role"
        )
    simulated = {(key.role, pool.gpus_per_replica) for key, pool in settings.pools().items()}
    served = {
        (key.role, limits.gpus_per_replica) for pools in app.pools().values() for key, limits in pools.root.items()
    }
    names = {(key.role, profile.name) for key, profile in settings.profiles().items()}
    emulated = {
        (key.role, pool.emulator.profile.stem)
        for group in app.groups
        for key, pool in group.pools().items()
        if pool.emulator is not None
    }
    if served <= simulated and emulated <= names:
        return []
    return [f"{path.name} serves other engines than were simulated; parameters such as targets may not fit them"]


def curated_yaml(
    config: SimConfig, best: Candidate, *, config_path: Path, serve: dict[str, Any] | None, trace: Path
) -> str:
    """The configuration with the best policy: of an application to serve, or to simulate again.

    Args:
        config: what was simulated.
        best: the policy.
        config_path: where that is.
        serve: the Serve YAML to put it into; ``None`` for a configuration of the simulator.
        trace: what it was found on.
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
                profile = config_path.parent / group[str(role)]["profile"]
                group[str(role)]["profile"] = str(profile.resolve())
        document["policies"] = {**document.get("policies", {}), best.kind: _plain(best.changes)}
        return head + yaml.safe_dump(document, sort_keys=False)
    named = config.model_copy(update={"policies": {best.kind: best.changes}})
    tuned = named.autoscale_config(best.kind).model_dump(mode="json", exclude_unset=True)
    application = sole_application(serve)
    application["args"]["autoscale"] = merged(application["args"].get("autoscale", {}), tuned)
    application["args"]["autoscale"]["policy"] = tuned["policy"]
    application.setdefault("autoscaling_policy", {"policy_function": "autoscale.ray_policy:JointPolicy"})
    return head + yaml.safe_dump(serve, sort_keys=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    return value
