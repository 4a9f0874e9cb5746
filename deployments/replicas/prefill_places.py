"""A decode replica's prompts in the prefill queue of its group: first credit for their KV, then a place on prefill."""

import asyncio
import time
from typing import Protocol

from autoscale.slo import SloConfig
from deployments.metrics import PREFILL_PLACE_S, PREFILL_PLACES
from deployments.vllm_seam.engine_stats import EngineLoad
from router import known_pools
from router.config import PrefillQueueConfig
from router.ejection import usable
from router.kv_credit import KvCredit
from router.ray_actors import Bell
from router.ray_prefill_queue import Place, QueueFeed
from router.routing import Routing

# Time between two checks whether KV is free, seconds, while a prompt waits for it. Answers that end free KV, and the
# engine tells of it after its next step.
_CHECK_S = 0.05


class _Engine(Protocol):
    """The statistics of this replica's engine."""

    @property
    def load(self) -> EngineLoad: ...

    @property
    def kv_tokens(self) -> int: ...


class PrefillPlaces:
    """Credits and places of the prompts of one decode replica."""

    def __init__(
        self,
        feed: QueueFeed,
        engine: _Engine,
        config: PrefillQueueConfig,
        slo: SloConfig,
        *,
        pool: str,
        most_ejected_frac: float,
    ) -> None:
        """``pool``: name of the prefill deployment; ``most_ejected_frac``: see ``router.ejection.usable``."""
        self._feed = feed
        self._engine = engine
        self._config = config
        self._slo = slo
        self._pool = pool
        self._most_ejected_frac = most_ejected_frac
        self._credit = KvCredit()
        self._turn = asyncio.Lock()  # prompts get credit in the order in which they came
        self._changed = Bell()  # rings when a promise ends

    async def credit(self, request_id: str, tokens: int) -> bool:
        """Wait until the KV of a prompt will have room, and promise it; ``False``: it would wait too long, or for ever.

        A prompt that an empty engine could not keep does not wait: others would wait behind it.
        """
        if 0 < self._engine.kv_tokens < tokens:
            return False
        try:
            async with asyncio.timeout(self._config.credit_wait_s), self._turn:
                while not self._is_enough(tokens):
                    await self._changed.wait(_CHECK_S)
        except TimeoutError:
            return False
        self._credit.promise(request_id, tokens)
        return True

    async def place(self, tokens: int, routing: Routing, *, arrived_s: float, deadline_s: float) -> Place:
        """Wait for a place of a prompt on a prefill replica; call ``end`` with it in any case.

        ``arrived_s``: arrival of the request at the endpoint; ``deadline_s``: end of the wait; monotonic times.
        """
        began_s = time.monotonic()
        routed = known_pools.routed(self._pool)
        failed = frozenset() if routing.last_resort is None else frozenset({routing.last_resort})
        allowed = usable(routed - routing.exclude, routing.avoid, self._most_ejected_frac)  # as in Serve's router
        place = await self._feed.place(
            tokens,
            waited_s=began_s - arrived_s,
            objective_s=self._slo.objective_s(tokens),
            replicas=routed,
            exclude=routed.difference(allowed) | failed,
            overlap_tokens={} if routing.prompt is None else known_pools.overlap_tokens(self._pool, routing.prompt),
            timeout_s=deadline_s - began_s,
        )
        PREFILL_PLACES.labels(place.outcome).inc()
        PREFILL_PLACE_S.observe(time.monotonic() - began_s)
        return place

    def end(self, place: Place, *, is_computed: bool) -> None:
        """A prompt has left its place; ``is_computed``: with its KV."""
        self._feed.end(place.prompt_id, is_computed=is_computed)

    def observe_prefill(self, seconds: float) -> None:
        """A prompt took this time from its credit to prefill's answer."""
        self._credit.observe_prefill(seconds)

    def withdraw(self, request_id: str) -> None:
        """The KV of a prompt will not come."""
        self._ring(self._credit.withdraw(request_id))

    def begin_answer(self, request_id: str) -> None:
        """An answer has its first token, so its KV is here."""
        self._ring(self._credit.begin(request_id, time.monotonic()))

    def end_answer(self, request_id: str) -> None:
        """An answer has ended, complete or not."""
        self._credit.end(request_id, time.monotonic())
        self._changed.ring()

    def _is_enough(self, tokens: int) -> bool:
        engine = self._engine
        return self._credit.is_enough(tokens, kv_tokens=engine.kv_tokens, kv_usage_frac=engine.load.kv_usage_frac)

    def _ring(self, has_ended: bool) -> None:
        if has_ended:
            self._changed.ring()
