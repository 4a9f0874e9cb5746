"""If this machine lacks a thing, one line says the value and what to do."""

import ctypes.util
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from deployments.machine.claims import free_ports
from serve_app.checks.yaml_checks import ConfigError, parse_app_config
from serve_app.config import AppConfig
from serve_app.local.preflight import check_machine

HOST = "127.0.0.4"  # loopback, and used by no other test
CPU = {"name": "g0", "prefill": {"replicas": 2}, "decode": {"replicas": 1}}
GPU = {role: {"placement": {"accelerator_type": "H100"}} for role in ("prefill", "decode")}

# A process that listens and has a line break among its arguments.
LISTEN = """
import socket, sys, time
listener = socket.create_server((sys.argv[1], 0))
print(listener.getsockname()[1], flush=True)
time.sleep(600)
"""

MakeConfig = Callable[..., AppConfig]


@pytest.fixture
def free_port() -> int:
    return free_ports(1)[0]


@pytest.fixture
def make_config(make_app_args: Callable[..., dict[str, Any]]) -> MakeConfig:
    """A config on GPUs for which this machine is enough; ``fields`` replace its own."""

    def make(source: str = "org/model", **changes: Any) -> AppConfig:
        fields: dict[str, Any] = {"groups": [{"name": "g0", **GPU}], **changes}
        return parse_app_config(make_app_args(model={"id": "m", "source": source}, **fields))

    return make


@dataclass
class Machine:
    """What this machine reports of itself; by default it has enough."""

    libraries: tuple[str, ...] = ("numa",)
    disk_bytes: dict[str, int] | None = None  # free bytes of each folder
    memory_bytes: int = 10**18
    total_bytes: int = 20 * 10**9

    def disk_usage(self, folder: str) -> SimpleNamespace:
        return SimpleNamespace(free=10**18 if self.disk_bytes is None else self.disk_bytes[folder])

    def find_library(self, name: str) -> str | None:
        return f"lib{name}.so.1" if name in self.libraries else None

    def virtual_memory(self) -> SimpleNamespace:
        return SimpleNamespace(available=self.memory_bytes, total=self.total_bytes)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """The machine of every test here; its ports are real."""
    fake = Machine()
    monkeypatch.setattr(ctypes.util, "find_library", fake.find_library)
    monkeypatch.setattr(shutil, "disk_usage", fake.disk_usage)
    monkeypatch.setattr(psutil, "virtual_memory", fake.virtual_memory)
    return fake


