"""Side-channel ports."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deployments.ports import PortClaim, free_ports, listener

HOST = "127.0.0.3"  # loopback, and nobody else's


def bound(port: int) -> socket.socket:
    """A socket that holds a port."""
    taken = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    taken.bind((HOST, port))
    return taken


@contextmanager
def claimed(folder: Path) -> Iterator[int]:
    """A claim of this process, given back as the kernel does when a process ends."""
    claim = PortClaim(folder, HOST)
    yield claim.port
    claim._lock.close()


def test_a_claimed_port_is_free_to_bind_and_claimed_once(tmp_path: Path) -> None:
    with claimed(tmp_path) as first, claimed(tmp_path) as second:
        assert (first, second) == (20000, 20001)
        with bound(first), bound(second):
            pass


def test_a_claim_ends_with_its_owner(tmp_path: Path) -> None:
    for _ in range(2):
        with claimed(tmp_path) as port:
            assert port == 20000


def test_a_port_that_something_else_holds_is_skipped(tmp_path: Path) -> None:
    with bound(20000), bound(20001), claimed(tmp_path) as port:
        assert port == 20002


def test_no_free_port_says_where_and_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.ports.FIRST_PORT", 27998)
    with (
        bound(27998),
        bound(27999),
        pytest.raises(OSError, match=r"no free NIXL side-channel port on 127\.0\.0\.3 .*end what holds them"),
    ):
        PortClaim(tmp_path, HOST)


def test_a_host_of_nobody_is_said_at_once(tmp_path: Path) -> None:
    # RFC 5737: no machine has this address.
    with pytest.raises(OSError, match=r"192\.0\.2\.1: Cannot assign requested address"):
        PortClaim(tmp_path, "192.0.2.1")


def test_the_holder_of_a_taken_port_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with bound(20000) as taken:
        taken.listen()
        with claimed(tmp_path):
            pass
    (said,) = caplog.messages
    assert f"20000 is held by process {os.getpid()} (" in said


def test_the_holder_is_the_one_on_the_asked_address() -> None:
    code = "import socket; s = socket.create_server(('127.0.0.4', 0)); print(s.getsockname()[1], flush=True); input()"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        port = int(other.stdout.readline())
        with bound(port) as taken:
            taken.listen()
            for host, pid in ((HOST, os.getpid()), ("127.0.0.4", other.pid)):
                assert str(listener(host, port)).startswith(f"process {pid} (")
        other.communicate("\n")


def test_nobody_on_a_port_is_none() -> None:
    with bound(0) as free:  # bound, and no listener
        assert listener(HOST, free.getsockname()[1]) is None


def test_free_ports_are_different_bindable_and_none_that_the_kernel_gives_to_clients() -> None:
    ports = free_ports(20)
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert len(set(ports)) == 20
    assert max(ports) < first
    for port in ports:
        with bound(port):
            pass


def test_a_held_port_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.ports._FREE_PORTS", range(28000, 28003))
    with bound(28001):
        assert sorted(free_ports(2)) == [28000, 28002]
        with pytest.raises(OSError, match=r"2 ports are free in 28000\.\.28002, 3 are needed"):
            free_ports(3)
