"""The tiny model, and applications that serve it on real engines."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.machine.claims import free_ports
from serve_app.local.tiny_model import build_tiny_model

ROOT = Path(__file__).parents[2]


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
            "enable_prompt_tokens_details": True,
            "enable_per_request_metrics": True,
            "reasoning_parser": "deepseek_v3",  # parses nothing unless a request asks its model to think
        }
        for role, switch in labels.items():
            args["groups"][0][role]["placement"]["node_labels"] = {"tandem.io/s1": "a", "tandem.io/s0": switch}
        return document

    return make
