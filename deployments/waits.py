"""Ends waits for replicas that no longer exist or answer nothing: neither closes a connection."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol, TypeVar

logger = logging.getLogger(__name__)

_QUIET_S = 5.0
_EVERY_S = 2.0
# Who has not answered so many questions in a row, each within its own time, hangs.
_SILENCES = 2

_Piece = TypeVar("_Piece")


class Routed(Protocol):
    """A request; ``routed_to``: the replica that it is with."""

    routed_to: str | None


class Wait:
    """One request that waits for pieces of a replica's answer, one after the other.

    One timer serves all of them: an ``asyncio.timeout`` each took a tenth of what an ingress replica does.
    """

    def __init__(self, deployment: str, asked: Routed, deadline_s: float) -> None:
        """``deadline_s``, monotonic, is that of the whole request; it holds until ``close``."""
        self.deployment = deployment
        self.asked = asked
        self.is_lost = False  # its replica is known to be gone
        self._since_s: float | None = None  # since when it waits for a piece, if it does
        self._is_over = False
        self._task: asyncio.Task[Any] | None = None  # the one that waits
        self._timer = asyncio.get_running_loop().call_later(deadline_s - time.monotonic(), self._end)

    async def piece(self, pieces: AsyncIterator[_Piece]) -> _Piece:
        """The next one.

        Raises:
            TimeoutError: the deadline has passed, or the replica is gone.
            StopAsyncIteration: there are no more.
        """
        if self._has_ended():
            raise TimeoutError
        task = self._task = asyncio.current_task()
        assert task is not None
        cancelling = task.cancelling()
        self._since_s = time.monotonic()
        try:
            return await anext(pieces)
        except asyncio.CancelledError:
            # One is ours; any other means that the client has left at the same time.
            if self._has_ended() and task.cancelling() <= cancelling + 1:
                raise TimeoutError from None
            raise
        finally:
            self._task = self._since_s = None
            if self._has_ended():
                task.uncancel()

    def quiet_s(self) -> float:
        """How long the wait for this piece lasts; 0 while there is none."""
        return 0.0 if self._since_s is None else time.monotonic() - self._since_s

    def lose(self) -> None:
        """End the wait."""
        if self._task is not None and not self._is_over:
            self.is_lost = True
            self._end()

    def close(self) -> None:
        """It has ended."""
        self._timer.cancel()

    def _has_ended(self) -> bool:
        return self._is_over

    def _end(self) -> None:
        if not self._is_over:
            self._is_over = True
            if self._task is not None:
                self._task.cancel()


class Waits:
    """All requests of one process that wait for replicas of an application."""

    def __init__(
        self,
        is_alive: Callable[[str, str], bool],
        is_stranded: Callable[[str], bool],
        *,
        quiet_s: float = _QUIET_S,
        every_s: float = _EVERY_S,
    ) -> None:
        """Begin with none.

        Args:
            is_alive: asks a replica (its deployment, its id) something; ``False`` where there is none any more, and
                a ``TimeoutError`` where it does not answer. It may block for seconds.
            is_stranded: whether a deployment has no replica while another one has that could answer.
            quiet_s: nobody looks before a wait has lasted so long.
            every_s: how often somebody looks.
        """
        self._is_alive, self._is_stranded = is_alive, is_stranded
        self._quiet_s, self._every_s = quiet_s, every_s
        self._waits: set[Wait] = set()

    def add(self, wait: Wait) -> None:
        """Watch over a request, until ``remove``."""
        self._waits.add(wait)

    def remove(self, wait: Wait) -> None:
        """It has ended."""
        wait.close()
        self._waits.discard(wait)

    async def run(self) -> None:
        """Look after those who wait for long, for ever."""
        silences: Counter[tuple[str, str]] = Counter()
        while True:
            await asyncio.sleep(self._every_s)
            quiet: dict[tuple[str, str], list[Wait]] = {}
            for wait in list(self._waits):
                if wait.quiet_s() <= self._quiet_s:
                    continue
                if wait.asked.routed_to is not None:
                    quiet.setdefault((wait.deployment, wait.asked.routed_to), []).append(wait)
                elif self._is_stranded(wait.deployment):
                    wait.lose()
            silences = Counter({replica: silences[replica] for replica in quiet})
            are_silent = await asyncio.gather(*(self._is_silent(*replica) for replica in quiet))
            for (replica, waits), is_silent in zip(quiet.items(), are_silent, strict=True):
                silences[replica] = silences[replica] + is_silent if is_silent else 0
                for wait in waits if silences[replica] >= _SILENCES else ():
                    if wait in self._waits and wait.asked.routed_to == replica[1]:
                        wait.lose()

    async def _is_silent(self, deployment: str, replica_id: str) -> int:
        """How many more silences this is: none, one, or at once enough."""
        try:
            is_alive = await asyncio.to_thread(self._is_alive, deployment, replica_id)
        except TimeoutError:
            logger.debug("%s of %s does not answer", replica_id, deployment)
            return 1
        except Exception as error:  # blind: whoever waits goes on waiting
            logger.debug("whether %s of %s is alive is unknown: %s", replica_id, deployment, error)
            return 0
        return 0 if is_alive else _SILENCES
