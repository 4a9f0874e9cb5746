"""A question whose answer holds for a moment, so that asking often costs nobody but who asks."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Recent(Generic[T]):
    """Asks at most once at a time, and again only after a while; all who come meanwhile get the same answer."""

    def __init__(
        self, ask: Callable[[], Awaitable[T]], keep_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``keep_s``: how long an answer holds, from when it was asked for."""
        self._ask = ask
        self._keep_s = keep_s
        self._clock = clock
        self._asked_s = 0.0
        self._answer: asyncio.Future[T] | None = None

    async def get(self) -> T:
        """The answer; who leaves meanwhile takes it from nobody else."""
        now_s = self._clock()
        if self._answer is None or (self._answer.done() and now_s - self._asked_s >= self._keep_s):
            self._asked_s = now_s
            self._answer = asyncio.ensure_future(self._ask())
        return await asyncio.shield(self._answer)
