"""Puts the engine of an idle replica to sleep, and wakes it for the next request."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from deployments.metrics import ENGINE_ASLEEP
from deployments.pool_config import EngineSleepConfig

logger = logging.getLogger(__name__)

_CHANGE_S = 600.0  # longest time of a sleep or a wake, in which the engine need not answer, seconds
_POLL_S = 0.25  # time between two checks whether the engine is idle, seconds


class EngineSleep:
    """One replica's engine: whether it sleeps, and how many requests it has.

    ``is_idle``: whether the engine itself has nothing left, such as KV that decode has not pulled. It is asked only
    while the replica has no request. ``end``: ends this process; called if the engine does not wake.
    """

    def __init__(
        self, client: Any, config: EngineSleepConfig, is_idle: Callable[[], Awaitable[bool]], end: Callable[[], None]
    ) -> None:
        self._client, self._config, self._is_idle, self._end = client, config, is_idle, end
        self._requests, self._used_s = 0, time.monotonic()
        self._is_asleep, self._changed_s = False, 0.0
        self._changing = asyncio.Lock()

    @asynccontextmanager
    async def awake(self) -> AsyncIterator[None]:
        """Context of a request: the engine is awake in it."""
        self._requests += 1
        try:
            if self._is_asleep or self._changing.locked():
                # A client that leaves ends its own wait, and not the wake.
                await asyncio.shield(asyncio.ensure_future(self._wake()))
            yield
        finally:
            self._requests -= 1
            self._used_s = time.monotonic()

    async def run(self) -> None:
        """Put the engine to sleep whenever it has been idle for ``after_s``, for ever."""
        while True:
            await asyncio.sleep(_POLL_S)
            if self._is_due() and await self._is_idle():
                async with self._changing:
                    if self._is_due():
                        await self._sleep()

    def _is_due(self) -> bool:
        is_over = time.monotonic() - self._used_s >= self._config.after_s
        return not self._is_asleep and not self._requests and is_over

    def is_changing(self) -> bool:
        """Whether the engine goes to sleep or wakes, for at most ``_CHANGE_S``."""
        return self._changing.locked() and time.monotonic() - self._changed_s < _CHANGE_S

    async def _sleep(self) -> None:
        began_s = self._changed_s = time.monotonic()
        try:
            await self._client.sleep(self._config.level, mode="wait")
        except Exception:
            # vLLM may have paused the engine already: a wake-up makes it serve again.
            logger.exception("the engine could not sleep, and goes on serving")
        else:
            ENGINE_ASLEEP.set(1.0)
            logger.info("the engine sleeps at level %d, after %.1f s", self._config.level, time.monotonic() - began_s)
        self._is_asleep = True

    async def _wake(self) -> None:
        async with self._changing:
            if not self._is_asleep:
                return
            began_s = self._changed_s = time.monotonic()
            try:
                if self._config.level == 2:
                    await self._client.wake_up(["weights"])
                    await self._client.collective_rpc("reload_weights")
                    await self._client.wake_up(["kv_cache"])
                else:
                    await self._client.wake_up()
            except Exception:
                logger.exception("the engine does not wake, so this replica ends; its requests run on another one")
                self._end()
                raise
            self._is_asleep = False
            ENGINE_ASLEEP.set(0.0)
            logger.info("the engine is awake after %.1f s", time.monotonic() - began_s)
