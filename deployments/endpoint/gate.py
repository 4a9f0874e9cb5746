"""Requests wait or are refused here, at one replica of the endpoint: an intake for all models, and a gate for each.

The rules are those of ``router.admission``. A request's ``place`` is its place in the queue of a gate.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager

from fastapi import Request

from autoscale.observe.endpoint_report import endpoint_figures
from autoscale.slo import SloConfig
from deployments import metrics
from deployments.endpoint.api_keys import ApiKeys
from deployments.wire.openai_errors import OpenAIError
from router.admission import Admission, QueuedRequest
from router.admission_config import AdmissionConfig, Priority
from router.request_limits import Refusal, RequestLimits

_TICK_S = 0.05  # seconds between two searches for requests that have waited too long
_DRAIN_RETRY_S = 5.0  # Retry-After, seconds, of a request that arrives during a drain
_DRAIN_POLL_S = 0.1  # seconds between two checks whether all requests have been answered
# Seconds between the end of the last answer and the end of the drain, in which the client reads the answer. A smaller
# value may cut answers off, a larger one makes every drain longer.
_LAST_READ_S = 0.5
_DELETION_S = 60.0  # seconds from the end of a drain until requests are accepted again if the application still exists


class Gate:
    """The queue of one model: lets requests pass, makes them wait or refuses them."""

    def __init__(
        self,
        config: AdmissionConfig,
        limits: RequestLimits | None = None,
        *,
        replicas: int,
        prefill_replicas: Callable[[], float],
    ) -> None:
        """``limits``: limits over all models; ``replicas``: number of the endpoint's replicas.

        ``prefill_replicas``: returns the present number, at least 1, of replicas that compute the model's prompts.
        """
        self.has_objective = config.ttft_s is not None  # for the TTFT; without it the engines' pace has no use
        self._prefill_replicas = prefill_replicas
        self._admission = Admission(
            config, limits, replicas=replicas, prefill_replicas=prefill_replicas(), now_s=time.monotonic()
        )
        self._turns: dict[QueuedRequest, asyncio.Future[None]] = {}  # by waiting request: what ends its wait
        self._ticking: asyncio.Task[None] | None = None

    @property
    def requests(self) -> int:
        """Number of requests that wait or are being answered."""
        return self._admission.request_count

    @property
    def waiting(self) -> int:
        """Number of requests that wait."""
        return self._admission.waiting

    def refuse_unread(self, key: str | None, priority: Priority) -> None:
        """Count a request that was refused before its body was read."""
        self._admission.refuse_unread(key, priority, time.monotonic())

    def figures(self, slo: SloConfig) -> dict[str, float]:
        """The demand for the model, for the report to the autoscaler; ``slo``: the objectives of the service."""
        return endpoint_figures(self._admission.demand.figures(), self._admission.waits(time.monotonic()), slo)

    @asynccontextmanager
    async def enter(self, place: QueuedRequest) -> AsyncGenerator[None, None]:
        """Wait for a request's turn, and count it until the block ends. Raises OpenAIError: 429, it is refused."""
        now_s = time.monotonic()
        self._admission.set_prefill_replicas(self._prefill_replicas(), now_s)
        refusal = self._admission.arrive(place, now_s)
        if refusal is not None:
            raise refusal_error(refusal, place.priority)
        try:
            self._let_through()  # if there is room, this request too: that sets ``passed_s``
            if place.passed_s is None:
                await self._turn(place)
            yield
        finally:
            self._admission.leave(place, time.monotonic())
            self._let_through()

    def note_first_token(self, place: QueuedRequest) -> None:
        """Note that the first token of an answer in one piece has come; the answer itself comes later."""
        self._admission.note_first_token(place, time.monotonic())
        self._let_through()

    def output(self, place: QueuedRequest, tokens: int) -> None:
        """Count output tokens that have come."""
        is_first = place.first_token is None
        self._admission.output(place, tokens, time.monotonic())
        if is_first:
            self._let_through()

    def pause(self, place: QueuedRequest) -> None:
        """Stop the measurement of the engine's pace: a frame waits for its reader."""
        if self.has_objective:  # otherwise the pace has no use; this is called for every frame
            self._admission.pause(place, time.monotonic())

    def go_on(self, place: QueuedRequest) -> None:
        """Continue the measurement: the reader has taken the frame."""
        if self.has_objective:
            self._admission.go_on(place, time.monotonic())

    async def _turn(self, place: QueuedRequest) -> None:
        """Wait until ``_let_through`` lets the request pass. Raises OpenAIError: 429, it has waited too long."""
        turn = self._turns[place] = asyncio.get_running_loop().create_future()
        if self._ticking is None or self._ticking.done():
            self._ticking = asyncio.create_task(self._tick())
        try:
            await turn
        finally:
            del self._turns[place]

    def _let_through(self) -> None:
        """End the wait of requests that admission lets pass."""
        for place in self._admission.passed(time.monotonic()):
            if (turn := self._turns.get(place)) is not None and not turn.done():
                turn.set_result(None)

    async def _tick(self) -> None:
        """Refuse requests that have waited too long, while any request waits."""
        while self._turns:
            await asyncio.sleep(_TICK_S)
            now_s = time.monotonic()
            self._admission.set_prefill_replicas(self._prefill_replicas(), now_s)
            for place in self._admission.late(now_s):
                if (turn := self._turns.get(place)) is not None and not turn.done():
                    turn.set_exception(refusal_error(self._admission.late_refusal(place, now_s), place.priority))
            self._let_through()


