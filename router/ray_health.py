"""A caller's side of the health board: what it reports of one pool's replicas, and which of them it avoids."""

import asyncio
import logging
from typing import Any

import ray

from router.ejection import Measure, Observation, OutlierConfig, UsualPace
from router.ray_actors import find_actor, follow
from router.routing import Routing

logger = logging.getLogger(__name__)

# Observations that wait for the board at most.
_MOST_OBSERVATIONS = 1000
# Seconds that a request waits at most to learn whether it is a probe.
_GRANT_S = 0.2


def board_key(app: str) -> bytes:
    """Where in Ray's key-value store the name of an application's health board is: Serve chooses its actors' names."""
    return f"tandem:health:{app}".encode()


class HealthFeed:
    """Exchanges news of one pool with the board until the process ends."""

    def __init__(self, app: str, pool: str, config: OutlierConfig) -> None:
        self._key = board_key(app)
        self.pool = pool
        self.usual = UsualPace(config)
        self._board: Any = None
        self._ejected: frozenset[str] = frozenset()
        self._suspects: frozenset[str] = frozenset()
        self._due: set[str] = set()
        self._granted: set[str] = set()  # probes that no request has made yet
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._unsent: list[Observation] = []
        self._failed_here: set[str] = set()  # replicas whose failure the board may not have published yet
        self._has_news = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to listen and to report, on the running event loop."""
        self._tasks = [
            asyncio.create_task(follow(self._key, self._watch, self._lose)),
            asyncio.create_task(self._report()),
        ]

    async def guide(self) -> tuple[frozenset[str], str | None]:
        """Replicas that the next call avoids, and the ejected replica that it tests, if the board grants a probe."""
        self._granted &= self._ejected
        if self._granted:
            probe = self._granted.pop()
            return self._ejected - {probe}, probe
        self._due -= self._asking.keys()
        if not self._due:
            return self._ejected, None
        probe = self._due.pop()
        # The board may grant it late, and then to this caller alone: its next request makes the probe.
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

    def is_news(self, replica_id: str) -> bool:
        """Whether the board needs a replica's answers too: it has failed lately."""
        return replica_id in self._suspects or replica_id in self._failed_here

    def report(self, observation: Observation) -> None:
        """Report an observation to the board."""
        if observation.has_failed:
            self._failed_here.add(observation.replica_id)
        if len(self._unsent) < _MOST_OBSERVATIONS:
            self._unsent.append(observation)
            self._has_news.set()

    def return_probe(self, replica_id: str) -> None:
        """Let the next request make a probe that showed nothing."""
        if replica_id in self._ejected:
            self._granted.add(replica_id)

    async def _watch(self, board: Any, version: int) -> int:
        self._board = board
        version, self._ejected, self._suspects, due = await board.watch.remote(self.pool, version)
        self._due = set(due)
        return version

    def _lose(self) -> None:
        self._board, self._ejected, self._suspects, self._due = None, frozenset(), frozenset(), set()

    async def _report(self) -> None:
        while ray.is_initialized():
            await self._has_news.wait()
            self._has_news.clear()
            observations, self._unsent = self._unsent, []
            try:
                board = await asyncio.to_thread(find_actor, self._key)
                if board is not None:
                    await board.tell.remote(self.pool, observations)
            except Exception as error:
                logger.debug("the health board does not listen: %s", error)
            self._failed_here &= {one.replica_id for one in self._unsent}


class CallHealth:
    """What one call shows of the replicas that it met."""

    def __init__(self, feed: HealthFeed, routing: Routing) -> None:
        self._feed = feed
        self._choice = routing.choice
        self._probe = routing.probe  # until the call has shown something of it
        self._reported: set[str] = set()  # replicas that could not be reached

    def unreached(self) -> None:
        """Report the replicas that could not be reached, each once, as failed."""
        for name in self._choice.unreached - self._reported:
            self._reported.add(name)
            self._feed.report(Observation(name, True, is_probe=name == self._probe))
            if name == self._probe:
                self._probe = None

    def failed(self) -> None:
        """Report that the call failed at its replica, and at those that could not be reached before."""
        self.unreached()
        self._note(Measure.ERROR, True)

    def answered(self) -> None:
        """Report that the replica answered, at whatever pace."""
        self._note(Measure.ERROR, False)

    def paced(self, pace_s: float, least_s: float) -> None:
        """Report the answer's pace, seconds per token or 1,000 tokens; one below ``least_s`` never counts as slow."""
        self._note(Measure.PACE, self._feed.usual.is_slow(pace_s, least_s))

    def ended(self) -> None:
        """The call has ended. A probe that it did not make, or that showed nothing, is for another request."""
        self.unreached()
        if self._probe is not None:
            self._feed.return_probe(self._probe)

    def _note(self, measure: Measure, has_failed: bool) -> None:
        replica_id = self._choice.replica_id
        if replica_id is None:
            return
        is_probe = replica_id == self._probe
        if has_failed or is_probe or self._feed.is_news(replica_id):
            self._feed.report(Observation(replica_id, has_failed, measure, is_probe=is_probe))
            if is_probe:
                self._probe = None
