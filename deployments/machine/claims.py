"""Cores and ports of one machine.

A claim is a lock on a file, which a process holds until it ends. An engine claims cores and its NIXL port. Servers of a
cluster get ports without a claim. A process that keeps time gets real-time threads.
"""

import errno
import fcntl
import itertools
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

# Folder of claims, shared by all clusters of one user on a machine, whatever their TMPDIR.
CLAIMS = Path(f"/tmp/tandem-claims-{os.getuid()}")  # noqa: S108
_SLOTS_PER_CORE = 64  # most engines that may share one core; each locks one of the core's slot files
# Ports for NIXL's side channels. They are claimed and not derived from the replica's rank: Serve reuses ranks while
# ports are still bound, and a second application has the same ranks. With a bound port vLLM hangs instead of failing.
FIRST_PORT = 20000
_LAST_PORT = 27999
EVERY_ADDRESS = ("0.0.0.0", "::")  # noqa: S104
# Ports for servers. Outgoing connections have other ports (32768 and up), so they take none before its server starts.
# Ray's workers (10002..19999) and Serve's direct ingress (30000..31000) have other ports too.
_FREE_PORTS = range(28000, 30000)
# In random order, so that processes that start clusters at one time rarely choose the same ports. A process goes on
# where its last call ended: a server binds its port seconds later, and until then that port looks free. Otherwise one
# port could be given to the endpoint and to HAProxy's statistics page, and HAProxy would not start.
_next_ports = itertools.cycle(random.sample(_FREE_PORTS, len(_FREE_PORTS)))


def own_folder(folder: Path) -> Path:
    """Make the folder of claims, for this user alone. Raises PermissionError: it is another user's, or a link."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a link"
        raise PermissionError(
            f"{folder} is {kind} of user {status.st_uid}, and this is user {os.getuid()}: have it removed; "
            "claims need a folder of this user"
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
    """Cores claimed by this process until it ends, each by an exclusive lock on one of the core's slot files."""

    def __init__(self, folder: Path, *, count: int, from_end: bool) -> None:
        """Claim the ``count`` least claimed of this process's allowed cores, or all cores if there are fewer.

        All replicas of a machine share ``folder``. ``from_end``: among equally claimed cores take those with the
        highest numbers (decode), otherwise those with the lowest (prefill).
        """
        own_folder(folder)
        cores = sorted(os.sched_getaffinity(0), reverse=from_end)
        self._locks: dict[int, IO[str]] = {}  # by core
        # Slot 0 of every core comes before slot 1 of any, so the least claimed cores are found first.
        for slot, core in itertools.product(range(_SLOTS_PER_CORE), cores):
            if len(self._locks) == min(count, len(cores)):
                break
            lock = None if core in self._locks else try_lock(folder / f"core-{core}.{slot}")
            if lock is not None:
                self._locks[core] = lock
        self.cores = sorted(self._locks)


def run_at_once(pid: int, *, is_on: bool = True) -> None:
    """Give all threads of a process the real-time class SCHED_RR, or the usual class again; new threads inherit it.

    For processes that keep time on a busy machine. While eight replicas imported on two cores, threads of the usual
    class waited for up to ten seconds, whatever their niceness; a real-time thread never waited (DECISIONS 42).

    Raises PermissionError: this user may not.
    """
    policy, priority = (os.SCHED_RR, 1) if is_on else (os.SCHED_OTHER, 0)
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError):  # the thread has ended
            os.sched_setscheduler(int(thread.name), policy, os.sched_param(priority))


class PortClaim:
    """A NIXL side-channel port claimed by this process until it ends, by a lock: the engine binds it seconds later."""

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
    """Ports that are free on every address, for servers that start soon; a process gets none twice before all others.

    Raises OSError: fewer are free.
    """
    ports: list[int] = []
    for port in itertools.islice(_next_ports, len(_FREE_PORTS)):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe, suppress(OSError):
            probe.bind(("", port))
            ports.append(port)
        if len(ports) == count:
            return ports
    raise OSError(f"{len(ports)} ports are free in {_FREE_PORTS[0]}..{_FREE_PORTS[-1]}, {count} are needed")


def is_free(host: str, port: int) -> bool:
    """Whether an engine can bind a port; if not, the log names the process that has it.

    Raises OSError: ``host`` is no address of this machine.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise OSError(f"no NIXL side channel on {host}: {error.strerror}; is it this node's?") from None
            # A warning and no error, since the engine takes the next port; the process may be an engine without owner.
            holder = listener(host, port)
            logger.warning("NIXL port %d is held by %s: taking the next; end it if it is a leftover", port, holder)
            return False
    return True


def listener(host: str, port: int) -> str | None:
    """Id and command of the process that listens on a port; ``None``: none is visible.

    A process on ``host`` or on every address comes before one on another address.
    """
    # (whether the process is on another address, its id); the smallest is taken, and False is less than True.
    listeners = [
        (connection.laddr.ip not in (host, *EVERY_ADDRESS), connection.pid)
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
        and connection.laddr
        and connection.laddr.port == port
        and connection.pid
    ]
    if not listeners:
        return None
    _, pid = min(listeners)
    try:
        command = " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        command = "?"
    return f"process {pid} ({' '.join(command.split())[:80]})"  # arguments may hold line breaks
