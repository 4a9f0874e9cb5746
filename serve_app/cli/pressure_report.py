"""What `tandem pressure-test --live` found: a table, the settings to change, and all steps as JSON."""

import shlex
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import yaml
from rich.table import Table

from autoscale.policies.heteroscale import Signal
from autoscale.pressure.live_test import with_target
from autoscale.pressure.rate_search import PressurePoint
from autoscale.ratio import PdRatio
from kvtransfer.topology import Role
from serve_app.cli.pressure_live import LiveResult
from serve_app.cli.pressure_plan import LiveOptions
from serve_app.cli.terminal import figure, figures_table


def live_table(result: LiveResult) -> Table:
    """A table with one line for each pair of counts, the best one bold."""
    heads = ("requests/s", "per GPU", "SLO met", "decode tokens/s\nper replica", "prefill tokens/s\nper replica")
    slo = result.plan.config.slo
    latencies = (f"TTFT\np{100 * slo.quantile_frac:g} s", f"TPOT\np{100 * slo.quantile_frac:g} ms")
    table = figures_table("counts", (*heads, *latencies), "the most requests per second that keep the objectives")
    for point in result.test.points:
        more = "+" if point.name in result.test.capped else ""
        signals = point.signals
        table.add_row(
            point.name,
            f"{point.requests_per_s:.3g}{more}",
            f"{result.test.per_gpu(point):.3g}{more}",
            f"{point.attainment_frac:.1%}",
            figure(signals.get(Signal.DECODE_TPS), ".0f"),
            figure(signals.get(Signal.PREFILL_TPS), ".0f"),
            figure(signals.get(Signal.TTFT), ".2f"),
            figure(signals.get(Signal.TPOT), ".1f", 1e3),
            style="bold" if point is result.test.best else None,
        )
    return table


def patch(result: LiveResult, headroom_frac: float) -> dict[str, Any]:
    """The fields of ``args.autoscale`` to change for the best counts; empty: no rate was good.

    ``headroom_frac``: share of the signal at the highest good rate that becomes the target.
    """
    best = result.test.best
    if best is None:
        return {}
    changes: dict[str, Any] = {"pd_ratio": str(_ratio(best))}
    if target := with_target(result.plan.config.policy.model_dump(mode="json"), best, headroom_frac):
        changes["policy"] = target
    return changes


def live_notes(result: LiveResult, changes: Mapping[str, Any]) -> list[str]:
    """What a reader of the figures must know, one sentence each."""
    test = result.test
    notes = [
        f"{name} kept the objectives at the highest rate that was allowed: give a larger --most-rate"
        for name in test.capped
    ]
    if test.is_out_of_time:
        notes.append("the time was over before the search had ended: give more --most-minutes for the rest")
    if changes and "policy" not in changes:
        policy = result.plan.config.policy
        notes.append(f"the policy {policy.kind} has no target for a signal: only the ratio changes")
    return notes


def _ratio(point: PressurePoint) -> PdRatio:
    if not point.prefill:
        return PdRatio(0, 1)
    return PdRatio.of({Role.PREFILL: point.prefill, Role.DECODE: point.decode})


def tune_command(changes: Mapping[str, Any], app: str, service: str | None) -> str:
    """The command that makes changes of ``args.autoscale`` in a running application."""
    words = ["tandem", "tune", *_pairs(changes)]
    words += [] if app == "tandem" else ["--app", app]
    words += [] if service is None else ["--service", service]
    return shlex.join(words)


def _pairs(changes: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Changes as FIELD=VALUE, with values as YAML in one line."""
    pairs = []
    for name, value in changes.items():
        if isinstance(value, Mapping) and value:
            pairs += _pairs(value, f"{prefix}{name}.")
        else:
            text = value if isinstance(value, str) else _yaml_text(value)
            pairs.append(f"{prefix}{name}={text}")
    return pairs


def _yaml_text(value: Any) -> str:
    """A value as YAML in one line; ``safe_dump`` ends a number with a line of dots."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000)
    return text.removesuffix("...\n").strip()


def patch_yaml(changes: Mapping[str, Any], result: LiveResult, options: LiveOptions, date: str) -> str:
    """Changes as YAML, with the command that makes them and where they come from."""
    best = result.test.best
    assert best is not None  # there are changes
    return (
        f"# Found by `tandem pressure-test --live` on {options.app} ({result.plan.service}) at {date}: {best.name} "
        f"served {best.requests_per_s:.3g} requests/s.\n"
        f"# Put it under args.autoscale, or change the running application:\n"
        f"#   {tune_command(changes, options.app, options.service)}\n"
        f"{yaml.safe_dump(dict(changes), sort_keys=False)}"
    )


def live_document(
    result: LiveResult, changes: Mapping[str, Any], options: LiveOptions, trace: Mapping[str, Any], date: str
) -> dict[str, Any]:
    """Everything that was measured, as plain values. ``trace``: the file's name and hash; ``date``: ISO, UTC."""
    best = result.test.best
    return {
        "date": date,
        "tandem_version": version("tandem-serve"),
        "application": options.app,
        "service": result.plan.service,
        "url": result.plan.url,
        "stopped": None if result.stopped is None else str(result.stopped) or type(result.stopped).__name__,
        "is_out_of_time": result.test.is_out_of_time,
        "limits": asdict(options.limits),
        "step_s": options.step_s,
        "tolerance_frac": options.tolerance_frac,
        "is_beside_traffic": options.is_beside_traffic,
        "trace": {**trace, "requests": len(result.plan.trace), "length_factor": options.length_factor},
        "slo": result.plan.config.slo.model_dump(mode="json"),
        "config": result.plan.config.model_dump(mode="json"),
        "steps": [{**asdict(step), "attainment_frac": step.attainment_frac} for step in result.test.results],
        "points": [{**asdict(point), "is_capped": point.name in result.test.capped} for point in result.test.points],
        "best": None if best is None else asdict(best),
        "changes": dict(changes),
        "command": tune_command(changes, options.app, options.service) if changes else None,
    }
