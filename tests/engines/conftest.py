"""One application on real engines for the whole session: prefill and decode on differently labelled Ray nodes."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from deployments.machine.claims import free_ports
from serve_app.local.cluster import NodeSpec
from serve_app.local.tiny_model import build_tiny_model

ROOT = Path(__file__).parents[2]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The shared application's tests come last: it stays, and a process is connected to one Ray cluster at a time."""

    def uses_shared_app(item: pytest.Item) -> bool:
        assert isinstance(item, pytest.Function)
        found = item._fixtureinfo.name2fixturedefs.get("app", ())
        return bool(found) and found[-1].scope == "session"

    items.sort(key=uses_shared_app)


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    folder = ROOT / "models" / "tiny"
    build_tiny_model(folder)
    return folder


@pytest.fixture(scope="session")
def make_document(tiny_model: Path) -> Any:
    def make(**labels: str) -> dict[str, Any]:
        document = yaml.safe_load((ROOT / "configs" / "cpu_tiny.yaml").read_text())
        document["http_options"]["port"] = free_ports(1)[0]
        args = document["applications"][0]["args"]
        args["model"]["source"] = str(tiny_model)
        args["engine_kwargs"] |= {
            "enable_auto_tool_choice": True,
            "tool_call_parser": "hermes",
            "reasoning_parser": "deepseek_v3",  # none, until a request says that its model thinks
        }
        for role, switch in labels.items():
            args["groups"][0][role]["placement"]["node_labels"] = {"tandem.io/s1": "a", "tandem.io/s0": switch}
        return document

    return make


@pytest.fixture(scope="session")
def app(make_document: Any) -> Iterator[Any]:
    """Two services: ``tiny`` on prefill and decode, ``offline`` on one replica for both. Both keep their counts."""
    from serve_app.sdk import deploy

    nodes = [
        NodeSpec(cpus=2),
        NodeSpec(cpus=2, labels={"tandem.io/s1": "a", "tandem.io/s0": "left"}),
        NodeSpec(cpus=3, labels={"tandem.io/s1": "a", "tandem.io/s0": "right"}),
    ]
    document = make_document(prefill="left", decode="right")
    application = document["applications"][0]
    application["autoscaling_policy"] = {"policy_function": "autoscale.ray_policy:JointPolicy"}
    args = application["args"]
    tiny = {key: args.pop(key) for key in ("model", "engine_kwargs", "groups")}
    for pool in (tiny["groups"][0]["prefill"], tiny["groups"][0]["decode"]):
        pool["max_replicas"] = 1
    offline = copy.deepcopy(tiny)
    tiny["autoscale"] = {"policy": {"kind": "static", "prefill": 1, "decode": 1}}
    offline["model"]["id"] = "offline"
    offline["groups"][0] |= {"name": "offline", "prefill": None}
    offline["autoscale"] = {"pd_ratio": "0:1", "policy": {"kind": "wva"}}
    args["services"] = [tiny, offline]
    with deploy(document, nodes=nodes) as running:
        yield running
        started = running.processes()
    _, alive = psutil.wait_procs(started, timeout=120)
    assert [process.cmdline() for process in alive] == []
