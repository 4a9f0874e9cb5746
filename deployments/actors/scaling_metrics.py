"""The autoscaler's state as Prometheus gauges (pure).

A plan puts a running replica into one of these states: it is admitted and serves, it is held until the other role has
caught up, it is withdrawn (out of service but may return), or it is a victim, which must stop.
"""

from collections.abc import Iterator

from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from autoscale.decide.status import PlanRecord, ServiceStatus, Status
from autoscale.headcount import standard_of
from autoscale.load_forecast import LoadForecast
from autoscale.types import Plan, PoolKey
from kvtransfer.topology import Role

# Description and labels of each gauge.
_GAUGES: dict[str, tuple[str, list[str]]] = {
    "tandem_replicas": (
        "Replicas by state: wanted by the controller; target of Serve; ready; and ready ones that are serving, held "
        "until the other role has caught up, withdrawn under observation, or draining",
        ["group", "role", "state"],
    ),
    "tandem_replicas_missing_seconds": (
        "Time for which a pool has had fewer ready replicas than Serve's target, since a replica last became ready",
        ["group", "role"],
    ),
    "tandem_replicas_no_room_retry_seconds": (
        "Time until a pool without room tries to start replicas again; 0 for other pools",
        ["group", "role"],
    ),
    "tandem_replicas_pending": ("Replicas of the first group whose work no group has room for", ["model", "role"]),
    "tandem_pd_ratio": ("Prefill per decode, in replicas of the first group: configured, and serving", ["model", "of"]),
    "tandem_autoscale_latency_seconds": (
        "Quantile of TTFT and of TPOT that the autoscaler acts on, and the objective; the TTFT of a long prompt is "
        "scaled by the prompt's own objective",
        ["model", "latency", "of"],
    ),
    "tandem_autoscale_requests_per_second": (
        "Requests per second: offered (those that were served, wait, or were refused for lack of capacity), served "
        "(those that got a first token), and refused for lack of capacity",
        ["model", "of"],
    ),
    "tandem_autoscale_waiting_requests": ("Requests that wait at the endpoint, over all its replicas", ["model"]),
    "tandem_autoscale_signal": (
        "Signal of the last decision, in the signal's own unit, and its target",
        ["model", "signal", "of"],
    ),
    "tandem_forecast": (
        "Forecast of a series (requests per second, tokens of a prompt or of an answer) one start ahead, in the unit "
        "of the series: value to plan with, bounds of the 80 % interval, and last observed value",
        ["model", "series", "of"],
    ),
    "tandem_forecast_horizon_seconds": ("Time from the last observed step to the end of the forecast step", ["model"]),
    "tandem_forecast_mape_ratio": (
        "Mean absolute error of the last forecasts as a share of the observed value, and that of the last value",
        ["model", "series", "of"],
    ),
    "tandem_forecast_near_ratio": (
        "Share of the last forecasts within 10 requests in flight or 50 tokens, and that of the last value",
        ["model", "series", "of"],
    ),
    "tandem_forecast_coverage_ratio": (
        "Share of the observed values inside the 80 % interval of their forecast",
        ["model", "series"],
    ),
    "tandem_forecast_fallback": ("1 if only the last value is used", ["model", "series"]),
    "tandem_autoscale_mode": ("1 if the mode is on", ["model", "mode"]),
    "tandem_autoscale_decision_age_seconds": ("Time since the last tick of the controller", ["model"]),
    "tandem_autoscale_hooked": ("1 if Serve obeys the plan's choice of replicas that stop and of nodes", []),
}


def pool_counts(last: PlanRecord) -> dict[PoolKey, dict[str, int]]:
    """Number of replicas in each state, by pool, after a decision."""
    plan = last.plan
    admitted, withdrawn, victims = set(plan.admitted), set(plan.withdrawn), set(plan.victims)
    counts: dict[PoolKey, dict[str, int]] = {}
    for key in sorted(last.running, key=str):
        ready = set(last.running[key])
        counts[key] = {
            "wanted": plan.state.desired.get(key, 0),
            "target": plan.counts.get(key, 0),
            "ready": len(ready),
            "serving": len(ready & admitted),
            "held": len(ready - admitted - withdrawn - victims),
            "withdrawn": len(ready & withdrawn),
            "draining": len((ready & victims).union(last.draining.get(key, ()))),
        }
    return counts


def serving_replicas(service: ServiceStatus) -> dict[Role, float]:
    """Standard replicas of each role that get requests (``autoscale.headcount``); the service has a plan."""
    assert service.last is not None
    serving = {key: counts["serving"] for key, counts in pool_counts(service.last).items()}
    return standard_of(serving, service.pools.root)


