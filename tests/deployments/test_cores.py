"""Core claims, made by real processes."""

import fcntl
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

CORES = sorted(os.sched_getaffinity(0))

HOLD = """
import json, sys
from pathlib import Path
from deployments.cores import CoreClaim
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
def test_prefill_takes_from_the_start_and_decode_from_the_end(start: Callable[..., Engine]) -> None:
    assert start(end="end").cores == [CORES[-1]]
    assert start(end="start").cores == [CORES[0]]


@needs_two_cores
def test_death_frees_a_claim(start: Callable[..., Engine]) -> None:
    start()
    second = start()
    second.kill()
    # Were the dead claim still counted, this would go to another core: the third, or the first once more.
    assert start().cores == [CORES[1]]


def test_claim_is_never_larger_than_the_machine(start: Callable[..., Engine]) -> None:
    assert start(count=len(CORES) + 5).cores == CORES


def test_one_claim_never_counts_a_core_twice(start: Callable[..., Engine], tmp_path: Path) -> None:
    # The first core is claimed twice already and no other is: its free slot comes after two rounds over the others.
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
from deployments.cores import CoreClaim
claims = [CoreClaim(Path(sys.argv[1]), count=1, from_end=False) for _ in range(3 * len(os.sched_getaffinity(0)))]
print(json.dumps([core for claim in claims for core in claim.cores]))
"""
    assert Counter(run_python(script, str(tmp_path))) == dict.fromkeys(CORES, 3)
