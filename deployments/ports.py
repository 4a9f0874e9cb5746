"""Free ports, and who holds one that is not free."""

import errno
import logging
import random
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil

from deployments.locks import own_folder, try_lock

logger = logging.getLogger(__name__)

# Serve compacts replica ranks while the ports stay bound, and two applications on a node use the same bases, so a
# port derived from a rank can be taken; vLLM then hangs instead of failing (its listener dies before it reports).
FIRST_PORT = 20000
_LAST_PORT = 27999
EVERY_ADDRESS = ("0.0.0.0", "::")  # noqa: S104
# Below what the kernel gives to outgoing connections (32768 and up), one of which would take a port before its server
# is up, and beside what Ray's workers (10002..19999) and Serve's direct ingress (30000..31000) use.
_FREE_PORTS = range(28000, 30000)


class PortClaim:
    """A NIXL side-channel port held by this process until it ends: a lock, as the engine binds it seconds later."""

    def __init__(self, folder: Path, host: str) -> None:
        """Claim the first port of 20000..27999 that no other engine of this machine claims and that can be bound.

        Args:
            folder: where the lock files of this machine's engines live.
            host: the address that the engine will bind.

        Raises:
            OSError: every port is taken, or ``host`` is no address of this machine.
        """
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
    """Ports that nothing holds on any address now, for servers that start within seconds.

    Raises:
        OSError: fewer are free.
    """
    found: list[int] = []
    for port in random.sample(_FREE_PORTS, len(_FREE_PORTS)):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe, suppress(OSError):
            probe.bind(("", port))
            found.append(port)
        if len(found) == count:
            return found
    raise OSError(f"{len(found)} ports are free in {_FREE_PORTS[0]}..{_FREE_PORTS[-1]}, {count} are needed")


def is_free(host: str, port: int) -> bool:
    """Whether an engine can bind a NIXL side-channel port; the log says who holds one that is not free.

    Raises:
        OSError: ``host`` is no address of this machine.
    """
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
    """The process that listens on a TCP port of this machine, in words; ``None`` where nobody can tell.

    Several may, each on an address of its own: the one on ``host`` or on every address comes first.
    """
    found = [
        (connection.laddr.ip, connection.pid)
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
        and connection.laddr
        and connection.laddr.port == port
        and connection.pid
    ]
    if not found:
        return None
    _, pid = min(found, key=lambda one: one[0] not in (host, *EVERY_ADDRESS))
    try:
        command = " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        command = "?"
    return f"process {pid} ({' '.join(command.split())[:80]})"  # arguments may hold line breaks
