"""A decode replica's side of its group's prefill queue: it asks for a place of each prompt on a prefill replica.

The queue itself is an actor (``deployments.actors.prefill_queue``). It gets lengths and times of prompts, no tokens.
"""

import asyncio
import itertools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from router import known_pools
from router.ray_actors import follow

logger = logging.getLogger(__name__)

# Longest time, seconds, without an answer of the queue's actor, which answers every second. After that it counts as
# lost, and prompts are sent at once.
SILENCE_S = 3.0


def queue_key(app: str, pool: str) -> bytes:
    """Key in Ray's key-value store under which the name of a prefill pool's queue is announced."""
    return f"tandem:prefill_queue:{app}:{pool}".encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceRequest:
    """A prompt that asks for a prefill replica. Times are lengths of time, since each process has its own clock.

    Attributes:
        prompt_id: its name in the queue.
        caller: the decode replica.
        tokens: prompt tokens to compute.
        waited_s: time since the request arrived at the endpoint.
        objective_s: the request's TTFT objective.
        replicas: prefill replicas that get prompts now, as the decode replica's router knows them.
        exclude: those of them that must not get this prompt.
        overlap_tokens: tokens of the prompt that a replica has in its cache, by replica.
    """

    prompt_id: str
    caller: str
    tokens: int
    waited_s: float
    objective_s: float
    replicas: frozenset[str]
    exclude: frozenset[str] = frozenset()
    overlap_tokens: Mapping[str, int] = field(default_factory=dict)


class PlaceOutcome(StrEnum):
    """How the wait for a place ended; a label of ``tandem_prefill_places_total``."""

    BOUND = "bound"  # the queue has named a replica
    UNPLACED = "unplaced"  # the queue has no replica for the prompt, or too many prompts
    QUEUE_LOST = "queue_lost"  # the queue's actor is gone or silent
    LATE = "late"  # the prompt's deadline on prefill has passed


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A prompt's place on a prefill replica; ``replica_id``: ``None`` unless it is bound."""

    prompt_id: str
    outcome: PlaceOutcome
    replica_id: str | None = None


class QueueFeed:
    """The queue of one prefill pool, as one decode replica sees it."""

    def __init__(self, app: str, pool: str, caller: str) -> None:
        self._key = queue_key(app, pool)
        self._pool = pool
        self._caller = caller
        self._queue: Any = None
        self._numbers = itertools.count()
        self._calls: set[asyncio.Task[str | None]] = set()  # calls that wait for a place
        # The queue of each prompt that waits there or has a place: it must learn of the end, also when it has been
        # silent, or when another queue has been started.
        self._queues: dict[str, Any] = {}

    def start(self) -> None:
        """Begin to follow the queue, on the running event loop, until the process leaves Ray."""
        # Kept, since the loop itself has only weak references to its tasks.
        self._following = asyncio.create_task(follow(self._key, self._watch, self._lose))

    async def place(
        self,
        tokens: int,
        *,
        waited_s: float,
        objective_s: float,
        replicas: frozenset[str],
        exclude: frozenset[str],
        overlap_tokens: Mapping[str, int],
        timeout_s: float,
    ) -> Place:
        """Wait for a place, at most ``timeout_s``; the other arguments are those of ``PlaceRequest``.

        Call ``end`` with the place's ``prompt_id`` once prefill has answered.
        """
        prompt_id = f"{self._caller}:{next(self._numbers)}"
        if self._queue is None:
            return Place(prompt_id=prompt_id, outcome=PlaceOutcome.QUEUE_LOST)
        request = PlaceRequest(
            prompt_id=prompt_id,
            caller=self._caller,
            tokens=tokens,
            waited_s=waited_s,
            objective_s=objective_s,
            replicas=replicas,
            exclude=exclude,
            overlap_tokens=overlap_tokens,
        )
        self._queues[prompt_id] = self._queue
        place = None
        try:
            place = await self._ask(self._queue, request, timeout_s)
        finally:  # also if the client has disconnected
            if place is None or place.replica_id is None:
                self.end(prompt_id, is_computed=False)
        return place

    def end(self, prompt_id: str, *, is_computed: bool) -> None:
        """Tell the queue that a prompt needs its place no more; ``is_computed``: prefill has computed it."""
        if (queue := self._queues.pop(prompt_id, None)) is not None:
            queue.end.remote(prompt_id, is_computed)

    async def _ask(self, queue: Any, request: PlaceRequest, timeout_s: float) -> Place:
        call = asyncio.create_task(_answer(queue.place.remote(request)))
        self._calls.add(call)
        try:
            await asyncio.wait([call], timeout=timeout_s)
            if not call.done():
                return Place(prompt_id=request.prompt_id, outcome=PlaceOutcome.LATE)
        finally:
            self._calls.discard(call)
            call.cancel()
        if call.cancelled():  # by ``_lose``
            return Place(prompt_id=request.prompt_id, outcome=PlaceOutcome.QUEUE_LOST)
        if (error := call.exception()) is not None:
            logger.debug("the prefill queue gave no place: %s", error)
            return Place(prompt_id=request.prompt_id, outcome=PlaceOutcome.QUEUE_LOST)
        outcome = PlaceOutcome.UNPLACED if call.result() is None else PlaceOutcome.BOUND
        return Place(prompt_id=request.prompt_id, outcome=outcome, replica_id=call.result())

    async def _watch(self, queue: Any, version: int) -> int:
        """Tell the queue that this replica is alive, and wait for its answer. Raises TimeoutError: there is none."""
        self._queue = queue
        async with asyncio.timeout(SILENCE_S):
            await queue.watch.remote(self._caller, known_pools.routed(self._pool))
        return version

    def _lose(self) -> None:
        """The queue does not answer. Until it does, prompts are sent at once, and those that wait for a place too."""
        self._queue = None
        for call in self._calls:
            call.cancel()


async def _answer(call: Any) -> str | None:
    answer: str | None = await call
    return answer
