"""A local cluster whose guardian process fails; a script stands in for the guardian."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from serve_app.local import cluster
from serve_app.local.cluster import DeployError, LocalCluster

Start = Callable[[str], LocalCluster]


@pytest.fixture(name="start")
def _start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Start a cluster whose guardian runs this line of a shell."""

    def start(line: str) -> LocalCluster:
        script = tmp_path / "guardian"
        script.write_text(f"#!/bin/sh\n{line}\n")
        script.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(script))
        return LocalCluster()

    monkeypatch.setattr(cluster, "driver_environment", dict)
    monkeypatch.setattr(cluster, "CLUSTER_PARENT", str(tmp_path))
    monkeypatch.setattr(cluster, "_CACHE", tmp_path)
    monkeypatch.setattr(cluster, "_CONNECTION_FILE", tmp_path / "local-cluster.json")
    return start


def test_a_guardian_that_ends_at_once_is_no_timeout(start: Start) -> None:
    with pytest.raises(DeployError, match=re.escape("machine: its guardian process ended: ModuleNotFoundError: ray")):
        start("echo 'ModuleNotFoundError: ray' >&2")
    with pytest.raises(DeployError, match=r"machine: its guardian process ended$"):
        start("exec <&-")  # it writes nothing and does not read its plan


def test_a_guardian_that_does_not_answer_is_a_timeout(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_START_TIMEOUT_S", 0.2)
    monkeypatch.setattr(cluster, "_STOP_TIMEOUT_S", 0.2)
    with pytest.raises(DeployError, match=re.escape("machine: no answer in 0.2 s")):
        start("exec sleep 60")


def test_ray_says_why_it_did_not_start(start: Start) -> None:
    with pytest.raises(DeployError, match=r"machine: no port$"):
        start("""echo '{"ready": false, "error": "no port"}'""")
