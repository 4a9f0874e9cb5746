"""A caller's side of the health board: what it tells of the replicas of one pool, and whom it must not send to."""

import asyncio
import logging
import uuid
from typing import Any

import ray

from router.outliers import OutlierConfig, UsualPace
from router.ray_actors import find_actor

logger = logging.getLogger(__name__)

_RETRY_S = 1.0
_MOST_NEWS = 1000


def board_key(app: str) -> bytes:
    """Where in Ray's key-value store the name of an application's health board is: Serve chooses its actors' names."""
    return f"tandem:health:{app}".encode()


class HealthFeed:
    """Tells the board, and keeps what it says, until the process ends."""

    def __init__(self, app: str, pool: str, config: OutlierConfig) -> None:
        self._key = board_key(app)
        self.pool = pool
        self._caller = uuid.uuid4().hex
        self._usual = UsualPace(config)
        self._ejected: frozenset[str] = frozenset()
        self._suspects: frozenset[str] = frozenset()
        self._probes: set[str] = set()
        self._seen: list[tuple[str, bool]] = []
        self._told: set[str] = set()  # who failed here of late; the board may not have said so yet
        self._has_news = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to listen and to tell, on the running event loop."""
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._tell())]

    def guide(self) -> tuple[frozenset[str], str | None]:
        """Whom the next request must not go to, and whom it probes, where that is this caller's turn."""
        if not self._probes:
            return self._ejected, None
        probe = self._probes.pop()
        return self._ejected - {probe}, probe

    def failed(self, replica_id: str | None) -> None:
        """A request has failed there; ``None``: nobody knows where."""
        if replica_id is not None:
            self._told.add(replica_id)
            self._note(replica_id, True)

    def answered(self, replica_id: str | None, pace_s: float | None = None, least_s: float = 0.0) -> None:
        """A request has been answered there.

        Args:
            replica_id: where; ``None``: nobody knows.
            pace_s: how long it took by a measure that does not depend on lengths; ``None``: do not judge by it.
            least_s: what is never slow.
        """
        if replica_id is None:
            return
        if pace_s is not None and self._usual.is_slow(pace_s, least_s):
            self.failed(replica_id)
        elif replica_id in self._suspects or replica_id in self._told:
            self._note(replica_id, False)

    def _note(self, replica_id: str, has_failed: bool) -> None:
        if len(self._seen) < _MOST_NEWS:
            self._seen.append((replica_id, has_failed))
            self._has_news.set()

    async def _listen(self) -> None:
        handle: Any = None
        version = -1
        while ray.is_initialized():
            try:
                if handle is None:
                    handle, version = await asyncio.to_thread(find_actor, self._key), -1
                if handle is not None:
                    heard = await handle.watch.remote(self._caller, self.pool, version)
                    version, self._ejected, self._suspects, probes = heard
                    self._probes = (self._probes | probes) & self._ejected
                    continue
            except Exception as error:  # whatever it is, this must go on
                logger.debug("the health board does not answer: %s", error)
                handle, self._ejected, self._suspects = None, frozenset(), frozenset()
            await asyncio.sleep(_RETRY_S)

    async def _tell(self) -> None:
        while ray.is_initialized():
            await self._has_news.wait()
            self._has_news.clear()
            seen, self._seen = self._seen, []
            try:
                handle = await asyncio.to_thread(find_actor, self._key)
                if handle is not None:
                    await handle.tell.remote(self._caller, self.pool, seen)
            except Exception as error:
                logger.debug("the health board does not listen: %s", error)
            self._told &= {name for name, _ in self._seen}
