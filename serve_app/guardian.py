"""The process that owns a local Ray cluster and outlives whoever asked for it, just long enough to end it.

Run as ``python -m serve_app.guardian`` with a JSON plan as its first line on standard input. It makes itself the
subreaper of everything below it, starts the Ray nodes, prints one line, and waits; each further line of its input is
one more node, answered by a line. When its standard input closes (a
normal end, Ctrl-C, or ``kill -9`` of the process that holds the other end) it ends every descendant: the kernel
reparents orphans to a subreaper, so nothing can slip away, whatever it did to its environment or its parent.
"""

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

_PR_SET_CHILD_SUBREAPER = 36
_GRACE_S = 5.0


def main() -> None:
    """Entry point."""
    # A Ctrl-C in the terminal goes to the owner, who then closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    plan = json.loads(sys.stdin.readline())
    try:
        if _start_nodes(plan["nodes"], plan):
            for line in sys.stdin:
                _start_nodes([json.loads(line)], plan)
    finally:
        # The handler would leave end_descendants half way.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_descendants(_GRACE_S)
        shutil.rmtree(plan["folder"], ignore_errors=True)


def _start_nodes(nodes: list[list[str]], plan: dict[str, Any]) -> bool:
    """Start them and print a line; whether they have."""
    try:
        for node in nodes:
            _start_node(node, plan["environment"], Path(plan["folder"]))
    except RuntimeError as error:
        print(json.dumps({"ready": False, "error": str(error)}), flush=True)
        return False
    print(json.dumps({"ready": True}), flush=True)
    return True


def _start_node(arguments: list[str], environment: dict[str, str], folder: Path) -> None:
    log = folder / "ray-start.log"
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", *arguments]
    with log.open("a") as out:
        code = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env={**os.environ, **environment}, check=False
        ).returncode
    if code:
        tail = " ".join(log.read_text().split()[-60:])
        raise RuntimeError(f"'ray start' failed with exit code {code}: {tail}")


def end_descendants(grace_s: float) -> None:
    """End every descendant of this process: SIGTERM, then SIGKILL to what is left, until there is none."""
    me = psutil.Process()
    deadline = time.monotonic() + grace_s
    signalled: set[int] = set()
    # A subreaper has no child left only when it has no descendant left, so none can be missed, or stay as a zombie.
    while _has_children():
        for child in me.children(recursive=True):
            try:
                if time.monotonic() > deadline:
                    child.kill()
                elif child.pid not in signalled:
                    signalled.add(child.pid)
                    child.terminate()
            except psutil.NoSuchProcess:
                pass
        time.sleep(0.1)


def _has_children() -> bool:
    """Collect the children that have ended; whether any is left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def guardian_plan(folder: Path, nodes: list[list[str]], environment: dict[str, str]) -> dict[str, Any]:
    """The first line that ``main`` reads."""
    return {"folder": str(folder), "nodes": nodes, "environment": environment}


if __name__ == "__main__":
    main()
