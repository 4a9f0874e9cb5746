"""What `tandem top` shows of an application's autoscaling (pure)."""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from autoscale.ratio import pd_text
from deployments.controller_hook import IMPORT_PATH
from deployments.scaling_metrics import missing_s, pool_counts, serving_counts
from kvtransfer.topology import Role


def scaling_view(app: str, status: Mapping[str, Any], now_s: float) -> Group:
    """Pools, signal, ratio and the last decision, from what the coordinator says."""
    config = status["config"]
    plan = status.get("plan")
    ratio = (plan and plan["decision"]["ratio"]) or config["pd_ratio"]
    head = Text(f"{app}: ratio {ratio}, policy {config['policy']['kind']}")
    if config["is_paused"]:
        head.append("  PAUSED", style="bold yellow")
    if config["is_observing"]:
        head.append("  ONLY OBSERVING", style="bold yellow")
    if config["override"] is not None:
        override = config["override"]
        head.append(f"  SET BY HAND to {override['prefill']}P{override['decode']}D", style="bold yellow")
    if plan is None:
        why = "should it stay so, look for 'autoscaling holds' in the log of Serve's controller"
        return Group(head, Text(f"no decision yet: {why}"))
    state, latency, traffic = plan["state"], status["latency"], status["traffic"]
    pools = pool_counts(status)
    pending = {role: plan["pending"].get(role, 0) for role in Role}
    head.append(f", serving {pd_text(serving_counts(pools))}")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("pool", "wanted", "target", "ready", "serving", "held", "withdrawn", "draining", "missing"):
        table.add_column(name, no_wrap=True)
    for pool, counts in pools.items():
        waits_s = missing_s(status, pool, now_s)
        table.add_row(pool, *map(str, counts.values()), "" if waits_s is None else f"{waits_s:.0f} s")
    lines = [
        *(f"{shown['name']} {shown['value']:.4g}, target {shown['target']:.4g}" for shown in plan["decision"]["shown"]),
        f"TTFT {_seconds(latency['ttft_s'])} of {config['slo']['ttft_s']:g} s, "
        f"TPOT {_seconds(latency['tpot_s'])} of {config['slo']['tpot_s']:g} s "
        f"({config['slo']['quantile_frac']:.0%} of requests)",
        f"{_number(traffic['requests_per_s'])} requests/s of {_number(traffic['input_tokens_mean'])} input and "
        f"{_number(traffic['output_tokens_mean'])} output tokens on average",
        f"last decision {max(0.0, now_s - state['ticked_s']):.0f} s ago: {plan['decision']['reason']}",
        *(f"held back: {note}" for note in plan["held_back"]),
        *([f"no place for {pd_text(pending)}"] if any(pending.values()) else []),
        *(f"{group} passed over: {why}" for group, why in plan["passed_over"].items()),
        *(
            f"no room for more than {found} of {pool} since "
            f"{now_s - until_s + config['no_room_retry_s'] + config['no_room_s']:.0f} s (see `ray status`); tried "
            f"again in {until_s - now_s:.0f} s"
            for pool, (until_s, found) in state["capped"].items()
        ),
    ]
    lines.append(f"decision log: {status['log_path']}")
    if not status["is_hooked"]:
        lines.append(
            "which replica stops is Serve's choice: start Ray with RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH="
            f"{IMPORT_PATH}; if it is, the log of Serve's controller says why it had no effect"
        )
    if status.get("tuned"):
        lines.append(f"tuned since it was deployed: {status['tuned']}")
    return Group(head, table, *(Text(line) for line in lines))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
