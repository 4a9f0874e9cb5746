"""The prefill queue of one group: an actor in which the prompts of all its decode replicas wait for a prefill replica.

Serve starts, watches and ends it with the ingress deployment. It stores nothing. After its end decode replicas send
prompts at once, until Serve has started it again; then it knows nothing of the prompts that prefill still has, and may
bind a window too much to a replica.
"""

import asyncio
import time
from typing import Any

import ray
from ray import serve

from router.config import PrefillQueueConfig
from router.prefill_order import WaitingPrompt
from router.prefill_scheduler import PrefillScheduler
from router.ray_actors import keep_announced
from router.ray_prefill_queue import SILENCE_S, PlaceRequest, queue_key

_WATCH_S = 1.0  # time until a decode replica that follows the queue gets an answer, seconds
# Most prompts that wait here. Ray lets an actor have a limited number of calls at a time, and each waiting prompt is
# one: with all of them in use, no prompt could be reported as computed.
MOST_WAITING = 5_000
# Calls at a time: the waiting prompts, and room for as many others.
MAX_CALLS = 2 * MOST_WAITING


class PrefillQueue:
    """The actor, whose public methods decode replicas call."""

    def __init__(self, *, pool: str, config: Any, lease_s: float) -> None:
        """An empty queue.

        ``pool``: name of the prefill pool's deployment; ``config``: its ``PrefillQueueConfig`` in JSON; ``lease_s``:
        time, seconds, after which no decode replica waits for a bound prompt any more.
        """
        self._lease_s = lease_s
        self._scheduler = PrefillScheduler(PrefillQueueConfig.model_validate(config))
        self._replicas: frozenset[str] = frozenset()
        self._places: dict[str, asyncio.Future[str | None]] = {}  # answers that waiting prompts wait for, by name
        self._heard_s: dict[str, float] = {}  # monotonic time of the last call of each decode replica
        key = queue_key(serve.get_deployment_actor_context().app_name, pool)
        name = ray.get_runtime_context().get_actor_name() or ""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(keep_announced(key, name)), loop.create_task(self._sweep())]

    async def place(self, request: PlaceRequest) -> str | None:
        """The replica that a prompt is bound to, once one has room.

        ``None``: no replica may compute it, too many prompts wait, or ``end`` was called meanwhile.
        """
        now_s = self._hear(request.caller)
        if not request.replicas:  # the router of a new decode replica does not know the prefill replicas yet
            return None
        self._set_replicas(request.replicas, now_s)
        arrived_s = now_s - request.waited_s
        prompt = WaitingPrompt(
            prompt_id=request.prompt_id,
            tokens=request.tokens,
            arrived_s=arrived_s,
            deadline_s=arrived_s + request.objective_s,
            caller=request.caller,
            exclude=request.exclude,
            overlap_tokens=request.overlap_tokens,
        )
        if not self._scheduler.has_replica(prompt) or self._scheduler.waiting >= MOST_WAITING:
            return None
        place = self._places[request.prompt_id] = asyncio.get_running_loop().create_future()
        self._scheduler.add(prompt, now_s)
        self._bind(now_s)
        return await place

    async def end(self, prompt_id: str, is_computed: bool) -> None:
        """A prompt needs its place no more, or waits no longer."""
        now_s = time.monotonic()
        self._scheduler.end(prompt_id, now_s, is_computed=is_computed)
        self._answer(prompt_id, None)
        self._bind(now_s)

    async def watch(self, caller: str, replicas: frozenset[str]) -> None:
        """A decode replica keeps this call open as long as it lives.

        ``replicas``: as in ``PlaceRequest``, so that prompts which wait get a new replica before the next prompt comes.
        """
        now_s = self._hear(caller)
        if replicas:
            self._set_replicas(replicas, now_s)
            self._bind(now_s)
        await asyncio.sleep(_WATCH_S)
        self._hear(caller)

    def _set_replicas(self, replicas: frozenset[str], now_s: float) -> None:
        if replicas != self._replicas:
            self._replicas = replicas
            self._scheduler.set_replicas(replicas, now_s)

    def _hear(self, caller: str) -> float:
        now_s = self._heard_s[caller] = time.monotonic()
        return now_s

    def _bind(self, now_s: float) -> None:
        for prompt, replica_id in self._scheduler.bind(now_s):
            self._answer(prompt.prompt_id, replica_id)

    def _answer(self, prompt_id: str, replica_id: str | None) -> None:
        place = self._places.pop(prompt_id, None)
        if place is not None and not place.done():
            place.set_result(replica_id)

    async def _sweep(self) -> None:
        """Free places that no decode replica needs any more, again and again."""
        while True:
            await asyncio.sleep(_WATCH_S)
            now_s = time.monotonic()
            self._drop_silent(now_s)
            self._scheduler.expire(self._lease_s, now_s)
            self._bind(now_s)

    def _drop_silent(self, now_s: float) -> None:
        silent = [caller for caller, heard_s in self._heard_s.items() if now_s - heard_s > SILENCE_S]
        for caller in silent:
            del self._heard_s[caller]
            for prompt_id in self._scheduler.drop(caller, now_s):
                self._answer(prompt_id, None)
