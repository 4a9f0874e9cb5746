"""A caller's side of the health board: what it tells of the replicas of one pool, and whom it must not send to."""

import asyncio
import logging
from typing import Any, Protocol

import ray

from router.outliers import By, OutlierConfig, Seen, UsualPace
from router.ray_actors import find_actor

logger = logging.getLogger(__name__)

_RETRY_S = 1.0
_MOST_NEWS = 1000
# A request waits no longer to hear whether it is the probe.
_GRANT_S = 0.2


class Routed(Protocol):
    """A request, as the router leaves it: where it is, whom it was to probe, and who did not take it."""

    routed_to: str | None
    probe: str | None
    refused: set[str]


def board_key(app: str) -> bytes:
    """Where in Ray's key-value store the name of an application's health board is: Serve chooses its actors' names."""
    return f"tandem:health:{app}".encode()


class HealthFeed:
    """Tells the board, and keeps what it says, until the process ends."""

    def __init__(self, app: str, pool: str, config: OutlierConfig) -> None:
        self._key = board_key(app)
        self.pool = pool
        self._usual = UsualPace(config)
        self._board: Any = None
        self._ejected: frozenset[str] = frozenset()
        self._suspects: frozenset[str] = frozenset()
        self._due: set[str] = set()
        self._granted: set[str] = set()  # probes that nobody has made yet
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._seen: list[Seen] = []
        self._told: set[str] = set()  # who failed here of late; the board may not have said so yet
        self._has_news = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to listen and to tell, on the running event loop."""
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._tell())]

    async def guide(self) -> tuple[frozenset[str], str | None]:
        """Whom a request that is about to be sent must not go to, and whom it probes, where the board wants that."""
        self._granted &= self._ejected
        if self._granted:
            probe = self._granted.pop()
            return self._ejected - {probe}, probe
        self._due -= self._asking.keys()
        if not self._due:
            return self._ejected, None
        probe = self._due.pop()
        # The board may grant it later, and then to nobody else: the next request makes it.
        self._asking[probe] = asking = asyncio.create_task(self._ask(probe))
        await asyncio.wait([asking], timeout=_GRANT_S)
        if probe not in self._granted:
            return self._ejected, None
        self._granted.discard(probe)
        return self._ejected - {probe}, probe

    async def _ask(self, probe: str) -> None:
        try:
            if await self._board.probe.remote(probe):
                self._granted.add(probe)
        except Exception as error:
            logger.debug("the health board grants no probe: %s", error)
        finally:
            del self._asking[probe]

    def failed(self, request: Routed) -> None:
        """A request has failed where it was; those that did not take it before have failed too."""
        self.refused(request)
        self._note(request, By.ERROR, True)

    def refused(self, request: Routed) -> None:
        """A request has gone on from those that could not be reached, if there were any."""
        while request.refused:
            name = request.refused.pop()
            self._say(Seen(name, True, is_probe=name == request.probe))
            if name == request.probe:
                request.probe = None

    def left(self, request: Routed) -> None:
        """A request has ended; the probe that it did not make, or that has shown nothing, is another's."""
        self.refused(request)
        if request.probe is not None and request.probe in self._ejected:
            self._granted.add(request.probe)

    def answered(self, request: Routed) -> None:
        """A request has been answered, at whatever pace."""
        self._note(request, By.ERROR, False)

    def paced(self, request: Routed, pace_s: float, least_s: float) -> None:
        """A request has shown at which pace its replica answers.

        Args:
            request: it.
            pace_s: how long it took by a measure that does not depend on lengths.
            least_s: what is never slow.
        """
        self._note(request, By.PACE, self._usual.is_slow(pace_s, least_s))

    def _note(self, request: Routed, by: By, has_failed: bool) -> None:
        replica_id = request.routed_to
        if replica_id is None:
            return
        is_probe = replica_id == request.probe
        if has_failed or is_probe or replica_id in self._suspects or replica_id in self._told:
            self._say(Seen(replica_id, has_failed, by, is_probe=is_probe))
            if is_probe:
                request.probe = None

    def _say(self, seen: Seen) -> None:
        if seen.has_failed:
            self._told.add(seen.replica_id)
        if len(self._seen) < _MOST_NEWS:
            self._seen.append(seen)
            self._has_news.set()

    async def _listen(self) -> None:
        version = -1
        while ray.is_initialized():
            try:
                found = await asyncio.to_thread(find_actor, self._key)
                if found is not None and (self._board is None or found._actor_id != self._board._actor_id):
                    self._board, version = found, -1  # the first, or that of a redeployed application
                if self._board is not None:
                    heard = await self._board.watch.remote(self.pool, version)
                    version, self._ejected, self._suspects, due = heard
                    self._due = set(due)
                    continue
            except Exception as error:  # whatever it is, this must go on
                logger.debug("the health board does not answer: %s", error)
                self._board, self._ejected, self._suspects, self._due = None, frozenset(), frozenset(), set()
            await asyncio.sleep(_RETRY_S)

    async def _tell(self) -> None:
        while ray.is_initialized():
            await self._has_news.wait()
            self._has_news.clear()
            seen, self._seen = self._seen, []
            try:
                handle = await asyncio.to_thread(find_actor, self._key)
                if handle is not None:
                    await handle.tell.remote(self.pool, seen)
            except Exception as error:
                logger.debug("the health board does not listen: %s", error)
            self._told &= {one.replica_id for one in self._seen}
