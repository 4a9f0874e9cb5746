"""What the replicas of one pool hold, as they report it, and the changes that each router still has to get (pure).

A replica reports its pieces once as a whole, and then changes with numbers in a row. If a report is missing, it is
asked for all of its pieces again. A router that has missed changes gets the whole state of the pool.
"""

from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

# Keys in the changes of a pool that are kept for routers, 8 bytes each. At 100,000 prompt tokens per second and 128
# tokens in a piece they are the changes of some minutes; a router that is that late gets the whole state.
_MOST_CHANGE_KEYS = 200_000
# Time without a report, seconds, after which a replica is taken as gone. A replica reports at least every 5 s.
SILENCE_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldReport:
    """What a replica holds, or how it has changed; keys are packed (``packed``), since they cross processes."""

    replica_id: str
    number: int = 0  # reports of the replica before this one; the board's own changes have 0
    is_whole: bool = False  # whether ``stored`` is all that the replica holds
    capacity_pieces: int = 0  # the engine's KV, in pieces
    stored: bytes = b""
    removed: bytes = b""
    coming: bytes = b""  # pieces that the engine is about to compute


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolNews:
    """What a router has to apply, in this order."""

    version: int
    reports: tuple[HeldReport, ...]


def packed(keys: Iterable[int]) -> bytes:
    """Keys as 8 bytes each."""
    return array("Q", keys).tobytes()


def unpacked(content: bytes) -> list[int]:
    """The keys in ``packed``."""
    return array("Q", content).tolist()


@dataclass(slots=True)
class _Replica:
    number: int  # of its last report
    capacity_pieces: int
    reported_s: float  # time of its last report
    keys: set[int]


class PoolPrefixes:
    """The pieces that each replica of a pool holds, and the latest changes."""

    def __init__(self, first_version: int) -> None:
        """``first_version``: above the versions of boards before this one, so that none is taken for another."""
        self.version = first_version  # one more for each change
        self._replicas: dict[str, _Replica] = {}
        self._changes: deque[HeldReport] = deque()  # the latest changes; the last one led to ``version``
        self._change_keys = 0  # number of keys in them

    def report(self, report: HeldReport, now_s: float) -> bool:
        """Take a replica's report. ``False``: reports before it are missing, so the replica must report the whole."""
        replica = self._replicas.get(report.replica_id)
        if report.is_whole:
            replica = self._replicas[report.replica_id] = _Replica(report.number, report.capacity_pieces, now_s, set())
        elif replica is None or report.number != replica.number + 1:
            return False
        replica.number, replica.reported_s = report.number, now_s
        replica.keys.difference_update(unpacked(report.removed))
        replica.keys.update(unpacked(report.stored))
        if report.is_whole or report.stored or report.removed or report.coming:
            self._note(report)
        return True

    def drop_silent(self, now_s: float) -> None:
        """Forget the replicas that have reported nothing for ``SILENCE_S``."""
        silent = [name for name, one in self._replicas.items() if now_s - one.reported_s > SILENCE_S]
        for name in silent:
            del self._replicas[name]
            self._note(HeldReport(replica_id=name, is_whole=True))

    def since(self, version: int) -> PoolNews:
        """The changes after a version; the whole state, if they are not kept any more or the version is unknown."""
        missing = self.version - version
        if 0 <= missing <= len(self._changes):
            changes = tuple(self._changes)[len(self._changes) - missing :]
            return PoolNews(version=self.version, reports=changes)
        whole = [
            HeldReport(replica_id=name, is_whole=True, capacity_pieces=one.capacity_pieces, stored=packed(one.keys))
            for name, one in self._replicas.items()
        ]
        return PoolNews(version=self.version, reports=tuple(whole))

    def _note(self, report: HeldReport) -> None:
        self.version += 1
        self._changes.append(report)
        self._change_keys += _size(report)
        while self._change_keys > _MOST_CHANGE_KEYS:
            self._change_keys -= _size(self._changes.popleft())


def _size(report: HeldReport) -> int:
    return (len(report.stored) + len(report.removed) + len(report.coming)) // 8 + 1  # a report itself takes memory too
