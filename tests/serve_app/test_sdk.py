"""What `deploy` and `connect` say where there is no cluster to speak to, or one too many."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from deployments.ports import free_ports

pytestmark = pytest.mark.ray


def test_an_address_where_nobody_listens_is_refused_at_once() -> None:
    from serve_app.cluster import DeployError
    from serve_app.sdk import connect

    address = f"127.0.0.1:{free_ports(1)[0]}"
    with pytest.raises(DeployError, match=f"no Ray cluster at '{address}': .*refused"):
        connect(address)


def test_a_connection_of_the_callers_own_is_refused_and_left_alone(root: Path) -> None:
    script = """
import ray
import sys
from serve_app.cluster import DeployError
from serve_app.sdk import deploy
ray.init(address="local", num_cpus=1, include_dashboard=False, _temp_dir=sys.argv[1])
try:
    deploy("configs/cpu_tiny.yaml")
except DeployError as error:
    print(error)
assert ray.is_initialized()
ray.shutdown()
"""
    # Not in tmp_path: the path of a Unix socket has 107 bytes at most.
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        done = subprocess.run(
            [sys.executable, "-c", script, folder], cwd=root, capture_output=True, text=True, timeout=120, check=False
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1].startswith("this process is connected to a Ray cluster already")


def test_the_cause_of_a_failed_start_is_the_last_exception_with_its_beginning_and_its_end() -> None:
    from serve_app.sdk import _first_cause

    said = "Traceback\nValueError: first\nRuntimeError: HAProxy crashed:\n" + "notice\n" * 200 + "cannot bind socket"
    cause = _first_cause([said, "RuntimeError: another replica's"])
    assert cause.startswith("RuntimeError: HAProxy crashed: notice")
    assert cause.endswith("notice cannot bind socket")
    assert len(cause) < 520
