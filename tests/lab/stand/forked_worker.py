"""Workers of Ray that are forked from a process which has imported vLLM, so that a start needs no import of it.

An import of vLLM takes 12 s of CPU time, and a test application of emulated engines has three or more processes that
need it. With ``forked``, Ray runs this file instead of Python for each worker of an application. The first worker in a
cluster starts a server, which imports vLLM. Every worker is a fork of this server, with the environment, the folder and
the output that Ray gave it. The server does not import Ray, which reads the environment when it is imported.

Only tests of emulated engines use it. A fork has none of the threads that a library started, and real engines compute
with such threads.
"""

import fcntl
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

_PRELOADED = (
    "vllm.entrypoints.openai.chat_completion.protocol",
    "vllm.entrypoints.openai.completion.protocol",
    "vllm.sampling_params",
)


def forked(document: dict[str, Any]) -> dict[str, Any]:
    """The Serve YAML with forked workers for its application."""
    command = f"{sys.executable} -S -E {__file__}"
    for application in document["applications"]:
        application.setdefault("runtime_env", {})["py_executable"] = command
    return document


def _main(arguments: list[str]) -> None:
    """Run a Python program in a fork of the server, and wait for its end."""
    # Each cluster has a server of its own, because the guardian of a cluster ends all of its processes.
    folder = next(each.partition("=")[2] for each in arguments if each.startswith("--temp-dir="))
    path = Path(folder) / "forks"
    connection = _connection(path)
    message = json.dumps({"arguments": arguments, "environment": dict(os.environ), "folder": str(Path.cwd())})
    socket.send_fds(connection, [b"."], [0, 1, 2])  # files go with at least one byte
    connection.sendall(message.encode() + b"\n")
    connection.recv(1)  # closed by the kernel when the fork has ended


def _connection(path: Path) -> socket.socket:
    """A connection to the server, which is started if there is none."""
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        connection = socket.socket(socket.AF_UNIX)
        with suppress(OSError):
            connection.connect(str(path))
            return connection
        path.unlink(missing_ok=True)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        with path.with_suffix(".log").open("a") as log:
            server = subprocess.Popen(
                [sys.executable, __file__, str(path)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        while server.poll() is None:
            with suppress(OSError):
                connection.connect(str(path))
                return connection
            time.sleep(0.02)
        raise RuntimeError(f"the server ended with code {server.returncode}: read {log.name}")


def _serve(path: str) -> None:
    """Import vLLM, then fork a process for each connection, until the guardian of the cluster ends this process."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the forks
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen(64)
        for module in _PRELOADED:
            __import__(module)
        while True:
            connection, _ = listening.accept()
            if os.fork() == 0:
                listening.close()
                _become(connection)
            connection.close()


def _become(connection: socket.socket) -> None:
    """Run the program that the message names, in this process."""
    os.setsid()  # Ray kills the process group of a worker that ends
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, files, _, _ = socket.recv_fds(connection, 1, 3)
    wanted = json.loads(connection.makefile("rb").readline())  # ends with an error if the message is not whole
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(wanted["folder"])
    os.environ.clear()
    os.environ.update(wanted["environment"])
    sys.argv = wanted["arguments"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    sys.path[1:1] = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit()


if __name__ == "__main__":
    _serve(sys.argv[1]) if len(sys.argv) == 2 else _main(sys.argv[1:])
