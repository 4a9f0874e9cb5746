"""The autoscaler's state as Prometheus gauges (pure)."""

from collections.abc import Mapping
from typing import Any

from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from autoscale.ratio import PdRatio
from autoscale.types import PoolKey
from kvtransfer.topology import Role


def pool_counts(status: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """For each pool its replicas by state, from what the coordinator says after a decision."""
    plan = status["plan"]
    admitted, withdrawn, victims = set(plan["admitted"]), set(plan["withdrawn"]), set(plan["victims"])
    return {
        name: {
            "wanted": plan["state"]["desired"].get(name, 0),
            "target": plan["counts"].get(name, 0),
            "ready": len(names),
            "serving": len(names & admitted),
            "held": len(names - admitted - withdrawn - victims),
            "withdrawn": len(names & withdrawn),
            "draining": len((names & victims).union(status.get("draining", {}).get(name, ()))),
        }
        for name, names in ((name, set(running)) for name, running in sorted(status["running"].items()))
    }


def serving_counts(pools: Mapping[str, Mapping[str, int]]) -> dict[Role, int]:
    """Replicas of each role that get requests, from ``pool_counts``."""
    serving = dict.fromkeys(Role, 0)
    for name, counts in pools.items():
        serving[PoolKey.parse(name).role] += counts["serving"]
    return serving


def missing_s(status: Mapping[str, Any], pool: str, now_s: float) -> float | None:
    """How long a pool has had fewer ready replicas than Serve's target; ``None`` where it has them."""
    since = status["plan"]["state"]["missing_since_s"].get(pool)
    return None if since is None else max(0.0, now_s - since[0])


def scaling_metrics(status: Mapping[str, Any], now_s: float) -> list[Metric]:
    """Gauges of what the coordinator says; empty before the first decision."""
    plan = status.get("plan")
    if plan is None:
        return []
    state, latency, config = plan["state"], status["latency"], status["config"]
    replicas = GaugeMetricFamily(
        "tandem_replicas",
        "Replicas: wanted by the controller, target of Serve, ready, and of the ready ones serving, held until the "
        "other role has caught up, withdrawn under observation, draining",
        labels=["group", "role", "state"],
    )
    missing = GaugeMetricFamily(
        "tandem_replicas_missing_seconds",
        "How long a pool has had fewer ready replicas than Serve's target, since one last became ready",
        labels=["group", "role"],
    )
    no_room = GaugeMetricFamily(
        "tandem_replicas_no_room_retry_seconds",
        "Of a pool for which the cluster had no room: until more replicas are tried again; 0 for the others",
        labels=["group", "role"],
    )
    pools = pool_counts(status)
    serving = serving_counts(pools)
    for name, counts in pools.items():
        key = PoolKey.parse(name)
        for what, count in counts.items():
            replicas.add_metric([key.group, key.role, what], count)
        missing.add_metric([key.group, key.role], missing_s(status, name, now_s) or 0.0)
        until_s, _ = state["capped"].get(name, (now_s, 0))
        no_room.add_metric([key.group, key.role], max(0.0, until_s - now_s))
    ratio = GaugeMetricFamily(
        "tandem_pd_ratio", "Prefill replicas per decode replica: configured, and of those that serve", labels=["of"]
    )
    ratio.add_metric(["configured"], PdRatio.parse(plan["decision"]["ratio"] or config["pd_ratio"]).per_decode())
    if serving[Role.DECODE]:
        ratio.add_metric(["serving"], serving[Role.PREFILL] / serving[Role.DECODE])
    quantile = GaugeMetricFamily(
        "tandem_autoscale_latency_seconds",
        "The quantile of TTFT (of long prompts by their own objective) and TPOT that the autoscaler acts on, and its "
        "objective",
        labels=["latency", "of"],
    )
    for name in ("ttft", "tpot"):
        quantile.add_metric([name, "objective"], config["slo"][f"{name}_s"])
        if latency[f"{name}_s"] is not None:
            quantile.add_metric([name, "seen"], latency[f"{name}_s"])
    signal = GaugeMetricFamily(
        "tandem_autoscale_signal",
        "What the last decision was made from, in its own unit, and what it should be",
        labels=["signal", "of"],
    )
    for shown in plan["decision"]["shown"]:
        signal.add_metric([shown["name"], "seen"], shown["value"])
        signal.add_metric([shown["name"], "target"], shown["target"])
    mode = GaugeMetricFamily("tandem_autoscale_mode", "1 where it holds", labels=["mode"])
    modes = {
        "paused": config["is_paused"],
        "observing": config["is_observing"],
        "override": config["override"] is not None,
        "hooked": status["is_hooked"],
    }
    for name, holds in modes.items():
        mode.add_metric([name], float(holds))
    age = GaugeMetricFamily("tandem_autoscale_decision_age_seconds", "Since the last tick of the controller")
    age.add_metric([], max(0.0, now_s - state["ticked_s"]))
    return [replicas, missing, no_room, ratio, quantile, signal, mode, age]
