"""Claims of cores and ports, and the locks that hold them."""

import fcntl
import itertools
import json
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from deployments.machine.claims import PortClaim, free_ports, listener, own_folder, try_lock


def test_the_folder_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    folder = own_folder(tmp_path / "a" / "claims")
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o775)  # as older versions made it
    assert own_folder(folder).stat().st_mode & 0o777 == 0o700


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = os.getuid(), os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    with pytest.raises(PermissionError, match=f"is a folder of user {own}, and this is user {other}: have it removed"):
        own_folder(tmp_path)


def test_a_link_to_another_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "claims").symlink_to(tmp_path)
    with pytest.raises(PermissionError, match="is a link"):
        own_folder(tmp_path / "claims")


def test_a_lock_is_held_until_its_file_is_closed(tmp_path: Path) -> None:
    lock = try_lock(tmp_path / "one")
    assert lock is not None
    assert try_lock(tmp_path / "one") is None
    lock.close()
    again = try_lock(tmp_path / "one")
    assert again is not None
    again.close()


CORES = sorted(os.sched_getaffinity(0))

HOLD = """
import json, sys
from pathlib import Path
from deployments.machine.claims import CoreClaim
claim = CoreClaim(Path(sys.argv[1]), count=int(sys.argv[2]), from_end=sys.argv[3] == "end")
print(json.dumps(claim.cores), flush=True)
sys.stdin.read()
"""

needs_two_cores = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")


class Engine:
    """A process that holds a claim until it ends."""

    def __init__(self, root: Path, folder: Path, *, count: int = 1, end: str = "start") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(folder), str(count), end],
            cwd=root,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.cores: list[int] = json.loads(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def start(root: Path, tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def start_engine(**how: Any) -> Engine:
        engines.append(Engine(root, tmp_path / "cores", **how))
        return engines[-1]

    yield start_engine
    for engine in engines:
        engine.kill()


@needs_two_cores
def test_two_processes_claim_different_cores(start: Callable[..., Engine]) -> None:
    assert start().cores == [CORES[0]]
    assert start().cores == [CORES[1]]


@needs_two_cores
def test_prefill_takes_cores_from_the_start_and_decode_from_the_end(start: Callable[..., Engine]) -> None:
    assert start(end="end").cores == [CORES[-1]]
    assert start(end="start").cores == [CORES[0]]


@needs_two_cores
def test_the_death_of_a_process_frees_its_claim(start: Callable[..., Engine]) -> None:
    start()
    second = start()
    second.kill()
    # If the dead claim still counted, this claim would get the third core, or the first once more.
    assert start().cores == [CORES[1]]


def test_a_claim_is_never_larger_than_the_machine(start: Callable[..., Engine]) -> None:
    assert start(count=len(CORES) + 5).cores == CORES


def test_one_claim_never_holds_a_core_twice(start: Callable[..., Engine], tmp_path: Path) -> None:
    # Only the first core is claimed, and that twice: its free slot comes after two rounds over the others.
    folder = tmp_path / "cores"
    folder.mkdir()
    with (folder / f"core-{CORES[0]}.0").open("a") as one, (folder / f"core-{CORES[0]}.1").open("a") as two:
        fcntl.flock(one, fcntl.LOCK_EX)
        fcntl.flock(two, fcntl.LOCK_EX)
        assert start(count=len(CORES)).cores == CORES


def test_more_engines_than_cores_spread_evenly(tmp_path: Path, run_python: Callable[..., Any]) -> None:
    script = """
import json, os, sys
from pathlib import Path
from deployments.machine.claims import CoreClaim
claims = [CoreClaim(Path(sys.argv[1]), count=1, from_end=False) for _ in range(3 * len(os.sched_getaffinity(0)))]
print(json.dumps([core for claim in claims for core in claim.cores]))
"""
    assert Counter(run_python(script, str(tmp_path))) == dict.fromkeys(CORES, 3)


HOST = "127.0.0.3"  # loopback, and used by no other test


def bound(port: int) -> socket.socket:
    """A socket that holds a port."""
    taken = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    taken.bind((HOST, port))
    return taken


@contextmanager
def claimed(folder: Path) -> Iterator[int]:
    """A claim of this process; closing its lock gives it back, as the kernel does when a process ends."""
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


def test_a_port_that_another_socket_holds_is_skipped(tmp_path: Path) -> None:
    with bound(20000), bound(20001), claimed(tmp_path) as port:
        assert port == 20002


def test_no_free_port_says_where_and_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.machine.claims.FIRST_PORT", 27998)
    with (
        bound(27998),
        bound(27999),
        pytest.raises(OSError, match=r"no free NIXL side-channel port on 127\.0\.0\.3 .*end what holds them"),
    ):
        PortClaim(tmp_path, HOST)


def test_a_host_that_no_machine_has_is_named_at_once(tmp_path: Path) -> None:
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


def test_the_holder_of_a_port_is_the_process_on_the_same_address() -> None:
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


def test_a_port_without_a_listener_is_none() -> None:
    with bound(0) as free:  # bound, but no process listens
        assert listener(HOST, free.getsockname()[1]) is None


def test_free_ports_are_different_bindable_and_none_that_the_kernel_gives_to_clients() -> None:
    ports = free_ports(20)
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert len(set(ports)) == 20
    assert max(ports) < first
    for port in ports:
        with bound(port):
            pass


def test_a_process_gets_no_port_twice_before_all_others() -> None:
    # Nothing binds these ports, so each of them still looks free at the next call.
    ports = [port for _ in range(60) for port in free_ports(5)]
    assert len(set(ports)) == len(ports)


def test_a_held_port_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.machine.claims._FREE_PORTS", range(28000, 28003))
    monkeypatch.setattr("deployments.machine.claims._next_ports", itertools.cycle(range(28000, 28003)))
    with bound(28001):
        assert free_ports(2) == [28000, 28002]
        assert sorted(free_ports(2)) == [28000, 28002]
        with pytest.raises(OSError, match=r"2 ports are free in 28000\.\.28002, 3 are needed"):
            free_ports(3)
