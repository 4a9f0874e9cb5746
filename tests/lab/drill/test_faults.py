"""Which replica a fault breaks: real processes have titles as Ray and vLLM give them."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import psutil
import pytest

from tests.lab.drill import faults as drill_faults
from tests.lab.drill.faults import FAULTS
from tests.lab.stand.processes import title

COMPUTES, RESTS = "bash -c 'while :; do :; done'", "sleep 60"
MakeReplica = Callable[..., psutil.Process]


@pytest.fixture
def make_replica() -> Iterator[MakeReplica]:
    """A replica of a role; ``engine``: the command that its engine runs."""
    started: list[psutil.Process] = []

    def make(engine: str, role: str = "decode") -> psutil.Process:
        words = [f"ray::ServeReplica:tandem:{role}:g0", "-c", f"(exec -a VLLM::EngineCore {engine}) & wait"]
        replica = psutil.Process(subprocess.Popen(words, executable="/bin/bash").pid)
        until_s = time.monotonic() + 10.0
        while not (found := [one for one in replica.children() if title(one).startswith("VLLM::EngineCore")]):
            assert time.monotonic() < until_s
            time.sleep(0.01)
        started.extend((replica, *found))
        return replica

    yield make
    for process in started:
        with suppress(psutil.Error):
            process.kill()


@pytest.fixture(autouse=True)
def _on_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU time is compared over a second: in it every process that computes gets a core for a moment."""
    for name, value in {"_WORK_S": 60.0, "_GLANCE_S": 1.0, "_BUSY_FRAC": 0.01}.items():
        monkeypatch.setattr(drill_faults, name, value)


@pytest.mark.parametrize("does", [(COMPUTES, RESTS), (COMPUTES, COMPUTES), (RESTS, RESTS)])
def test_the_youngest_decode_replica_that_has_work_is_broken(
    make_replica: MakeReplica, monkeypatch: pytest.MonkeyPatch, does: tuple[str, str]
) -> None:
    if COMPUTES not in does:
        monkeypatch.setattr(drill_faults, "_WORK_S", 1.0)
    old, young = map(make_replica, does)
    broken, lives = (old, young) if does == (COMPUTES, RESTS) else (young, old)
    killed = FAULTS["kill-decode"]([old, young])
    assert killed.endswith(f"({broken.pid})")
    assert broken.wait(10) == -signal.SIGKILL
    assert lives.is_running()


def test_the_engine_of_the_replica_that_has_work_is_broken(make_replica: MakeReplica) -> None:
    old, young = make_replica(COMPUTES), make_replica(RESTS)
    (engine,) = old.children()
    FAULTS["hang-engine"]([young, old])
    while engine.status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    assert young.children()[0].status() != psutil.STATUS_STOPPED


@pytest.mark.parametrize("fault", ["kill-prefill", "kill-engine-worker", "hang-prefill-engine", "hang-prefill"])
def test_the_prefill_replica_that_has_work_is_broken(make_replica: MakeReplica, fault: str) -> None:
    old, young = make_replica(COMPUTES, "prefill"), make_replica(RESTS, "prefill")
    (engine,) = old.children()
    broken = engine if "engine" in fault else old
    assert FAULTS[fault]([young, old]).endswith(f"({broken.pid})")


def test_an_engine_that_stood_still_for_its_replica_to_be_killed_can_end(make_replica: MakeReplica) -> None:
    replica = make_replica(COMPUTES, "prefill")
    (engine,) = replica.children()
    before_s = time.monotonic()
    FAULTS["kill-prefill"]([replica])
    assert time.monotonic() - before_s > drill_faults._GATHER_PROMPTS_S
    assert replica.wait(10) == -signal.SIGKILL
    assert engine.status() != psutil.STATUS_STOPPED


# The kernel takes a while to free this memory, and closes connections after that.
SERVES = """
import socket, time
held = b"1" * (512 << 20)
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
time.sleep(60)
"""


def test_a_front_is_gone_when_the_fault_returns() -> None:
    words = ["ray::ServeReplica:tandem:ingress", "-c", SERVES]
    with subprocess.Popen(words, executable=sys.executable, stdout=subprocess.PIPE, text=True) as front:
        assert front.stdout is not None
        port = int(front.stdout.readline())
        assert FAULTS["kill-ingress"]([psutil.Process(front.pid)]).endswith(f"({front.pid})")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
