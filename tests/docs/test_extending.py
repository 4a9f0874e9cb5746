"""The code of docs/extending.md runs: the policy, the collector, the test of the policy, and each YAML."""

import http.server
import importlib
import json
import re
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from autoscale.decide.config import AutoscaleConfig
from autoscale.observe.collected import Collected, ReplicaFigure, ServiceFigure
from autoscale.observe.ray_collectors import Source
from autoscale.policies import OWN_POLICIES
from autoscale.sim.config import SimConfig
from tests.docs.test_pages import FENCE, ROOT, text_of

BLOCKS = FENCE.findall(text_of("docs/extending.md"))


def of(language: str) -> list[str]:
    return [block for name, block in BLOCKS if name == language]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The page's Python files, where they say that they are."""
    for block in of("python"):
        match = re.match(r"# (my_pkg/\w+\.py)\n", block)
        assert match is not None
        path = tmp_path / match.group(1)
        path.parent.mkdir(exist_ok=True)
        path.write_text(block)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_pkg"]:
        del sys.modules[name]


def test_the_policy_and_the_collector_have_about_twenty_lines_each() -> None:
    policy, collector, _ = of("python")
    assert len(policy.splitlines()) <= 22
    assert len(collector.splitlines()) <= 25


def test_the_pages_test_of_the_policy_passes(package: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:schemathesis", "my_pkg/test_policies.py"]
    done = subprocess.run(
        command, cwd=package, env={"PYTHONPATH": f"{package}:{ROOT}"}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_the_pages_yaml_is_valid(package: Path) -> None:
    prometheus, own = (yaml.safe_load(block) for block in of("yaml"))
    config = AutoscaleConfig.model_validate({**own, **{"pd_ratio": "1:2"}})
    assert config.policy.model_dump() == {"kind": "my_pkg.policies:KvUsage", "target_frac": 0.6}
    AutoscaleConfig.model_validate({**own, **prometheus})


def test_the_collector_answers_what_its_source_says(package: Path) -> None:
    class Gateway(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"arrivals": 3.5, "ttft_p95_s": 0.4, "at_s": time.time()}).encode())

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    server = http.server.HTTPServer(("127.0.0.1", 0), Gateway)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        section = {"kind": "my_pkg.collectors:Gateway", "url": f"http://127.0.0.1:{server.server_port}"}
        own = yaml.safe_load(of("yaml")[1])
        source = Source(AutoscaleConfig.model_validate({**own, "collector": section}).collector)  # type: ignore[arg-type]
        deadline = time.monotonic() + 30
        while (answer := source.read())[0] == Collected():
            assert time.monotonic() < deadline, answer
            time.sleep(0.02)
        assert answer[0].service == {"requests_per_s": 3.5, "ttft_s": 0.4}
    finally:
        server.shutdown()
        server.server_close()


def test_the_simulator_takes_the_policy_by_its_name(package: Path) -> None:
    config = SimConfig.load(ROOT / "configs" / "sim" / "h100_llama70b.yaml")
    assert config.autoscale_config("my_pkg.policies:KvUsage").policy.kind == "my_pkg.policies:KvUsage"


def test_the_entry_points_name_the_pages_classes(package: Path) -> None:
    (block,) = of("toml")
    groups = tomllib.loads(block)["project"]["entry-points"]
    assert set(groups) == {"tandem.policies", "tandem.collectors"}
    assert groups["tandem.policies"]["kv_usage"] == "my_pkg.policies:KvUsage"
    for path in (path for points in groups.values() for path in points.values()):
        module, _, name = path.partition(":")
        assert hasattr(importlib.import_module(module), name)
    assert OWN_POLICIES.group == "tandem.policies"


def test_the_page_lists_every_figure_that_a_collector_may_give() -> None:
    page = text_of("docs/extending.md")
    for figure in (*ReplicaFigure.__args__, *ServiceFigure.__args__):  # type: ignore[attr-defined]
        assert f"`{figure}`" in page, figure
