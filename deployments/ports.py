"""A free NIXL side-channel port for the engine of this replica."""

import socket

# Serve compacts replica ranks while the ports stay bound, and two applications on a node use the same bases, so a
# port derived from a rank can be taken; vLLM then hangs instead of failing (its listener dies before it reports).
_FIRST_PORT = 20000
_LAST_PORT = 27999


def free_side_channel_port(host: str, *, start: int) -> int:
    """The first port from ``start`` on, wrapping round 20000..27999, that can be bound on ``host``.

    Raises:
        OSError: every port of the range is taken.
    """
    span = _LAST_PORT - _FIRST_PORT + 1
    for offset in range(span):
        port = _FIRST_PORT + (start - _FIRST_PORT + offset) % span
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise OSError(f"no free NIXL side-channel port on {host} in {_FIRST_PORT}..{_LAST_PORT}: end what holds them")
