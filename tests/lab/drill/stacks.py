"""The stacks that ``make drill`` can break: Tandem, and Ray Serve LLM's own P/D with the same engines and nodes."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router.length import PathReason
from serve_app.checks.yaml_checks import parse_app_config
from serve_app.load.metrics_page import scrape
from serve_app.local.cluster import LocalCluster, NodeSpec
from serve_app.local.preflight import check_machine
from serve_app.sdk import App, Status, deploy
from tests.lab.drill.faults import SETTINGS_FAULTS
from tests.lab.stand.reference_stack import peer_document

# An application must serve this long after its start, in seconds.
_START_TIMEOUT_S = 600.0
# Replicas must have freed everything within this time, in seconds: KV whose decode replica died is freed when its lease
# of 12 s ends.
_RELEASE_S = 30.0
_LATE = str(PathReason.KV_LATE)

OnStatus = Callable[[Status], None]
Start = Callable[[dict[str, Any], Sequence[NodeSpec], OnStatus], App]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One stack.

    Attributes:
        start: starts an application on a cluster of its own, from a Serve YAML of ours.
        counters: counters so far, by name and replica: requests that another replica took over, failed and repaired
            links. Empty if the stack counts nothing.
        held: requests and KV that replicas still hold a while after the last answer. Empty if the stack cannot tell.
        lacks: faults of parts that it does not have.
    """

    start: Start
    counters: Callable[[App], Mapping[tuple[str, str], int]]
    held: Callable[[App], dict[str, float]] = lambda app: {}
    lacks: tuple[str, ...] = ()


def _start_tandem(document: dict[str, Any], nodes: Sequence[NodeSpec], on_status: OnStatus) -> App:
    return deploy(document, nodes=nodes, on_status=on_status)


class _PeerApp(App):
    health_path = "/v1/models"


def _start_peer(document: dict[str, Any], nodes: Sequence[NodeSpec], on_status: OnStatus) -> App:
    config = parse_app_config(document["applications"][0]["args"])
    http = document["http_options"]
    check_machine(config, host=http["host"], port=http["port"])
    cluster = LocalCluster(nodes)
    app = _PeerApp(peer_document(document), config, cluster.address, cluster)
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
    from tests.lab.stand.ray_held import left_after

    return left_after(app.name, _RELEASE_S)


STACKS = {
    "tandem": Stack(start=_start_tandem, counters=_tandem_counters, held=_tandem_held),
    "ray-serve-llm": Stack(start=_start_peer, counters=lambda _: {}, lacks=("kill-coordinator", *SETTINGS_FAULTS)),
}


def faults_of(stack: str, faults: Sequence[str]) -> list[str]:
    """The faults that a stack can have."""
    return [fault for fault in faults if fault not in STACKS[stack].lacks]