def refusal_error(refusal: Refusal, priority: Priority) -> OpenAIError:
    """Count a refusal, and return its error."""
    metrics.REFUSED.labels(refusal.reason, priority.name.lower()).inc()
    code = "rate_limit_exceeded" if refusal.reason == "key" else "overloaded"
    return OpenAIError(429, refusal.message, code=code, retry_after_s=refusal.retry_after_s)


class Intake:
    """Counts requests from the arrival of their headers, and refuses some before their bodies are read."""

    def __init__(self, limits: RequestLimits, keys: ApiKeys | None, gates: Collection[Gate]) -> None:
        """``gates``: those of all models and of their very long prompts; they count requests whose bodies were read."""
        self._limits = limits
        self._keys = keys
        self._gates = gates
        self._arriving = 0  # requests whose body is being read, or whose model is being woken
        metrics.WAITING.set_function(lambda: sum(gate.waiting for gate in gates))
        self._drains_until_s = 0.0  # monotonic time until which new requests are refused

    @property
    def request_count(self) -> int:
        """Number of requests that arrive, wait or are being answered."""
        return self._arriving + sum(gate.requests for gate in self._gates)

    def check_open(self) -> None:
        """Raises OpenAIError: 503 during a drain."""
        if time.monotonic() < self._drains_until_s:
            message = "this endpoint is being shut down; send the request again"
            raise OpenAIError(503, message, code="overloaded", retry_after_s=_DRAIN_RETRY_S)

    def key_of(self, http: Request) -> str | None:
        """The name of a client's key; ``None``: clients need no key. Raises OpenAIError: 401, no such key."""
        if self._keys is None:
            return None
        key = http.headers.get("x-api-key")  # Anthropic's clients send it here
        name = self._keys.name_of(http.headers.get("authorization") or f"Bearer {key}")
        if name is None:
            message = (
                "this endpoint needs an API key that it knows: send 'Authorization: Bearer KEY' or 'X-API-Key: KEY'"
            )
            raise OpenAIError(401, message, code="invalid_api_key")
        return name

    def check_limits(self, key: str | None, priority: Priority) -> None:
        """Raises OpenAIError: 429, the key or the endpoint has reached a limit that does not depend on the body."""
        refusal = self._limits.refuse(key, priority, self.request_count, time.monotonic())
        if refusal is not None:
            if refusal.reason != "key":
                # The body, which names the model, is not read: the model with the most requests fills the endpoint.
                max(self._gates, key=lambda gate: gate.requests).refuse_unread(key, priority)
            raise refusal_error(refusal, priority)

    @contextmanager
    def arriving(self) -> Iterator[None]:
        """Count a request until a gate counts it."""
        self._arriving += 1
        try:
            yield
        finally:
            self._arriving -= 1

    def body_refused(self, key: str | None) -> None:
        """Count a request against its key although its body was refused: reading the body took work."""
        self._limits.body_refused(key, time.monotonic())

    async def drain(self, timeout_s: float) -> int:
        """Refuse new requests and wait until earlier ones have been answered. Returns the number of unanswered ones.

        All replicas of the endpoint drain at the same time, for at most ``timeout_s``. Then the application is deleted.
        If it still exists ``_DELETION_S`` later, requests are accepted again.
        """
        until_s = time.monotonic() + timeout_s
        self._drains_until_s = until_s + _DELETION_S
        while (requests := self.request_count) and time.monotonic() < until_s:
            await asyncio.sleep(_DRAIN_POLL_S)
        await asyncio.sleep(_LAST_READ_S)
        return requests
