"""Ends waits for replicas that no longer exist or answer nothing: neither closes a connection."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from deployments.frames import DecodeRequest

logger = logging.getLogger(__name__)

_QUIET_S = 5.0
_EVERY_S = 2.0
# Who has not answered so many questions in a row, each within its own time, hangs.
_SILENCES = 2


class Wait:
    """One request that waits for frames of a replica; ``is_lost`` once that replica is known to be gone."""

    def __init__(self, deployment: str, asked: DecodeRequest) -> None:
        self.deployment = deployment
        self.asked = asked
        self.is_lost = False
        self._since_s = 0.0
        self._timeout: asyncio.Timeout | None = None

    @asynccontextmanager
    async def frame(self, deadline_s: float) -> AsyncGenerator[None, None]:
        """The wait for one frame.

        Raises:
            TimeoutError: ``deadline_s``, monotonic, has passed, or the replica is gone.
        """
        self._since_s = time.monotonic()
        async with asyncio.timeout(deadline_s - self._since_s) as self._timeout:
            try:
                yield
            finally:
                self._timeout = None

    def quiet_s(self) -> float:
        """How long the wait for this frame lasts; 0 while there is none."""
        return 0.0 if self._timeout is None else time.monotonic() - self._since_s

    def lose(self) -> None:
        """End the wait."""
        if self._timeout is not None:
            self.is_lost = True
            self._timeout.reschedule(asyncio.get_running_loop().time())


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
        """Watch over it no longer."""
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
