"""One application on real engines for the whole session: prefill and decode on differently labelled Ray nodes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.ports import free_ports
from serve_app.cluster import NodeSpec
from serve_app.tiny_model import build_tiny_model

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
    build_tiny_model(folder, ROOT / "LICENSE")
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
    from serve_app.sdk import deploy

    nodes = [
        NodeSpec(cpus=2),
        NodeSpec(cpus=2, labels={"tandem.io/s1": "a", "tandem.io/s0": "left"}),
        NodeSpec(cpus=2, labels={"tandem.io/s1": "a", "tandem.io/s0": "right"}),
    ]
    with deploy(make_document(prefill="left", decode="right"), nodes=nodes) as running:
        yield running
