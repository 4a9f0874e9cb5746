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
    services = {name: of for name, of in status["services"].items() if of.get("plan") is not None}
    if not services:
        return []
    gauges = _Gauges()
    for name, of in services.items():
        gauges.add(name, of, now_s)
    hooked = GaugeMetricFamily(
        "tandem_autoscale_hooked", "1 where the plan chooses which replica stops and where one starts"
    )
    hooked.add_metric([], float(status["is_hooked"]))
    return [*gauges.all(), hooked]


class _Gauges:
    """Of all services."""

    def __init__(self) -> None:
        self.replicas = GaugeMetricFamily(
            "tandem_replicas",
            "Replicas: wanted by the controller, target of Serve, ready, and of the ready ones serving, held until the "
            "other role has caught up, withdrawn under observation, draining",
            labels=["group", "role", "state"],
        )
        self.missing = GaugeMetricFamily(
            "tandem_replicas_missing_seconds",
            "How long a pool has had fewer ready replicas than Serve's target, since one last became ready",
            labels=["group", "role"],
        )
        self.no_room = GaugeMetricFamily(
            "tandem_replicas_no_room_retry_seconds",
            "Of a pool for which the cluster had no room: until more replicas are tried again; 0 for the others",
            labels=["group", "role"],
        )
        self.pending = GaugeMetricFamily(
            "tandem_replicas_pending", "Replicas that have no place in any group", labels=["model", "role"]
        )
        self.ratio = GaugeMetricFamily(
            "tandem_pd_ratio",
            "Prefill replicas per decode replica: configured, and of those that serve",
            labels=["model", "of"],
        )
        self.latency = GaugeMetricFamily(
            "tandem_autoscale_latency_seconds",
            "The quantile of TTFT (of long prompts by their own objective) and TPOT that the autoscaler acts on, and "
            "its objective",
            labels=["model", "latency", "of"],
        )
        self.signal = GaugeMetricFamily(
            "tandem_autoscale_signal",
            "What the last decision was made from, in its own unit, and what it should be",
            labels=["model", "signal", "of"],
        )
        self.mode = GaugeMetricFamily("tandem_autoscale_mode", "1 where it holds", labels=["model", "mode"])
        self.age = GaugeMetricFamily(
            "tandem_autoscale_decision_age_seconds", "Since the last tick of the controller", labels=["model"]
        )

    def all(self) -> list[Metric]:
        return list(vars(self).values())

    def add(self, model: str, status: Mapping[str, Any], now_s: float) -> None:
        """What is known of one service."""
        plan, latency, config = status["plan"], status["latency"], status["config"]
        state, pools = plan["state"], pool_counts(status)
        for name, counts in pools.items():
            key = PoolKey.parse(name)
            for what, count in counts.items():
                self.replicas.add_metric([key.group, key.role, what], count)
            self.missing.add_metric([key.group, key.role], missing_s(status, name, now_s) or 0.0)
            until_s, _ = state["capped"].get(name, (now_s, 0))
            self.no_room.add_metric([key.group, key.role], max(0.0, until_s - now_s))
        for role in Role:
            self.pending.add_metric([model, role], plan["pending"].get(role, 0))
        serving = serving_counts(pools)
        configured = PdRatio.parse(plan["decision"]["ratio"] or config["pd_ratio"])
        self.ratio.add_metric([model, "configured"], configured.per_decode())
        if serving[Role.DECODE]:
            self.ratio.add_metric([model, "serving"], serving[Role.PREFILL] / serving[Role.DECODE])
        for name in ("ttft", "tpot"):
            self.latency.add_metric([model, name, "objective"], config["slo"][f"{name}_s"])
            if latency[f"{name}_s"] is not None:
                self.latency.add_metric([model, name, "seen"], latency[f"{name}_s"])
        for shown in plan["decision"]["shown"]:
            self.signal.add_metric([model, shown["name"], "seen"], shown["value"])
            self.signal.add_metric([model, shown["name"], "target"], shown["target"])
        modes = {
            "paused": config["is_paused"],
            "observing": config["is_observing"],
            "override": config["override"] is not None,
        }
        for name, holds in modes.items():
            self.mode.add_metric([model, name], float(holds))
        self.age.add_metric([model], max(0.0, now_s - state["ticked_s"]))
