"""A caller's side of the health board: what it tells of the replicas of one pool, and whom it must not send to."""

import asyncio
import logging
import uuid
from typing import Any

import ray
from ray.experimental import internal_kv

from router.outliers import OutlierConfig, UsualLatency

logger = logging.getLogger(__name__)

_NAMESPACE = "serve"
_RETRY_S = 1.0
_MOST_NEWS = 1000


def board_key(app: str) -> bytes:
    """Where in Ray's key-value store the name of an application's health board is: Serve chooses its actors' names."""
    return f"tandem:health:{app}".encode()


class HealthFeed:
    """Tells the board, and keeps what it says, until the process ends."""

    def __init__(self, app: str, config: OutlierConfig) -> None:
        self._key = board_key(app)
        self._caller = uuid.uuid4().hex
        self._usual = UsualLatency(config)
        self._ejected: frozenset[str] = frozenset()
        self._suspects: frozenset[str] = frozenset()
        self._probes: set[str] = set()
        self._names: set[str] = set()
        self._failed: list[str] = []
        self._answered: list[str] = []
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

    def observe(self, replica_id: str | None, seconds: float | None) -> None:
        """What became of a request.

        Args:
            replica_id: where it went; ``None`` where that is not known, which says nothing.
            seconds: until its first answer; ``None``: it has failed.
        """
        if replica_id is None:
            return
        self._names.add(replica_id)
        is_bad = seconds is None or self._usual.is_slow(seconds)
        if not is_bad and replica_id not in self._suspects:
            return
        news = self._failed if is_bad else self._answered
        if len(news) < _MOST_NEWS:
            news.append(replica_id)
            self._has_news.set()

    async def _listen(self) -> None:
        handle: Any = None
        version = -1
        while ray.is_initialized():
            try:
                if handle is None:
                    handle, version = await asyncio.to_thread(self._find), -1
                if handle is not None:
                    version, ejected, suspects, probes = await handle.watch.remote(
                        self._caller, version, sorted(self._names)
                    )
                    gone = self._names - ejected if len(self._names) > _MOST_NEWS else frozenset()
                    self._names -= gone
                    self._ejected, self._suspects = ejected, suspects
                    self._probes = (self._probes | probes) & ejected
                    continue
            except Exception as error:  # whatever it is, this must go on
                logger.debug("the health board does not answer: %s", error)
                handle, self._ejected, self._suspects = None, frozenset(), frozenset()
            await asyncio.sleep(_RETRY_S)

    async def _tell(self) -> None:
        while ray.is_initialized():
            await self._has_news.wait()
            self._has_news.clear()
            failed, answered, self._failed, self._answered = self._failed, self._answered, [], []
            try:
                handle = await asyncio.to_thread(self._find)
                if handle is not None:
                    await handle.tell.remote(self._caller, failed, answered)
            except Exception as error:
                logger.debug("the health board does not listen: %s", error)

    def _find(self) -> Any:
        name = internal_kv._internal_kv_get(self._key)
        try:
            return None if name is None else ray.get_actor(name.decode(), namespace=_NAMESPACE)
        except ValueError:  # being restarted
            return None
