"""What `tandem top` shows of an application's autoscaling (pure).

The states of replicas are explained in ``deployments.actors.scaling_metrics``.
"""

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.floor import floor_text, lead_s
from autoscale.decide.status import PlanRecord, ServiceStatus, Status
from autoscale.load_forecast import LoadForecast, SeriesForecast
from autoscale.ratio import pd_text
from autoscale.types import ControllerState, PoolKey, Traffic
from deployments.actors.scaling_metrics import missing_s, pool_counts, serving_replicas
from deployments.serve_seam.controller_hook import IMPORT_PATH
from kvtransfer.topology import Role
from serve_app.cli.terminal import figure


def scaling_view(title: str, service: ServiceStatus, status: Status, now_s: float) -> Group:
    """Pools, signal, ratio and the last decision of one service of an application."""
    config, last = service.config, service.last
    ratio = config.ratio if last is None else last.plan.ratio(config.ratio)
    head = Text(f"{title}: ratio {ratio}{' (auto)' if config.followed_by else ''}, policy {config.policy.kind}")
    if config.is_paused:
        head.append("  PAUSED", style="bold yellow")
    if config.is_observing:
        head.append("  ONLY OBSERVING", style="bold yellow")
    if config.override is not None:
        head.append(f"  SET BY HAND to {config.override.prefill}P{config.override.decode}D", style="bold yellow")
    if last is None:
        why = "should it stay so, look for \"Tandem's autoscaling\" in the log of Serve's controller"
        return Group(head, Text(f"no decision yet: {why}"))
    head.append(f", serving {pd_text(serving_replicas(service))}{_unit(service)}")
    lines = [*_decision_lines(config, last, now_s), f"decision log: {status.log_path}"]
    if not status.is_hooked:
        lines.append(
            "which replica stops is Serve's choice: start Ray with RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH="
            f"{IMPORT_PATH}; if it is, the log of Serve's controller says why it had no effect"
        )
    if service.tuned:
        lines.append(f"tuned since it was deployed: {dict(service.tuned)}")
    return Group(head, _pool_table(last, now_s), *(Text(line) for line in lines))


def _unit(service: ServiceStatus) -> str:
    """What counts of a role are in, if the replicas of the groups are not worth the same."""
    limits = service.pools.root
    if all(pool.capacity == 1.0 and not pool.prompt_capacity for pool in limits.values()):
        return ""
    return f" in replicas of group {next(iter(limits)).group}"


def _pool_table(last: PlanRecord, now_s: float) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    # The pool, the states in the order of pool_counts, and for how long replicas have been missing.
    for name in ("pool", "wanted", "target", "ready", "serving", "held", "withdrawn", "draining", "missing"):
        table.add_column(name, no_wrap=True)
    for pool, counts in pool_counts(last).items():
        waits_s = missing_s(last.plan, pool, now_s)
        table.add_row(str(pool), *map(str, counts.values()), "" if waits_s is None else f"{waits_s:.0f} s")
    return table


def _decision_lines(config: AutoscaleConfig, last: PlanRecord, now_s: float) -> list[str]:
    """What the last plan was made from, and what it could not do."""
    plan, latency, traffic, slo = last.plan, last.latency, last.traffic, config.slo
    pending = {role: plan.pending.get(role, 0) for role in Role}
    ttft, tpot = figure(latency.ttft_s, ".3g"), figure(latency.tpot_s, ".3g")
    return [
        *(f"{shown.name} {shown.value:.4g}, target {shown.target:.4g}" for shown in plan.decision.shown),
        f"TTFT {ttft} of {slo.ttft_s:g} s, TPOT {tpot} of {slo.tpot_s:g} s ({slo.quantile_frac:.0%} of requests)",
        f"{figure(traffic.requests_per_s, '.4g')} requests/s of {figure(traffic.input_tokens_mean, '.4g')} input and "
        f"{figure(traffic.output_tokens_mean, '.4g')} output tokens on average",
        *_demand_lines(traffic),
        *([] if last.forecast is None else _forecast_lines(last.forecast, now_s)),
        f"last decision {max(0.0, now_s - (plan.state.ticked_s or now_s)):.0f} s ago: {plan.decision.reason}",
        *last.collector_faults,
        *(f"held back: {note.text}" for note in plan.held_back),
        *_floor_lines(config, plan.state, now_s),
        *([f"no place for {pd_text(pending)}"] if any(pending.values()) else []),
        *(f"{group} passed over: {why}" for group, why in plan.passed_over.items()),
        *(_no_room_line(config, pool, count, until_s - now_s) for pool, (until_s, count) in plan.state.capped.items()),
    ]


def _demand_lines(traffic: Traffic) -> list[str]:
    """The part of the demand that is not served at once, if there is one."""
    refused = ", ".join(f"{each.requests_per_s:.3g}/s {each.reason} ({each.priority})" for each in traffic.refused)
    if not refused and not traffic.waiting_requests:
        return []
    served = f"{figure(traffic.served_per_s, '.4g')}/s get a first token"
    return [f"{served}, {traffic.waiting_requests:.0f} wait at the endpoint, refused: {refused or 'none'}"]


def _forecast_lines(forecast: LoadForecast, now_s: float) -> list[str]:
    """The forecast of each series, its model or why it is only the last value, and how far the last ones were off."""
    ahead_s = forecast.issued_s + forecast.horizon_s - now_s
    return [
        f"forecast in {max(0.0, ahead_s):.0f} s:",
        *(f"  {name} {_series_text(series)}" for name, series in forecast.series.items()),
    ]


def _series_text(series: SeriesForecast) -> str:
    interval = "" if series.low is None or series.high is None else f" ({series.low:.4g} to {series.high:.4g})"
    how = series.model if series.fallback is None else f"last value: {series.fallback}"
    text = f"{series.value:.4g}{interval}, {how}"
    if (accuracy := series.accuracy) is None:
        return text
    errors = f"MAPE {figure(accuracy.mape_frac, '.1%')}, of the last value {figure(accuracy.last_mape_frac, '.1%')}"
    near = f"{accuracy.near_frac:.0%} near (last value {accuracy.last_near_frac:.0%})"
    covered = "" if accuracy.coverage_frac is None else f", {accuracy.coverage_frac:.0%} in the 80 % interval"
    return f"{text}; {errors}, {near}{covered}, of {accuracy.forecasts}"


def _floor_lines(config: AutoscaleConfig, state: ControllerState, now_s: float) -> list[str]:
    """The floors that are in force or for which replicas start, and the one that begins next."""
    prewarm_s = lead_s(config, state)
    floors, following = config.floors.at(now_s, prewarm_s), config.floors.following(now_s)
    lines = [floor_text(floor, now_s) for floor in floors]
    if following is not None and following not in floors:
        lines.append(f"next: {following.text(now_s)}, prewarm {prewarm_s:g} s before")
    return lines


def _no_room_line(config: AutoscaleConfig, pool: PoolKey, count: int, retry_in_s: float) -> str:
    """Why a pool gets no more replicas; ``count``: number of its replicas that have room.

    First a replica waits for ``no_room_s``. Then the pool gets no more for ``no_room_retry_s``. The time in the line
    counts from the beginning of the first wait.
    """
    since_s = config.no_room_s + config.no_room_retry_s - retry_in_s
    return (
        f"no room for more than {count} of {pool} since {since_s:.0f} s (see `ray status`); tried again in "
        f"{retry_in_s:.0f} s"
    )
