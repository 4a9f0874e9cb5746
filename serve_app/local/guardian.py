"""The process that owns a local Ray cluster and ends it when the process that started it has gone.

Run as ``python -m serve_app.local.guardian``. The first line on its standard input is a plan in JSON: the nodes to
start, their environment, and the cluster's folder. The guardian makes itself the subreaper of its descendants, starts
the Ray nodes, prints one line, and waits. Each further line of its input is one more node; it answers each by a line.

The owner is the process at the other end of the guardian's standard input. When this input closes (the owner's normal
end, Ctrl-C, or ``kill -9``), the guardian ends every descendant. The kernel gives orphans to a subreaper as children,
so no descendant can escape, whatever it did to its environment or its parent.
"""

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

# The option of prctl(2), from linux/prctl.h, by which a process becomes a subreaper.
_PR_SET_CHILD_SUBREAPER = 36
# Time from SIGTERM to SIGKILL, seconds.
_GRACE_S = 5.0
# Time from SIGTERM to SIGKILL if only processes of Ray are left, seconds. Ray's GCS and its monitor do not end on
# SIGTERM (within 40 s), and most actors end only after these two.
_RAY_GRACE_S = 1.0


def main() -> None:
    """Entry point."""
    # A Ctrl-C in the terminal goes to the owner, which then closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # so that the ``finally`` below runs
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    plan = json.loads(sys.stdin.readline())
    try:
        if _start_nodes(plan["nodes"], plan):
            for line in sys.stdin:
                _start_nodes([json.loads(line)], plan)
    finally:
        # A second SIGTERM would stop end_descendants half way.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_descendants(_GRACE_S)
        shutil.rmtree(plan["folder"], ignore_errors=True)


def _start_nodes(nodes: list[list[str]], plan: dict[str, Any]) -> bool:
    """Start nodes and print one line; returns whether they started. ``nodes``: arguments of ``ray start`` for each."""
    try:
        for node in nodes:
            _start_node(node, plan["environment"], Path(plan["folder"]) / "ray-start.log")
    except RuntimeError as error:
        print(json.dumps({"ready": False, "error": str(error)}), flush=True)
        return False
    print(json.dumps({"ready": True}), flush=True)
    return True


def _start_node(arguments: list[str], environment: dict[str, str], log: Path) -> None:
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", *arguments]
    with log.open("a") as out:
        code = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env={**os.environ, **environment}, check=False
        ).returncode
    if code:
        tail = " ".join(log.read_text().split()[-60:])
        raise RuntimeError(f"'ray start' failed with exit code {code}: {tail}")


def end_descendants(grace_s: float) -> None:
    """End every descendant of this process: SIGTERM once, SIGKILL after ``grace_s``, until none is left.

    If only processes of Ray are left, they get SIGKILL after ``_RAY_GRACE_S``.
    """
    guardian = psutil.Process()
    started_s = time.monotonic()
    signalled: set[int] = set()
    # A subreaper has no child only when it has no descendant, so none is missed, and none stays a zombie.
    while _has_children():
        commands = dict(_commands(guardian.children(recursive=True)))
        elapsed_s = time.monotonic() - started_s
        is_only_ray_left = all(_ends_with_ray(command) for command in commands.values())
        is_ray_grace_over = is_only_ray_left and elapsed_s > _RAY_GRACE_S
        for child, command in commands.items():
            with suppress(psutil.NoSuchProcess):
                if elapsed_s > grace_s or (is_ray_grace_over and _is_ray(command)):
                    child.kill()
                elif child.pid not in signalled:
                    signalled.add(child.pid)
                    child.terminate()
        time.sleep(0.1)


def _commands(processes: list[psutil.Process]) -> Iterator[tuple[psutil.Process, str]]:
    """Each process that still exists, and its command line."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            yield process, " ".join(process.cmdline())


def _is_ray(command: str) -> bool:
    """Whether a process is a worker of Ray, or runs from Ray's package."""
    return command.startswith("ray::") or "/ray/" in command


def _ends_with_ray(command: str) -> bool:
    """Whether a process ends when Ray does: it belongs to Ray, or is a tracker of shared memory.

    A tracker ends when its parent has ended, so it gets no early SIGKILL.
    """
    return _is_ray(command) or "multiprocessing.resource_tracker" in command


def _has_children() -> bool:
    """Reap the children that have ended; returns whether any child is left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


if __name__ == "__main__":
    main()