@pytest.fixture
def listener() -> Iterator[tuple[int, int]]:
    """The pid and port of another process that listens."""
    process = subprocess.Popen([sys.executable, "-c", LISTEN, HOST], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.pid, int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def complaint(config: AppConfig, port: int, host: str = HOST) -> str:
    """The one line of the check that fails."""
    with pytest.raises(ConfigError) as caught:
        check_machine(config, host=host, port=port)
    line = str(caught.value)
    assert len(line.splitlines()) == 1
    return line


@pytest.mark.parametrize("groups", [[CPU], [{"name": "g0", **GPU}]], ids=["cpu", "gpu"])
def test_a_machine_that_has_everything_passes(
    make_config: MakeConfig, free_port: int, tmp_path: Path, groups: list[Any]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    for source in (str(tmp_path), "org/model"):
        check_machine(make_config(source, groups=groups), host=HOST, port=free_port)


def test_model_folder_that_is_missing_or_empty_is_named(
    make_config: MakeConfig, free_port: int, tmp_path: Path
) -> None:
    cases = {
        tmp_path / "none": "there is no folder {}: give an existing one",
        tmp_path: "{} has no config.json: give a model folder",
        tmp_path / ("x" * 300): "{} cannot be read (File name too long): give another folder",
    }
    for folder, words in cases.items():
        line = complaint(make_config(str(folder)), free_port)
        assert line == f"model.source: {words.format(folder)}"


def test_a_file_instead_of_a_model_folder_is_refused(make_config: MakeConfig, free_port: int, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    assert f"{file} is a file: " in complaint(make_config(str(file)), free_port)


def test_missing_libnuma_is_named_for_engines_on_cpu_only(
    make_config: MakeConfig, free_port: int, machine: Machine
) -> None:
    machine.libraries = ()
    check_machine(make_config(), host=HOST, port=free_port)
    assert "install the package libnuma1" in complaint(make_config(groups=[CPU]), free_port)


def test_busy_port_names_the_process_that_listens(make_config: MakeConfig, listener: tuple[int, int]) -> None:
    pid, port = listener
    command = " ".join([sys.executable, "-c", *LISTEN.split(), HOST])[:80]
    assert complaint(make_config(), port) == (
        f"{HOST}:{port} cannot be used: Address already in use; process {pid} ({command}) listens on it: "
        "end it, or choose another http_options.port"
    )


def test_process_that_uses_a_port_without_listening_is_not_named(
    make_config: MakeConfig, listener: tuple[int, int]
) -> None:
    with socket.socket() as client:
        client.bind((HOST, 0))
        client.connect((HOST, listener[1]))
        port = client.getsockname()[1]
        words = f"{HOST}:{port} cannot be used: Address already in use; choose another http_options.port"
        assert complaint(make_config(), port) == words


def test_port_of_a_server_that_has_just_ended_is_free(make_config: MakeConfig) -> None:
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection((HOST, port)):
            server.accept()[0].close()  # the side that closes first keeps the port in TIME_WAIT
    check_machine(make_config(), host=HOST, port=port)


@pytest.mark.parametrize("port", [-1, 0, 65536, 70000])
def test_port_out_of_range_is_refused(make_config: MakeConfig, port: int) -> None:
    words = f"http_options.port: {port} is not a port: choose one from 1 to 65535"
    assert complaint(make_config(), port) == words


def test_port_that_only_root_may_use_is_refused_to_others(
    run_python: Callable[..., Any], make_config: MakeConfig
) -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text())
    if first == 0:
        pytest.skip("this kernel lets every user bind every port")
    script = """
import json, os, sys
from serve_app.config import AppConfig
from serve_app.local.preflight import check_machine
from serve_app.checks.yaml_checks import ConfigError
if os.geteuid() == 0:
    os.setuid(65534)
try:
    check_machine(AppConfig.model_validate_json(sys.argv[1]), host=sys.argv[2], port=int(sys.argv[3]))
    print("null")
except ConfigError as error:
    print(json.dumps(str(error)))
"""
    line = run_python(script, make_config().model_dump_json(), HOST, str(first - 1))
    assert line == f"{HOST}:{first - 1} cannot be used: Permission denied; choose another http_options.port"


@pytest.mark.parametrize("host", ["no.such.host.invalid", "::1", "a..b"])
def test_host_that_does_not_resolve_is_one_line_that_names_the_field(
    make_config: MakeConfig, free_port: int, host: str
) -> None:
    line = complaint(make_config(), free_port, host)
    assert re.fullmatch(rf"http_options\.host: '{host}' stands for no IPv4 address \(.+\): use 127\.0\.0\.1", line)


def test_address_of_another_machine_is_refused_and_no_process_is_blamed(
    make_config: MakeConfig, listener: tuple[int, int]
) -> None:
    _, port = listener
    # An address for documentation, which no machine has (RFC 5737).
    line = complaint(make_config(), port, "192.0.2.1")
    assert line.startswith(f"192.0.2.1:{port} cannot be used: ")
    assert line.endswith("; use an http_options.host of this machine, such as 127.0.0.1")


def test_too_little_disk_is_reported_for_the_folder_of_the_cluster(
    make_config: MakeConfig, free_port: int, machine: Machine
) -> None:
    machine.disk_bytes = {"/tmp": 2 << 30}  # LocalCluster's folder is here, whatever TMPDIR says
    check_machine(make_config(), host=HOST, port=free_port)
    machine.disk_bytes = {"/tmp": 5 * 10**8}
    assert complaint(make_config(), free_port) == "/tmp has 0.5 GB free, a start needs 2.1 GB: free some"


def test_too_little_memory_is_reported_with_the_available_memory(
    make_config: MakeConfig, free_port: int, machine: Machine
) -> None:
    config = make_config(groups=[CPU], engine_kwargs={"kv_cache_memory_bytes": 10**9})
    machine.memory_bytes = 3 * 4_400_000_000  # three engines, 1 GB of KV and 3.4 GB each
    check_machine(config, host=HOST, port=free_port)
    machine.memory_bytes -= 1
    assert complaint(config, free_port) == (
        "3 engines need about 13.2 GB of memory (weights + KV + 3.4 GB each) and 13.2 GB is available: "
        "use fewer replicas or a smaller kv_cache_memory_bytes, without which each engine takes 92% of the machine"
    )


def memory_need(config: AppConfig, port: int) -> str:
    """The part of the line that says how many engines need how much memory."""
    return complaint(config, port).partition(" of memory ")[0]


def test_role_has_its_own_kv_before_the_applications_and_gpus_need_no_memory(
    make_config: MakeConfig, free_port: int
) -> None:
    huge = {"kv_cache_memory_bytes": 10**18}
    decode = {"replicas": 1, "engine_kwargs": {"kv_cache_memory_bytes": 10**9}}
    # 2 x (10^9 + 3.4) GB for prefill; for decode 1 + 3.4 GB, or nothing on GPUs.
    for pool, need in (
        (decode, "3 engines need about 2000000011.2 GB"),
        (GPU["decode"], "2 engines need about 2000000006.8 GB"),
    ):
        config = make_config(groups=[{**CPU, "decode": pool}], engine_kwargs=huge)
        assert memory_need(config, free_port) == need


def test_memory_is_needed_for_every_replica_that_the_autoscaler_may_add(
    make_config: MakeConfig, free_port: int, machine: Machine
) -> None:
    machine.memory_bytes = 0
    pool = {"replicas": 1, "max_replicas": 3}
    config = make_config(
        groups=[{"name": "g0", "prefill": pool, "decode": pool}],
        engine_kwargs={"kv_cache_memory_bytes": 10**9},
        autoscale={"policy": {"kind": "static", "prefill": 1, "decode": 1}, "pd_ratio": "1:1"},
    )
    assert memory_need(config, free_port) == "6 engines need about 26.4 GB"  # 1 GB of KV and 3.4 GB each


def test_every_engine_needs_its_weights_and_without_a_kv_size_its_share_of_the_machine(
    make_config: MakeConfig, free_port: int, tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    for name in ("a.safetensors", "b.safetensors", "notes.txt"):
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, 10**9)  # a sparse file: no bytes on disk
    machine.memory_bytes = 0
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    # 3 x (2 x 10^9 + 10^9 + 3.4e9); then 3 x (0.92 x 20 + 0.8) GB and 3 x (0.1 x 20 + 0.8) GB of a machine of 20 GB.
    for kwargs, need in (
        ({"kv_cache_memory_bytes": 10**9}, "19.2"),
        ({}, "57.6"),
        ({"gpu_memory_utilization": 0.1}, "8.4"),
    ):
        config = make_config(str(tmp_path), groups=[CPU], engine_kwargs=kwargs)
        assert memory_need(config, free_port) == f"3 engines need about {need} GB"
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")  # 3 x (2 x 10^9 + 1 GiB + 3.4e9)
    assert memory_need(make_config(str(tmp_path), groups=[CPU], engine_kwargs={}), free_port).endswith("19.4 GB")


def test_a_held_nixl_port_is_logged_and_is_no_error(
    make_config: MakeConfig,
    free_port: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    listener: tuple[int, int],
) -> None:
    pid, port = listener
    monkeypatch.setattr("serve_app.local.preflight.FIRST_PORT", port)
    monkeypatch.setattr("serve_app.local.preflight.NODE_IP", HOST)
    check_machine(make_config(groups=[CPU]), host=HOST, port=free_port)
    (record,) = caplog.records
    assert f"NIXL port {port} is held by process {pid}" in record.getMessage()


@pytest.mark.parametrize("value", ["1e9", "4GiB", 1.5, [1]])
def test_kv_that_is_no_number_of_bytes_is_named(make_config: MakeConfig, free_port: int, value: Any) -> None:
    config = make_config(groups=[CPU], engine_kwargs={"kv_cache_memory_bytes": value})
    words = f"engine_kwargs: kv_cache_memory_bytes is {value!r}: write a whole number of bytes"
    assert complaint(config, free_port) == words
