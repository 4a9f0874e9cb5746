"""``tandem drill``: break a part under load, and hold every token of every answer against an undisturbed run."""

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from deployments.ports import free_ports
from kvtransfer.connector import ConnectorConfig
from serve_app.cluster import NodeSpec
from serve_app.drill_faults import FAULTS, FRONT_FAULTS, NODE_LABEL, PART_LABEL, expire_lease, replica_pids
from serve_app.drill_load import Answer, run_load
from serve_app.quickstart import without_keys
from serve_app.sdk import App, deploy
from serve_app.validate import load_serve_yaml

_ENGINE_NODES = 3
_FAULT_AT_FRAC = 0.4
_BEYOND_LEASE_S = 3.0
_RECOVERY_S = 240.0
_POLL_S = 0.5

Say = Callable[[str], None]


def drill(
    config: Path,
    faults: Sequence[str],
    *,
    rate: float,
    seconds: float,
    say: Say,
    on_answer: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Run each fault on one local cluster, one after the other.

    Args:
        config: a Serve YAML with one application.
        faults: names from ``FAULTS``.
        rate: requests/s.
        seconds: of load, for the undisturbed run and for each fault; the fault comes after two fifths.
        say: told what happens.
        on_answer: called after each answer.

    Returns:
        One row per fault.
    """
    document = on_two_parts(load_serve_yaml(config))
    model = document["applications"][0]["args"]["model"]["id"]
    nodes = [
        NodeSpec(cpus=2, labels={PART_LABEL: "front"}),
        *(NodeSpec(cpus=2, labels={PART_LABEL: "engines", NODE_LABEL: str(number)}) for number in range(_ENGINE_NODES)),
    ]
    rows = []
    lease_s = ConnectorConfig.model_validate(document["applications"][0]["args"].get("kv_transfer") or {}).lease_s
    break_part: dict[str, Callable[..., str]] = {
        **FAULTS,
        "expire-lease": partial(expire_lease, seconds=lease_s + _BEYOND_LEASE_S),
    }
    with deploy(document, nodes=nodes, on_status=lambda status: say(f"starting: {status.state}")) as app:
        say("an undisturbed run to begin with, to warm up")
        asyncio.run(run_load(app.url, model, rate=rate, seconds=min(seconds, 10.0), seed=1, salt="warm-up"))
        for fault in faults:
            load: dict[str, Any] = {"rate": rate, "seconds": seconds, "seed": 0, "on_answer": on_answer}
            say(f"{fault}: undisturbed run")
            before = asyncio.run(run_load(app.url, model, salt=f"{fault}-before", **load))
            counted, replicas = _counters(app), replica_pids(app.processes())

            def inject(fault: str = fault) -> None:
                say(f"{fault}: {break_part[fault](app.processes())}")

            after = asyncio.run(
                run_load(app.url, model, salt=f"{fault}-after", at_s=_FAULT_AT_FRAC * seconds, fault=inject, **load)
            )
            row = compare(fault, before, after)
            for name, value in _counters(app).items():  # a replica of the ingress that has ended counts no more
                row[name] = row.get(name, 0) + max(0, value - counted.get(name, 0))
            row["recovered_s"] = _recovered(app)
            row["replicas_ended"] = len(replicas - replica_pids(app.processes()))
            rows.append(row)
    return rows


def compare(fault: str, before: Sequence[Answer], after: Sequence[Answer]) -> dict[str, Any]:
    """What a fault did to the answers.

    Args:
        fault: its name.
        before: of an undisturbed run of the same requests.
        after: of the run with the fault.
    """
    row: dict[str, Any] = {"fault": fault, "requests": len(after)}
    row |= dict.fromkeys(("lost", "duplicated", "truncated", "wrong_tokens", "cut_at_front", "retried", "resumed"), 0)
    errors: dict[str, int] = {}
    for expected, answer in zip(before, after, strict=True):
        row["retried"] += answer.retries
        if verdict := _verdict(fault, expected, answer):
            row[verdict] += 1
            why = answer.error or f"{len(answer.token_ids)} tokens of {len(expected.token_ids)}"
            errors[why] = errors.get(why, 0) + 1
    row["added_ttft_p99_s"] = _p99([one.ttft_s for one in after]) - _p99([one.ttft_s for one in before])
    row["added_gap_p99_s"] = _p99([one.gap_s for one in after]) - _p99([one.gap_s for one in before])
    row["failed_undisturbed"] = sum(not one.is_ended for one in before)
    row["errors"] = errors
    return row


def _verdict(fault: str, expected: Answer, answer: Answer) -> str | None:
    if answer.is_cut and fault in FRONT_FAULTS:
        return "cut_at_front"
    if not answer.is_ended:
        return "lost"
    got, wanted = answer.token_ids, expected.token_ids
    if got == wanted:
        return None
    if len(got) < len(wanted) and got == wanted[: len(got)]:
        return "truncated"
    return "duplicated" if len(got) > len(wanted) else "wrong_tokens"


def _p99(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return float(np.quantile(known, 0.99)) if known else float("nan")


def _counters(app: App) -> dict[str, int]:
    """How often the endpoint went on with another replica, so far."""
    import urllib.request

    with urllib.request.urlopen(f"{app.url}/metrics", timeout=30) as response:  # noqa: S310
        page = response.read().decode()
    totals = {"retried": 0, "resumed": 0}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            name = sample.name.removeprefix("tandem_").removesuffix("_total")
            if name in totals and sample.name.endswith("_total"):
                totals[name] += int(sample.value)
    return totals


def _recovered(app: App) -> float | None:
    """Seconds until every replica runs again; ``None`` when they do not."""
    started_s = time.monotonic()
    wanted = {name: sum(states.values()) for name, states in app.status().replicas.items()}
    while time.monotonic() - started_s < _RECOVERY_S:
        status = app.status()
        running = {name: states.get("RUNNING", 0) for name, states in status.replicas.items()}
        if status.state == "RUNNING" and all(running[name] >= count for name, count in wanted.items()):
            return time.monotonic() - started_s
        time.sleep(_POLL_S)
    return None


def on_two_parts(document: dict[str, Any]) -> dict[str, Any]:
    """The endpoint on one node of the cluster, and engines on the others, so that a node with engines can be lost."""
    document = without_keys(document)
    http = document["http_options"] = dict(document.get("http_options") or {})
    http |= {"host": "127.0.0.1", "port": free_ports(1)[0]}
    document["proxy_location"] = "HeadOnly"
    args = document["applications"][0]["args"]
    args["ingress"] = {**(args.get("ingress") or {}), "node_labels": {PART_LABEL: "front"}}
    for group in args["groups"]:
        for role in ("prefill", "decode"):
            pool = group[role] = dict(group.get(role) or {})
            pool["placement"] = {**(pool.get("placement") or {}), "node_labels": {PART_LABEL: "engines"}}
    return document
