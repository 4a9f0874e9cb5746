"""TCP connections of other processes, which this process breaks as a network would (Linux 5.6 and up)."""

import ctypes
import os
import socket
import struct
from dataclasses import dataclass
from typing import Any

import psutil

# Number of the system call pidfd_getfd, the same on every architecture.
_PIDFD_GETFD = 438
# Linux's SO_ATTACH_FILTER, which Python's socket lacks.
_SO_ATTACH_FILTER = 26
# A classic BPF program: keep 0 bytes of every packet.
_DROP_ALL = struct.pack("HBBI", 6, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Connection:
    """One end of an established connection."""

    pid: int
    fd: int

    def duplicate(self) -> socket.socket:
        """A copy of the socket for this process.

        Raises:
            OSError: this process may not copy it, or it is closed.
        """
        pidfd = os.pidfd_open(self.pid)
        try:
            fd = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, pidfd, self.fd, 0)
            if fd < 0:
                error = ctypes.get_errno()
                raise OSError(error, f"cannot copy a socket of process {self.pid}: {os.strerror(error)}")
            return socket.socket(fileno=fd)
        finally:
            os.close(pidfd)


def connections(one: psutil.Process, other: psutil.Process) -> list[Connection]:
    """The connections between two processes, by the end of the first one."""
    theirs = {(link.raddr, link.laddr) for link in _established(other)}
    return [Connection(one.pid, own.fd) for own in _established(one) if (own.laddr, own.raddr) in theirs]


def cut(link: Connection) -> None:
    """Close a connection in both directions."""
    with link.duplicate() as copy:
        copy.shutdown(socket.SHUT_RDWR)


def silence(link: Connection) -> None:
    """Drop all that this end receives, acknowledgements too, as a firewall that has lost its state does."""
    code = ctypes.create_string_buffer(_DROP_ALL)
    with link.duplicate() as copy:
        copy.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(code)))


def _established(process: psutil.Process) -> list[Any]:
    return [one for one in process.net_connections("tcp") if one.status == psutil.CONN_ESTABLISHED]
