"""Where requests wait for their turn at one replica of the endpoint: ``router.admission`` and the event loop."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from deployments import metrics
from deployments.openai_errors import OpenAIError
from router.admission import Admission, AdmissionConfig, Asked, Priority, Refusal
from router.rate_limit import RateLimits

_TICK_S = 0.05


class Gate:
    """Lets requests through, keeps them or refuses them."""

    def __init__(
        self, config: AdmissionConfig, rates: RateLimits | None = None, *, replicas: int, prefill_replicas: int
    ) -> None:
        """``rates``: of keys over several gates; ``replicas``: of the endpoint; ``prefill_replicas``: of all groups."""
        self.has_objective = config.ttft_s is not None
        self._admission = Admission(
            config, rates, replicas=replicas, prefill_replicas=prefill_replicas, now_s=time.monotonic()
        )
        self._turns: dict[Asked, asyncio.Future[None]] = {}
        self._ticking: asyncio.Task[None] | None = None

    @property
    def here(self) -> int:
        """Requests that wait or are being answered."""
        return self._admission.here

    def check(self, key: str | None, priority: Priority, coming: int) -> None:
        """Refuse what can be refused before a body is read; ``coming``: how many others' are being read.

        Raises:
            OpenAIError: 429.
        """
        refusal = self._admission.refuse(key, priority, coming, time.monotonic())
        if refusal is not None:
            raise _error(refusal, priority)

    def refused(self, key: str | None) -> None:
        """The body of a request of this key has been refused."""
        self._admission.refused(key, time.monotonic())

    @asynccontextmanager
    async def enter(self, asked: Asked) -> AsyncGenerator[None, None]:
        """Wait for the request's turn; it is here until the end of the block.

        Raises:
            OpenAIError: 429, it is refused.
        """
        refusal = self._admission.arrive(asked, time.monotonic())
        if refusal is not None:
            raise _error(refusal, asked.priority)
        try:
            self._let_through()
            if asked.passed_s is None:
                await self._turn(asked)
            yield
        finally:
            self._admission.leave(asked, time.monotonic())
            self._let_through()

    def first(self, asked: Asked) -> None:
        """Its first token has come."""
        self._admission.first(asked, time.monotonic())
        self._let_through()

    def output(self, asked: Asked, tokens: int) -> None:
        """So many output tokens have come."""
        is_first = not asked.has_first
        self._admission.output(asked, tokens, time.monotonic())
        if is_first:
            self._let_through()

    def pause(self, asked: Asked) -> None:
        """What has come waits for its reader."""
        if self.has_objective:  # else nobody asks for their pace, and this is done for every frame
            self._admission.pause(asked, time.monotonic())

    def go_on(self, asked: Asked) -> None:
        """Its reader has taken it."""
        if self.has_objective:
            self._admission.go_on(asked, time.monotonic())

    async def _turn(self, asked: Asked) -> None:
        turn = self._turns[asked] = asyncio.get_running_loop().create_future()
        if self._ticking is None or self._ticking.done():
            self._ticking = asyncio.create_task(self._tick())
        try:
            await turn
        finally:
            del self._turns[asked]

    def _let_through(self) -> None:
        for asked in self._admission.passed(time.monotonic()):
            turn = self._turns.get(asked)
            if turn is not None and not turn.done():
                turn.set_result(None)
        metrics.WAITING.set(self._admission.waiting)

    async def _tick(self) -> None:
        while self._turns:
            await asyncio.sleep(_TICK_S)
            now_s = time.monotonic()
            for asked in self._admission.late(now_s):
                turn = self._turns.get(asked)
                if turn is not None and not turn.done():
                    turn.set_exception(_error(self._admission.late_refusal(asked, now_s), asked.priority))
            self._let_through()


def _error(refusal: Refusal, priority: Priority) -> OpenAIError:
    metrics.REFUSED.labels(refusal.reason, priority.name.lower()).inc()
    code = "rate_limit_exceeded" if refusal.reason == "key" else "overloaded"
    return OpenAIError(429, refusal.message, code=code, retry_after_s=refusal.retry_after_s)
