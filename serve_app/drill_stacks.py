"""What ``tandem drill`` can break: Tandem, or Ray Serve LLM's own P/D of the same engines on the same nodes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.cluster import LocalCluster, NodeSpec
from serve_app.metrics_page import scrape
from serve_app.peer import peer_document
from serve_app.preflight import check_machine
from serve_app.sdk import App, Status, deploy
from serve_app.validate import parse_app_config

_START_TIMEOUT_S = 600.0

OnStatus = Callable[[Status], None]
Start = Callable[[dict[str, Any], Sequence[NodeSpec], OnStatus], App]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One stack.

    Attributes:
        start: an application on a cluster of its own, from a Serve YAML of ours.
        counters: how often its endpoint went on with another replica, and what became of links, so far; nothing where
            nobody counts.
        lacks: faults of parts that it does not have.
    """

    start: Start
    counters: Callable[[App], dict[str, int]]
    lacks: tuple[str, ...] = ()


def _start_tandem(document: dict[str, Any], nodes: Sequence[NodeSpec], on_status: OnStatus) -> App:
    return deploy(document, nodes=nodes, on_status=on_status)


def _start_peer(document: dict[str, Any], nodes: Sequence[NodeSpec], on_status: OnStatus) -> App:
    config = parse_app_config(document["applications"][0]["args"])
    http = document["http_options"]
    check_machine(config, host=http["host"], port=http["port"])
    cluster = LocalCluster(nodes)
    app = App(
        peer_document(document),
        config,
        cluster,
        cluster.address,
        http["host"],
        http["port"],
        health_path="/v1/models",
    )
    app.start(_START_TIMEOUT_S, on_status)
    return app


def _tandem_counters(app: App) -> dict[str, int]:
    totals = dict.fromkeys(("retried", "resumed", "link_failures", "link_repairs"), 0)
    for sample in scrape(app.metrics_url, *(f"tandem_{name}_total" for name in totals)):
        totals[sample.name.removeprefix("tandem_").removesuffix("_total")] += int(sample.value)
    return totals


STACKS = {
    "tandem": Stack(start=_start_tandem, counters=_tandem_counters),
    "ray-serve-llm": Stack(start=_start_peer, counters=lambda _: {}, lacks=("kill-coordinator",)),
}


def faults_of(stack: str, faults: Sequence[str]) -> list[str]:
    """Those of these faults that a stack can have."""
    return [fault for fault in faults if fault not in STACKS[stack].lacks]
