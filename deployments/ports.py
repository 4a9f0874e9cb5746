"""Free ports for engines, and who holds a port that is not free."""

import errno
import logging
import socket

import psutil

logger = logging.getLogger(__name__)

# Serve compacts replica ranks while the ports stay bound, and two applications on a node use the same bases, so a
# port derived from a rank can be taken; vLLM then hangs instead of failing (its listener dies before it reports).
_FIRST_PORT = 20000
_LAST_PORT = 27999


def free_side_channel_port(host: str, *, start: int) -> int:
    """The first port from ``start`` on, wrapping round 20000..27999, that can be bound on ``host``.

    Raises:
        OSError: every port of the range is taken, or ``host`` is no address of this machine.
    """
    span = _LAST_PORT - _FIRST_PORT + 1
    for offset in range(span):
        port = _FIRST_PORT + (start - _FIRST_PORT + offset) % span
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise OSError(f"no NIXL side channel on {host}: {error.strerror}; is it this node's?") from None
                logger.warning("NIXL side-channel port %d is held by %s: trying the next", port, listener(port))
                continue
            return port
    raise OSError(f"no free NIXL side-channel port on {host} in {_FIRST_PORT}..{_LAST_PORT}: end what holds them")


def listener(port: int) -> str | None:
    """The process that listens on a TCP port of this machine, in words; ``None`` where nobody can tell."""
    for connection in psutil.net_connections("tcp"):
        if (
            connection.laddr
            and connection.laddr.port == port
            and connection.status == psutil.CONN_LISTEN
            and connection.pid
        ):
            try:
                command = " ".join(psutil.Process(connection.pid).cmdline())
            except psutil.Error:
                command = "?"
            return f"process {connection.pid} ({' '.join(command.split())[:80]})"  # arguments may hold line breaks
    return None
