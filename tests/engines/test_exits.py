"""No exit leaves anything behind."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.engines.endpoint import WAIT_S

pytestmark = [pytest.mark.ray, pytest.mark.vllm]


def descendants(process: psutil.Process) -> list[psutil.Process]:
    """The serving command's own processes and those of the guardian, which runs in a session of its own."""
    return process.children(recursive=True)


def refused(config: Path) -> str:
    """The one line that `tandem serve` prints if it refuses to start."""
    done = subprocess.run(
        [sys.executable, "-m", "serve_app.cli.main", "serve", str(config)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    return line


# SIGTERM and SIGINT are tested in test_changes.py.
def test_nothing_survives_the_driver(make_document: Any, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    document = make_document()
    config.write_text(yaml.safe_dump(document))
    with (tmp_path / "serve.log").open("w") as log:
        serve = subprocess.Popen(
            [sys.executable, "-m", "serve_app.cli.main", "serve", str(config)], stdout=log, stderr=subprocess.STDOUT
        )
    try:
        deadline = time.monotonic() + WAIT_S
        while "/v1/chat/completions" not in (tmp_path / "serve.log").read_text():
            assert serve.poll() is None, (tmp_path / "serve.log").read_text()[-2000:]
            assert time.monotonic() < deadline
            time.sleep(0.5)
        started = descendants(psutil.Process(serve.pid))
        names = " ".join(" ".join(process.cmdline()) for process in started)
        assert "EngineCore" in names
        assert "haproxy" in names
        assert "raylet" in names
    finally:
        serve.kill()
    serve.wait(120)
    assert serve.returncode == -signal.SIGKILL
    assert "Traceback" not in (tmp_path / "serve.log").read_text()
    _, alive = psutil.wait_procs(started, timeout=120)
    assert [process.cmdline() for process in alive] == []


def test_serve_run_answers_and_nothing_survives_its_end_by_kill(make_document: Any, tmp_path: Path) -> None:
    """Serve's own command has no guardian, and starts Serve's Python proxy by default."""
    document = make_document()
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(document))
    with (
        tempfile.TemporaryDirectory(prefix="ray-") as folder,  # a short path: Ray puts sockets below it
        (tmp_path / "serve.log").open("w") as log,
    ):
        serve = subprocess.Popen(
            [Path(sys.executable).with_name("serve"), "run", str(config)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "RAY_TMPDIR": folder, "RAY_ENABLE_AUTO_CONNECT": "0", "RAY_SERVE_ENABLE_HA_PROXY": "0"},
        )
        started: list[psutil.Process] = []
        try:
            deadline = time.monotonic() + WAIT_S
            while not answers(document["http_options"]["port"]):
                assert serve.poll() is None, (tmp_path / "serve.log").read_text()[-2000:]
                assert time.monotonic() < deadline
                time.sleep(0.5)
            started = descendants(psutil.Process(serve.pid))
            assert "EngineCore" in " ".join(" ".join(process.cmdline()) for process in started)
        finally:
            started = started or descendants(psutil.Process(serve.pid))
            serve.kill()
            deadline = time.monotonic() + 300.0  # Ray's two agents first wait 60 s for their cluster
            while (left := survivors(started)) and time.monotonic() < deadline:
                time.sleep(0.5)
            for process in left:
                process.kill()
        assert [process.cmdline() for process in left] == []


def survivors(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Processes that still run, without zombies: these hold nothing, and their new parent decides when they go."""
    left = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                left.append(process)
    return left


def answers(port: int) -> bool:
    body = json.dumps({"model": "tiny", "prompt": "You may", "max_tokens": 1}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", data=body, headers={"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def test_a_busy_port_is_named_before_anything_starts(make_document: Any, tmp_path: Path) -> None:
    import socket

    document = make_document()
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(document))
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", document["http_options"]["port"]))
        holder.listen()
        line = refused(config)
    assert str(document["http_options"]["port"]) in line
    assert "process" in line


def test_wrong_engine_arguments_are_named_before_anything_starts(make_document: Any, tmp_path: Path) -> None:
    document = make_document()
    config = tmp_path / "config.yaml"
    for wrong, said in (({"max_model_length": 1}, "max_model_len"), ({"block_size": 0}, "greater than 0")):
        document["applications"][0]["args"]["groups"][0]["decode"]["engine_kwargs"] = wrong
        config.write_text(yaml.safe_dump(document))
        line = refused(config)
        assert "groups.g0.decode" in line
        assert said in line


def test_a_failed_start_names_the_cause_and_leaves_nothing(make_document: Any, tmp_path: Path) -> None:
    document = make_document()
    # Too little KV for one request of the full context: vLLM fails in the engine core, as on a GPU that is too small.
    document["applications"][0]["args"]["engine_kwargs"]["kv_cache_memory_bytes"] = 1_000_000
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(document))
    with (tmp_path / "stderr.log").open("w") as said:
        serve = subprocess.Popen(
            [sys.executable, "-m", "serve_app.cli.main", "serve", str(config)],
            stdout=subprocess.DEVNULL,
            stderr=said,
            env={
                **os.environ,
                "RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT": "1",
            },  # Serve's default, 3, takes three times as long
        )
    started: set[psutil.Process] = set()
    while serve.poll() is None:
        started.update(descendants(psutil.Process(serve.pid)))
        time.sleep(0.5)
    assert serve.returncode == 1
    assert started
    _, alive = psutil.wait_procs(started, timeout=30)
    assert alive == []
    (line,) = (tmp_path / "stderr.log").read_text().strip().splitlines()
    assert "KV cache" in line
