"""Cores and ports of one machine: claims by locks that end with their process, free ports, and real-time threads."""

import errno
import fcntl
import logging
import os
import random
import socket
import stat
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

import psutil

logger = logging.getLogger(__name__)

# Shared by every cluster of one user on a machine, whatever its TMPDIR.
CLAIMS = Path(f"/tmp/tandem-claims-{os.getuid()}")  # noqa: S108
_SLOTS_PER_CORE = 64  # engines that may share one core
# Serve compacts replica ranks while the ports stay bound, and two applications on a node use the same bases, so a
# port derived from a rank can be taken; vLLM then hangs instead of failing (its listener dies before it reports).
FIRST_PORT = 20000
_LAST_PORT = 27999
EVERY_ADDRESS = ("0.0.0.0", "::")  # noqa: S104
# Ports below those of outgoing connections (32768 and up), which could take a port before its server is up, and apart
# from those of Ray's workers (10002..19999) and Serve's direct ingress (30000..31000).
_FREE_PORTS = range(28000, 30000)


def own_folder(folder: Path) -> Path:
    """Make the folder of claims, open to this user alone. Raises PermissionError: it is another user's, or a link."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a link"
        raise PermissionError(
            f"{folder} is {kind} of user {status.st_uid}, and this is user {os.getuid()}: have it removed; "
            "claims are kept in a folder of one's own"
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        folder.chmod(0o700)
    return folder


def try_lock(path: Path) -> IO[str] | None:
    """The file, locked until it is closed or the process ends; ``None``: another process holds the lock."""
    handle = path.open("a")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        return None
    return handle


class CoreClaim:
    """Cores held by this process until it ends: an exclusive lock on one slot file per core, so no death leaks one."""

    def __init__(self, folder: Path, *, count: int, from_end: bool) -> None:
        """Claim ``count`` of this process's allowed cores, or all of them if there are fewer.

        ``folder`` is shared by all replicas of a cluster. ``from_end``: among equally claimed cores, prefer high core
        numbers (decode) to low ones (prefill).
        """
        own_folder(folder)
        self._slots: list[IO[str]] = []
        cores = sorted(os.sched_getaffinity(0), reverse=from_end)
        count = min(count, len(cores))
        chosen: list[int] = []
        for slot in range(_SLOTS_PER_CORE):
            for core in cores:
                if len(chosen) == count:
                    break
                lock = None if core in chosen else try_lock(folder / f"core-{core}.{slot}")
                if lock is not None:
                    self._slots.append(lock)
                    chosen.append(core)
        self.cores = sorted(chosen)


def run_at_once(pid: int, *, is_on: bool = True) -> None:
    """Let all threads of a process, and what they start, run before others (SCHED_RR), or as usual again.

    For what keeps time on a machine that is busy: threads of the usual class waited for up to ten seconds while eight
    replicas imported on two cores, whatever their niceness, and one of this class never did (DECISIONS 42).

    Raises PermissionError: this user may not.
    """
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError):
            policy, priority = (os.SCHED_RR, 1) if is_on else (os.SCHED_OTHER, 0)
            os.sched_setscheduler(int(thread.name), policy, os.sched_param(priority))


class PortClaim:
    """A NIXL side-channel port held by this process until it ends: a lock, as the engine binds it seconds later."""

    def __init__(self, folder: Path, host: str) -> None:
        """Claim a port that no other engine claims and ``host`` can bind. Raises OSError: there is none."""
        own_folder(folder)
        for port in range(FIRST_PORT, _LAST_PORT + 1):
            lock = try_lock(folder / f"port-{port}")
            if lock is None:
                continue
            with ExitStack() as undo:
                undo.callback(lock.close)
                if is_free(host, port):
                    undo.pop_all()
                    self.port, self._lock = port, lock
                    return
        raise OSError(f"no free NIXL side-channel port on {host} in {FIRST_PORT}..{_LAST_PORT}: end what holds them")


def free_ports(count: int) -> list[int]:
    """Ports that no program holds now on any address, for servers that start soon. Raises OSError: fewer are free."""
    ports: list[int] = []
    for port in random.sample(_FREE_PORTS, len(_FREE_PORTS)):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe, suppress(OSError):
            probe.bind(("", port))
            ports.append(port)
        if len(ports) == count:
            return ports
    raise OSError(f"{len(ports)} ports are free in {_FREE_PORTS[0]}..{_FREE_PORTS[-1]}, {count} are needed")


def is_free(host: str, port: int) -> bool:
    """Whether an engine can bind a port; the log names its holder. Raises OSError: ``host`` is not this machine's."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise OSError(f"no NIXL side channel on {host}: {error.strerror}; is it this node's?") from None
            # The engine takes the next one, so this is no error; but it may be an engine that was left behind.
            holder = listener(host, port)
            logger.warning("NIXL port %d is held by %s: taking the next; end it if it is a leftover", port, holder)
            return False
    return True


def listener(host: str, port: int) -> str | None:
    """The process that listens on a port, in words, first the one on ``host``; ``None``: none is visible."""
    listeners = [
        (connection.laddr.ip, connection.pid)
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
        and connection.laddr
        and connection.laddr.port == port
        and connection.pid
    ]
    if not listeners:
        return None
    _, pid = min(listeners, key=lambda one: one[0] not in (host, *EVERY_ADDRESS))
    try:
        command = " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        command = "?"
    return f"process {pid} ({' '.join(command.split())[:80]})"  # arguments may hold line breaks
