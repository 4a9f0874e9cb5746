"""A caller's side of the health board: which replicas of a pool its calls avoid or test, and what it reports.

The board (``deployments.actors.health_board``) counts the observations of all callers. It ejects replicas that fail,
and grants one request at a time a probe: that request tests whether an ejected replica still fails.
"""

import asyncio
import logging
from typing import Any

import ray

from router.ejection import Measure, Observation, OutlierConfig, UsualPace
from router.ray_actors import find_actor, follow
from router.routing import Routing

logger = logging.getLogger(__name__)

# Most observations that wait for the board; further ones are dropped. While the board answers, far fewer wait.
_MOST_OBSERVATIONS = 1000
# Longest time, seconds, for which a request waits for the board to grant a probe.
_GRANT_S = 0.2


def board_key(app: str) -> bytes:
    """Key in Ray's key-value store under which the name of an application's health board is announced."""
    return f"tandem:health:{app}".encode()


class HealthFeed:
    """One pool's health as the board knows it, and this process's observations of the pool for the board."""

    def __init__(self, app: str, pool: str, config: OutlierConfig) -> None:
        self._key = board_key(app)
        self.pool = pool
        self.usual_pace = UsualPace(config)
        self._board: Any = None
        # The next three are from the board's last answer.
        self._ejected: frozenset[str] = frozenset()  # ejected replicas of the application
        self._suspects: frozenset[str] = frozenset()  # replicas of the application that have failed lately
        self._due: set[str] = set()  # ejected replicas of the pool for which the board may grant a probe
        self._granted: set[str] = set()  # replicas that this caller may test, and has not tested yet
        self._grants: dict[str, asyncio.Task[None]] = {}  # by replica: calls that ask the board for a probe
        self._unsent: list[Observation] = []
        # Replicas with a failure in _unsent. Soon after the board has got the failure, they are in _suspects.
        self._new_failures: set[str] = set()
        self._has_unsent = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []  # kept, since the loop itself has only weak references

    def start(self) -> None:
        """Begin to follow the board and to report, on the running event loop, until the process leaves Ray."""
        self._tasks = [
            asyncio.create_task(follow(self._key, self._watch, self._lose)),
            asyncio.create_task(self._report()),
        ]

    async def guide(self) -> tuple[frozenset[str], str | None]:
        """Replicas that the next call avoids, and the ejected replica that it tests, if the board grants a probe."""
        probe = self._take_granted() or await self._request_probe()
        return self._ejected - {probe}, probe

    def _take_granted(self) -> str | None:
        """A replica whose probe the board has granted, for one request; ``None``: there is none."""
        self._granted &= self._ejected  # a replica that has returned needs no probe
        return self._granted.pop() if self._granted else None

    async def _request_probe(self) -> str | None:
        """Ask the board for the probe of a replica that is due; ``None``: none is due, or the board did not grant it.

        If the board answers too late for this request, the next request of this caller makes the probe. The board has
        granted it to no other caller.
        """
        self._due -= self._grants.keys()
        if not self._due:
            return None
        replica_id = self._due.pop()
        self._grants[replica_id] = grant = asyncio.create_task(self._ask(replica_id))
        await asyncio.wait([grant], timeout=_GRANT_S)
        if replica_id not in self._granted:
            return None
        self._granted.discard(replica_id)
        return replica_id

    async def _ask(self, replica_id: str) -> None:
        """Ask the board for a probe, and store the grant."""
        try:
            if await self._board.probe.remote(replica_id):
                self._granted.add(replica_id)
        except Exception as error:  # the board is lost, so there is no probe
            logger.debug("the health board did not grant a probe of %s: %s", replica_id, error)
        finally:
            del self._grants[replica_id]

    def needs_answers(self, replica_id: str) -> bool:
        """Whether the board needs a replica's good answers too, since it has failed lately."""
        return replica_id in self._suspects or replica_id in self._new_failures

    def report(self, observation: Observation) -> None:
        """Report an observation to the board, in the background."""
        if observation.has_failed:
            self._new_failures.add(observation.replica_id)
        if len(self._unsent) < _MOST_OBSERVATIONS:
            self._unsent.append(observation)
            self._has_unsent.set()

    def return_probe(self, replica_id: str) -> None:
        """Let this caller's next request make a probe that was not made, or that showed nothing."""
        if replica_id in self._ejected:
            self._granted.add(replica_id)

    async def _watch(self, board: Any, version: int) -> int:
        """Wait for the board's next answer and store it. Returns the version of the answer."""
        self._board = board
        version, self._ejected, self._suspects, due = await board.watch.remote(self.pool, version)
        self._due = set(due)
        return version

    def _lose(self) -> None:
        """The board does not answer. Until it does, no replica is avoided."""
        self._board, self._ejected, self._suspects, self._due = None, frozenset(), frozenset(), set()

    async def _report(self) -> None:
        """Send all unsent observations to the board in one call, again and again."""
        while ray.is_initialized():
            await self._has_unsent.wait()
            self._has_unsent.clear()
            observations, self._unsent = self._unsent, []
            try:
                board = await asyncio.to_thread(find_actor, self._key)
                if board is not None:
                    await board.observe.remote(self.pool, observations)
            except Exception as error:  # the observations are lost; a replica that still fails will fail other calls
                logger.debug("the health board did not take %d observations: %s", len(observations), error)
            self._new_failures &= {each.replica_id for each in self._unsent}


class CallHealth:
    """Reports what one call showed about the health of the replicas that it was sent to."""

    def __init__(self, feed: HealthFeed, routing: Routing) -> None:
        self._feed = feed
        self._choice = routing.choice  # the router writes into it which replica has the call
        self._probe = routing.probe  # the ejected replica that the call tests; ``None`` once its result is reported
        self._reported: set[str] = set()  # replicas that were reported because they could not be reached

    def report_unreached(self) -> None:
        """Report the replicas that could not be reached, each once, as failed."""
        for name in self._choice.unreached - self._reported:
            self._reported.add(name)
            self._feed.report(Observation(name, has_failed=True, is_probe=name == self._probe))
            if name == self._probe:
                self._probe = None

    def report_failure(self) -> None:
        """Report that the call failed at its replica, and also the replicas that could not be reached before it."""
        self.report_unreached()
        self._report(Measure.ERROR, has_failed=True)

    def report_answer(self) -> None:
        """Report that the replica answered, at whatever pace."""
        self._report(Measure.ERROR, has_failed=False)

    def report_pace(self, pace_s: float, least_s: float) -> None:
        """Report the pace of the answer; one below ``least_s`` never counts as slow.

        Both are seconds per output token on decode, and seconds per 1,000 prompt tokens on prefill.
        """
        self._report(Measure.PACE, has_failed=self._feed.usual_pace.is_slow(pace_s, least_s))

    def end(self) -> None:
        """The call has ended. If it did not make its probe, or the probe showed nothing, another request makes it."""
        self.report_unreached()
        if self._probe is not None:
            self._feed.return_probe(self._probe)

    def _report(self, measure: Measure, *, has_failed: bool) -> None:
        """Report a result of the replica that has the call, if the board needs it."""
        replica_id = self._choice.replica_id
        if replica_id is None:
            return
        is_probe = replica_id == self._probe
        if has_failed or is_probe or self._feed.needs_answers(replica_id):
            self._feed.report(Observation(replica_id, has_failed, measure, is_probe=is_probe))
            if is_probe:
                self._probe = None
