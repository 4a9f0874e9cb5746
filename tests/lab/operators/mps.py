"""A private MPS daemon that lives only as long as it is used."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_CONTROL = "nvidia-cuda-mps-control"
_DRIVER_FOLDERS = "/usr/bin:/usr/local/bin:/usr/local/nvidia/bin:/usr/local/cuda/bin"
_QUIT_S = 15.0


class SharesError(RuntimeError):
    """This way of sharing the SMs does not work on this machine."""


@contextmanager
def mps_daemon() -> Iterator[dict[str, str]]:
    """A private MPS daemon; gives the environment of its clients, and always ends the daemon.

    Raises:
        SharesError: There is no daemon program, or it does not start.
    """
    program = shutil.which(_CONTROL) or shutil.which(_CONTROL, path=_DRIVER_FOLDERS)
    if program is None:
        raise SharesError(f"{_CONTROL} is not on this machine")
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        paths = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for path in paths.values():
            Path(path).mkdir()
        environment = os.environ | paths
        try:
            subprocess.run([program, "-d"], env=environment, check=True, timeout=_QUIT_S, stdin=subprocess.DEVNULL)
        except (OSError, subprocess.SubprocessError) as error:
            raise SharesError(f"{_CONTROL} -d: {error}") from error
        try:
            yield environment
        finally:
            _quit(program, environment)


def _quit(program: str, environment: dict[str, str]) -> None:
    """End the daemon and its server; by force where they do not end by themselves."""
    for order in ("quit\n", "quit -f\n"):
        try:
            subprocess.run([program], env=environment, input=order, text=True, timeout=_QUIT_S, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            print(f"MPS daemon: {order.strip()}: {error}", flush=True)
        else:
            return