def missing_s(plan: Plan, pool: PoolKey, now_s: float) -> float | None:
    """Time for which a pool has had fewer ready replicas than Serve's target, seconds; ``None``: it has enough."""
    if (missing := plan.state.missing_since_s.get(pool)) is None:
        return None
    since_s, _ = missing  # and the number of running replicas at that time
    return max(0.0, now_s - since_s)


def scaling_metrics(status: Status, now_s: float) -> list[Metric]:
    """Gauges of every service with a plan; ``now_s``: wall-clock time."""
    gauges = {name: GaugeMetricFamily(name, text, labels=labels) for name, (text, labels) in _GAUGES.items()}
    planned = {name: service for name, service in status.services.items() if service.last is not None}
    for model, service in planned.items():
        for name, labels, value in _samples(model, service, now_s):
            gauges[name].add_metric(labels, value)
    gauges["tandem_autoscale_hooked"].add_metric([], float(status.is_hooked))
    return list(gauges.values()) if planned else []


def _samples(model: str, service: ServiceStatus, now_s: float) -> Iterator[tuple[str, list[str], float]]:
    """Name, labels and value of each gauge of one service, which has a plan."""
    assert service.last is not None
    plan, config = service.last.plan, service.config
    pools = pool_counts(service.last)
    for key, counts in pools.items():
        for state, count in counts.items():
            yield "tandem_replicas", [key.group, key.role, state], count
        yield "tandem_replicas_missing_seconds", [key.group, key.role], missing_s(plan, key, now_s) or 0.0
        until_s, _ = plan.state.capped.get(key, (now_s, 0))  # for a pool with room the time left is 0
        yield "tandem_replicas_no_room_retry_seconds", [key.group, key.role], max(0.0, until_s - now_s)
    for role in Role:
        yield "tandem_replicas_pending", [model, role], plan.pending.get(role, 0)
    serving = serving_replicas(service)
    yield "tandem_pd_ratio", [model, "configured"], plan.ratio(config.ratio).per_decode()
    if serving[Role.DECODE]:
        yield "tandem_pd_ratio", [model, "serving"], serving[Role.PREFILL] / serving[Role.DECODE]
    latency, slo = service.last.latency, config.slo
    for name, observed_s, objective_s in (("ttft", latency.ttft_s, slo.ttft_s), ("tpot", latency.tpot_s, slo.tpot_s)):
        yield "tandem_autoscale_latency_seconds", [model, name, "objective"], objective_s
        if observed_s is not None:
            yield "tandem_autoscale_latency_seconds", [model, name, "seen"], observed_s
    traffic = service.last.traffic
    rates = {"offered": traffic.requests_per_s, "served": traffic.served_per_s, "refused": traffic.refused_per_s}
    for name, per_s in rates.items():
        if per_s is not None:
            yield "tandem_autoscale_requests_per_second", [model, name], per_s
    yield "tandem_autoscale_waiting_requests", [model], traffic.waiting_requests
    if (forecast := service.last.forecast) is not None:
        yield from _forecast_samples(model, forecast)
    for shown in plan.decision.shown:
        yield "tandem_autoscale_signal", [model, shown.name, "seen"], shown.value
        yield "tandem_autoscale_signal", [model, shown.name, "target"], shown.target
    modes = {"paused": config.is_paused, "observing": config.is_observing, "override": config.override is not None}
    for name, is_on in modes.items():
        yield "tandem_autoscale_mode", [model, name], float(is_on)
    yield "tandem_autoscale_decision_age_seconds", [model], max(0.0, now_s - (plan.state.ticked_s or now_s))


def _forecast_samples(model: str, forecast: LoadForecast) -> Iterator[tuple[str, list[str], float]]:
    """Name, labels and value of each gauge of a forecast; a number that is not known has no sample."""
    yield "tandem_forecast_horizon_seconds", [model], forecast.horizon_s
    for name, series in forecast.series.items():
        numbers = {"value": series.value, "low": series.low, "high": series.high, "last": series.last}
        samples: list[tuple[str, list[str], float | None]] = [
            ("tandem_forecast", [model, name, of], number) for of, number in numbers.items()
        ]
        samples.append(("tandem_forecast_fallback", [model, name], float(series.fallback is not None)))
        if (accuracy := series.accuracy) is not None:
            samples += [
                ("tandem_forecast_mape_ratio", [model, name, "forecast"], accuracy.mape_frac),
                ("tandem_forecast_mape_ratio", [model, name, "last_value"], accuracy.last_mape_frac),
                ("tandem_forecast_near_ratio", [model, name, "forecast"], accuracy.near_frac),
                ("tandem_forecast_near_ratio", [model, name, "last_value"], accuracy.last_near_frac),
                ("tandem_forecast_coverage_ratio", [model, name], accuracy.coverage_frac),
            ]
        yield from ((gauge, labels, number) for gauge, labels, number in samples if number is not None)
