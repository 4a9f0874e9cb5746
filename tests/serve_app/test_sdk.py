"""What `deploy` and `connect` say if there is no cluster, or if the caller already has a connection."""

import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from deployments.machine.claims import free_ports

pytestmark = pytest.mark.ray


def test_an_address_without_a_listener_is_refused_at_once() -> None:
    from serve_app.local.cluster import DeployError
    from serve_app.sdk import connect

    address = f"127.0.0.1:{free_ports(1)[0]}"
    with pytest.raises(DeployError, match=f"no Ray cluster at '{address}': .*refused"):
        connect(address)


def test_a_connection_of_the_callers_own_is_refused_and_left_alone(root: Path) -> None:
    script = """
import ray
import sys
from serve_app.local.cluster import DeployError
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


def app_at(root: Path, url: str) -> Any:
    """An application of the emulated configuration, as if it ran."""
    from serve_app.checks.ray_schema import read_application
    from serve_app.sdk import App

    app = App(*read_application(root / "configs" / "emulated.yaml"), "127.0.0.1:1")
    app.url = url
    return app


def test_an_update_on_a_lost_cluster_fails_with_one_line(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from serve_app import sdk
    from serve_app.local.cluster import DeployError

    error = type("RayActorError", (Exception,), {"__module__": "ray.exceptions"})("Serve's controller is gone")

    def lose(**_: Any) -> None:
        raise error

    monkeypatch.setattr("ray.serve.start", lose)
    monkeypatch.setattr(sdk, "check_engines", lambda config: None)  # takes seconds
    with pytest.raises(DeployError, match=r"^application tandem: Serve's controller is gone$"):
        app_at(root, "").update(root / "configs" / "emulated.yaml")


def test_a_port_that_does_not_speak_http_is_no_answer(root: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def speak() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"SSH-2.0-OpenSSH\r\n")

        thread = threading.Thread(target=speak)
        thread.start()
        assert not app_at(root, f"http://127.0.0.1:{server.getsockname()[1]}").is_answering()
        thread.join()


def test_the_cause_of_a_failed_start_is_the_last_exception_with_its_beginning_and_its_end() -> None:
    from serve_app.running.ray_serve import first_cause

    said = "Traceback\nValueError: first\nRuntimeError: HAProxy crashed:\n" + "notice\n" * 200 + "cannot bind socket"
    cause = first_cause([said, "RuntimeError: another replica's"])
    assert cause.startswith("RuntimeError: HAProxy crashed: notice")
    assert cause.endswith("notice cannot bind socket")
    assert len(cause) < 520


def test_no_thread_asks_serve_after_leave(root: Path) -> None:
    # Serve's handles report for ever from their own thread, and Ray would start a cluster for a caller without one.
    script = """
import time
from pathlib import Path
from serve_app.local.cluster import LocalCluster, NodeSpec, driver_environment
driver_environment()
import ray
from ray import serve
from serve_app.checks.yaml_checks import load_serve_yaml
from serve_app.checks.ray_schema import single_app_config
from serve_app.sdk import App, connect

@serve.deployment(autoscaling_config={"min_replicas": 1, "max_replicas": 2})
class One:
    def __call__(self):
        return 1

document = load_serve_yaml(Path("configs/emulated.yaml"))
cluster = LocalCluster([NodeSpec(cpus=2)])
app = App(document, single_app_config(document), cluster.address, cluster)
connect(cluster.address)
serve.run(One.bind(), name="one")
handle = serve.get_deployment_handle("One", "one")
handle._init(_run_router_in_separate_loop=True)
assert handle.remote().result() == 1
time.sleep(11.0)  # a report every 10 s
app.close()
time.sleep(11.0)
assert not ray.is_initialized()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Failed to run metrics task" not in done.stderr
