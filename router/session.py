"""The replica of a session: the same in every router, without anything that routers share (pure).

Rendezvous hashing: each pair of a session and a replica has a weight, and the replica with the highest weight has the
session. A replica that leaves moves only its own sessions, and a new one takes its share from all others. Source:
Thaler and Ravishankar, "Using Name-Based Mappings to Increase Hit Rates", IEEE/ACM Transactions on Networking 6(1),
1998.
"""

from collections.abc import Collection, Iterable
from hashlib import blake2b

_BITS = 64
# Odd multiplier of Knuth's multiplicative hash: 2**64 divided by the golden ratio.
_MULTIPLIER = 0x9E3779B97F4A7C15


class SessionPlaces:
    """Finds the replica of each session among some replicas."""

    def __init__(self) -> None:
        self._hashes: dict[str, int] = {}

    def set_replicas(self, replica_ids: Collection[str]) -> None:
        """Set the replicas among which sessions may be asked for."""
        self._hashes = {name: _hash(name) for name in replica_ids}

    def replica_of(self, session: str, replica_ids: Iterable[str]) -> str:
        """The replica of a session among some of the replicas.

        Raises:
            ValueError: there are none.
            KeyError: one was not set.
        """
        hashes, session_hash, mask = self._hashes, _hash(session), 2**_BITS - 1
        return max([((hashes[name] ^ session_hash) * _MULTIPLIER & mask, name) for name in replica_ids])[1]


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_BITS // 8).digest())
