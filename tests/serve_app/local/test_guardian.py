"""The guardian, the process that ends all processes of a local cluster; with real process trees."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

# argv: a folder for pid files. The parent ends on SIGTERM; its grandchild, forked twice into a session of its own
# so that only the kernel knows its ancestor, never ends.
STUBBORN_TREE = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, lambda *_: (folder / "asked").touch())
        (folder / "grandchild.new").write_text(str(os.getpid()))
        (folder / "grandchild.new").rename(folder / "grandchild.pid")
        while True:
            time.sleep(60)
    os._exit(0)
os.wait()
(folder / "child.new").write_text(str(os.getpid()))
(folder / "child.new").rename(folder / "child.pid")
time.sleep(600)
"""

# Becomes a subreaper, starts the tree, says so, and ends all of it.
END_TREE = """
import ctypes, json, pathlib, subprocess, sys, time
import psutil
from serve_app.local.guardian import _PR_SET_CHILD_SUBREAPER, end_descendants
folder, tree = pathlib.Path(sys.argv[1]), sys.argv[2]
ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
child = subprocess.Popen([sys.executable, "-c", tree, str(folder)])
while not ((folder / "child.pid").exists() and (folder / "grandchild.pid").exists()):
    time.sleep(0.01)
before = [process.pid for process in psutil.Process().children(recursive=True)]
end_descendants(0.3)
left = [process for process in psutil.Process().children(recursive=True) if process.status() != psutil.STATUS_ZOMBIE]
print(json.dumps({"before": before, "after": [process.pid for process in left]}))
"""

# The guardian's own main, with the tree in the place of Ray's nodes and a short patience.
GUARD_TREE = """
import ctypes, pathlib, subprocess, sys, time
from serve_app.local import guardian
folder, tree = pathlib.Path(sys.argv[1]), sys.argv[2]
def start(arguments, environment, _):
    subprocess.Popen([sys.executable, "-c", tree, str(folder)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while not ((folder / "child.pid").exists() and (folder / "grandchild.pid").exists()):
        time.sleep(0.01)
guardian._start_node = start
guardian._GRACE_S = float(sys.argv[3])
guardian.main()
"""

# An owner that holds the other end of a guardian's pipe and does nothing else.
OWNER = """
import subprocess, sys, time
guardian = subprocess.Popen([sys.executable, "-c", *sys.argv[2:]], stdin=subprocess.PIPE)
guardian.stdin.write(sys.argv[1].encode() + b"\\n")
guardian.stdin.flush()
time.sleep(600)
"""


@pytest.fixture
def pids(tmp_path: Path) -> Iterator[Path]:
    """The folder of pid files; at the end, processes that still run are killed."""
    folder = tmp_path / "pids"
    folder.mkdir()
    yield folder
    for pid in tree_pids(folder):
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def plan(tmp_path: Path) -> dict[str, object]:
    folder = tmp_path / "cluster"
    folder.mkdir()
    return {"folder": str(folder), "nodes": [["--head"]], "environment": {}}


def tree_pids(folder: Path) -> list[int]:
    """Child and grandchild of a tree that has started."""
    return [int(path.read_text()) for path in sorted(folder.glob("*.pid"))]


def is_running(pid: int) -> bool:
    """Whether a process lives; one that is dead and not yet reaped by init does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    """Poll until a condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def start_guardian(root: Path, pids: Path, plan: dict[str, object], grace_s: float) -> "subprocess.Popen[str]":
    """A guardian that has started its tree."""
    guardian = subprocess.Popen(
        [sys.executable, "-c", GUARD_TREE, str(pids), STUBBORN_TREE, str(grace_s)],
        cwd=root,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert guardian.stdin is not None
    assert guardian.stdout is not None
    guardian.stdin.write(json.dumps(plan) + "\n")
    guardian.stdin.flush()
    assert json.loads(guardian.stdout.readline()) == {"ready": True}
    return guardian


def test_no_process_is_left_of_a_tree_that_hides_and_ignores_sigterm(root: Path, pids: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", END_TREE, str(pids), STUBBORN_TREE], cwd=root, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    child, grandchild = tree_pids(pids)
    assert set(seen["before"]) == {child, grandchild}
    assert seen["after"] == []
    assert not is_running(child)
    assert not is_running(grandchild)
    assert (pids / "asked").exists(), "killed without having been asked to end"


def test_closed_pipe_ends_the_tree_and_removes_the_folder(root: Path, pids: Path, plan: dict[str, object]) -> None:
    guardian = start_guardian(root, pids, plan, 0.3)
    assert all(is_running(pid) for pid in tree_pids(pids))
    guardian.communicate(timeout=120)
    assert guardian.returncode == 0
    assert not any(is_running(pid) for pid in tree_pids(pids))
    assert not Path(str(plan["folder"])).exists()


def test_sigterm_ends_the_tree_and_a_second_one_does_not_stop_that(
    root: Path, pids: Path, plan: dict[str, object]
) -> None:
    guardian = start_guardian(root, pids, plan, 1.0)
    guardian.send_signal(signal.SIGTERM)
    wait_until((pids / "asked").exists)
    guardian.send_signal(signal.SIGTERM)
    guardian.communicate(timeout=120)
    assert guardian.returncode == 0
    assert not any(is_running(pid) for pid in tree_pids(pids))
    assert not Path(str(plan["folder"])).exists()


def test_the_guardian_ignores_ctrl_c_and_leaves_it_to_the_owner(
    root: Path, pids: Path, plan: dict[str, object]
) -> None:
    guardian = start_guardian(root, pids, plan, 0.1)
    guardian.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        guardian.wait(0.3)
    guardian.communicate(timeout=120)
    assert guardian.returncode == 0


def test_a_killed_owner_ends_the_tree(root: Path, pids: Path, plan: dict[str, object]) -> None:
    arguments = [GUARD_TREE, str(pids), STUBBORN_TREE, "0.3"]
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, json.dumps(plan), *arguments], cwd=root, stdout=subprocess.PIPE
    )
    assert owner.stdout is not None
    assert json.loads(owner.stdout.readline()) == {"ready": True}
    owner.kill()
    owner.communicate(timeout=120)
    wait_until(lambda: not any(is_running(pid) for pid in tree_pids(pids)))
    wait_until(lambda: not Path(str(plan["folder"])).exists())


def test_a_node_that_does_not_start_is_reported_and_no_process_stays(
    root: Path, pids: Path, plan: dict[str, object]
) -> None:
    # `ray start` itself must not run here: a module that cannot be found fails in its place, with an exit code of 1.
    script = "import sys; from serve_app.local import guardian; sys.executable = '/bin/false'; guardian.main()"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=root,
        input=json.dumps(plan) + "\n",
        capture_output=True,
        text=True,
        timeout=300,
    )
    answer = json.loads(done.stdout)
    assert answer["ready"] is False
    assert "'ray start' failed with exit code 1" in answer["error"]
    assert not Path(str(plan["folder"])).exists()
