"""What ``tandem drill`` can break: Tandem, or Ray Serve LLM's own P/D of the same engines on the same nodes."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router.types import PathReason
from serve_app.cluster import LocalCluster, NodeSpec
from serve_app.metrics_page import scrape
from serve_app.peer import peer_document
from serve_app.preflight import check_machine
from serve_app.sdk import App, Status, deploy
from serve_app.validate import parse_app_config

_START_TIMEOUT_S = 600.0
# KV that decode could not ask prefill to free is freed with its lease, of 12 s in a drill.
_RELEASE_S = 30.0
_LATE = str(PathReason.KV_LATE)

OnStatus = Callable[[Status], None]
Start = Callable[[dict[str, Any], Sequence[NodeSpec], OnStatus], App]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One stack.

    Attributes:
        start: an application on a cluster of its own, from a Serve YAML of ours.
        counters: by name and replica how often its endpoint went on with another replica, and what became of links,
            so far; nothing where nobody counts.
        held: what its replicas still hold of requests and of KV a while after the last answer; nothing where nobody
            can say.
        lacks: faults of parts that it does not have.
    """

    start: Start
    counters: Callable[[App], Mapping[tuple[str, str], int]]
    held: Callable[[App], dict[str, float]] = lambda app: {}
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


def _tandem_counters(app: App) -> Counter[tuple[str, str]]:
    counted = ("retried", "resumed", "prefill_failures", "link_failures", "link_repairs", "prefill_path")
    names = (*counted[:-1], _LATE)
    totals = Counter({(name, ""): 0 for name in names})
    for sample in scrape(app.metrics_url, *(f"tandem_{name}_total" for name in counted)):
        name = sample.name.removeprefix("tandem_").removesuffix("_total")
        name = sample.labels["reason"] if name == "prefill_path" else name
        if name in names:
            totals[name, sample.labels["replica"]] += int(sample.value)
    return totals


def _tandem_held(app: App) -> dict[str, float]:
    from serve_app.ray_held import left_after

    return left_after(app.name, _RELEASE_S)


STACKS = {
    "tandem": Stack(start=_start_tandem, counters=_tandem_counters, held=_tandem_held),
    "ray-serve-llm": Stack(start=_start_peer, counters=lambda _: {}, lacks=("kill-coordinator",)),
}


def faults_of(stack: str, faults: Sequence[str]) -> list[str]:
    """Those of these faults that a stack can have."""
    return [fault for fault in faults if fault not in STACKS[stack].lacks]
