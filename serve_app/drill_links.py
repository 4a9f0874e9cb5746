"""TCP connections of other processes, found and broken from outside as a network would (Linux 5.6 and up)."""

import ctypes
import os
import socket
import struct
from dataclasses import dataclass
from typing import Any

import psutil

_PIDFD_GETFD = 438  # of every architecture
_SO_ATTACH_FILTER = 26
_DROP_ALL = struct.pack("HBBI", 6, 0, 0, 0)  # classic BPF: return 0 bytes of any packet


@dataclass(frozen=True, slots=True)
class Connection:
    """One end of an established connection."""

    pid: int
    fd: int

    def taken(self) -> socket.socket:
        """The socket itself, in this process too.

        Raises:
            OSError: this process may not take it, or it has gone.
        """
        pidfd = os.pidfd_open(self.pid)
        try:
            fd = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, pidfd, self.fd, 0)
            if fd < 0:
                error = ctypes.get_errno()
                raise OSError(error, f"cannot take a socket of process {self.pid}: {os.strerror(error)}")
            return socket.socket(fileno=fd)
        finally:
            os.close(pidfd)


def connections(one: psutil.Process, other: psutil.Process) -> list[Connection]:
    """Those between two processes, by the end that ``one`` holds."""
    theirs = {(known.raddr, known.laddr) for known in _established(other)}
    return [Connection(one.pid, own.fd) for own in _established(one) if (own.laddr, own.raddr) in theirs]


def cut(link: Connection) -> None:
    """Close it both ways."""
    with link.taken() as taken:
        taken.shutdown(socket.SHUT_RDWR)


def silence(link: Connection) -> None:
    """Have this end hear nothing any more, acknowledgements included, as behind a firewall that has lost its state."""
    code = ctypes.create_string_buffer(_DROP_ALL)
    with link.taken() as taken:
        taken.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(code)))


def _established(process: psutil.Process) -> list[Any]:
    return [one for one in process.net_connections("tcp") if one.status == psutil.CONN_ESTABLISHED]
