"""How a decode replica lets prefill compute prompts: retries, outages of the pool, and KV that comes too late.

A prompt may be a probe, which is a test. It tests an ejected replica, which has failed often, if the health board
allows it (``router.ejection``). Or it tests a broken link, over which this engine could not pull KV
(``kvtransfer.peers``).
"""

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

from deployments.metrics import PREFILL_BACKLOG, PREFILL_FAILURES, REMOTE_PREFILL_S, ROUTED
from deployments.replicas.adapter_host import AdapterHost
from deployments.replicas.prefill_places import PrefillPlaces
from deployments.replicas.pull_watch import PullWatch
from deployments.wire.call import Call, CallError, CallFailure, PoolCaller
from deployments.wire.messages import PrefillRefusal, PrefillRequest, PrefillResult
from deployments.wire.prefix_hits import note_found
from kvtransfer.topology import Role
from router.backlog import PrefillBacklog
from router.config import RouterConfig
from router.length import PathReason
from router.ray_prefill_queue import PlaceOutcome
from router.retry_budget import RetryBudget
from router.routing import Choice, Routing

logger = logging.getLogger(__name__)

PrefillAnswer = PrefillResult | PrefillRefusal

# Failures in a row that count as an outage of the pool: one prompt at a time tests prefill, and decode computes the
# others. A smaller number takes one bad replica for an outage, a larger one lets more prompts wait in vain.
_OUTAGE_FAILURES = 3
# For its pace (time per token) a shorter prompt counts as one of this length, tokens: most of a short prompt's time
# does not depend on its tokens.
_LEAST_PACE_TOKENS = 500
# Share of a lease within which prefill's answer must reach decode, 0..1. A larger one may let decode pull KV that is
# gone.
_SAFE_LEASE_FRAC = 0.5


class RemotePrefill:
    """The prefill pool of a group, as one decode replica observes it."""

    def __init__(
        self,
        caller: PoolCaller[PrefillAnswer],
        pulls: PullWatch,
        config: RouterConfig,
        *,
        lease_s: float,
        places: PrefillPlaces | None = None,
        adapters: AdapterHost | None = None,
    ) -> None:
        """``lease_s``: seconds for which prefill keeps KV that decode does not ask for. ``adapters``: of this replica.

        ``places``: this replica's prompts in the group's prefill queue; ``None``: prompts are sent at once.
        """
        self.pulls = pulls
        self.places = places
        self._caller = caller
        self._config = config
        self._lease_s = lease_s
        self._adapters = adapters
        self._failures = 0  # number of failed calls since the last answer
        self._retries = RetryBudget()
        self._backlog = PrefillBacklog()
        PREFILL_BACKLOG.set_function(self.backlog_tokens)

    def backlog_tokens(self) -> int:
        """Prompt tokens that wait on prefill, by this replica's estimate."""
        return self._backlog.tokens(time.monotonic())

    async def prefill(self, request: PrefillRequest, arrived_s: float) -> PrefillResult | PathReason:
        """Where a prompt's KV is, or the reason why decode has to compute the prompt.

        ``arrived_s``: monotonic time of the request's arrival at the endpoint.
        """
        if (places := self.places) is None:
            return await self._prefill(request, arrived_s)
        if not await places.credit(request.request_id, len(request.token_ids)):
            return PathReason.NO_CREDIT
        began_s, answer = time.monotonic(), None
        try:
            answer = await self._prefill(request, arrived_s)
        finally:  # also if the client has disconnected
            if isinstance(answer, PrefillResult):
                places.observe_prefill(time.monotonic() - began_s)
            else:
                places.withdraw(request.request_id)
        return answer

    async def _prefill(self, request: PrefillRequest, arrived_s: float) -> PrefillResult | PathReason:
        result = await self._result(request, arrived_s)
        if result is None:
            return PathReason.PREFILL_FAILED
        if self._is_late(result):
            logger.warning("request %s: its KV may be gone from prefill, so decode prefills", request.request_id)
            await self.release(request.request_id, result.kv_transfer_params)
            return PathReason.KV_LATE
        return result

    async def release(self, request_id: str, kv_transfer_params: dict[str, Any]) -> None:
        """Free KV on prefill that the decode engine will not pull."""
        with suppress(Exception):  # this engine has died; the lease on prefill ends by itself
            await self.pulls.release(request_id, kv_transfer_params)

    async def _result(self, request: PrefillRequest, arrived_s: float) -> PrefillResult | None:
        """The result of one replica, or of a second one if the first fails; ``None``: decode computes the prompt."""
        if self._failures >= _OUTAGE_FAILURES and self._backlog.in_flight_tokens:
            return None  # another prompt tests whether prefill answers again
        lacking = self._lacking(request.adapter)
        if lacking is None:
            return None
        self._retries.request()
        deadline_s = time.monotonic() + self._config.prefill_timeout_s
        # The prompt may test one replica: an ejected one, or else one behind a broken link.
        avoid, ejected_probe = await self._caller.health.guide()
        peers, now_s = self.pulls.peers, time.monotonic()
        link_probe = peers.probe(now_s) if ejected_probe is None else None
        probe = ejected_probe or link_probe
        if probe is None and peers.is_cut_off(now_s) and not peers.looks_around(now_s):
            return None  # all links are broken, and it is too early to test one or to look for another replica
        routing = Routing(
            work_tokens=len(request.token_ids),
            avoid=avoid,
            probe=probe,
            exclude=(peers.broken(now_s) - {probe}) | lacking,
            prompt=request.routing.prompt,
        )
        result = None
        try:
            result = await self._placed_attempt(request, routing, arrived_s, deadline_s)
        finally:  # also if the client has disconnected
            has_no_pull = result is None or result.replica_id != link_probe or self._is_late(result)
            if link_probe is not None and has_no_pull:  # the link was not tested, so the next prompt may test it
                peers.unknown(link_probe, time.monotonic())
        may_retry = self._failures < _OUTAGE_FAILURES and time.monotonic() < deadline_s
        if result is None and may_retry and self._retries.take():
            # The router tries the failed replica last, and writes its new choice into the new ``Choice``.
            retry = replace(routing, last_resort=routing.choice.replica_id, probe=None, choice=Choice())
            result = await self._placed_attempt(request, retry, arrived_s, deadline_s)
        return result

    def _lacking(self, adapter: str) -> frozenset[str] | None:
        """Prefill replicas without an adapter, by its identity; ``None``: none has it."""
        if not adapter or self._adapters is None:
            return frozenset()
        return self._adapters.lacking(self._caller.pool, adapter)

    async def _placed_attempt(
        self, request: PrefillRequest, routing: Routing, arrived_s: float, deadline_s: float
    ) -> PrefillResult | None:
        """The result of the replica that the prefill queue names; Serve's router chooses if it names none."""
        if self.places is None or routing.probe is not None:  # a probe has its replica already
            return await self._attempt(replace(request, routing=routing), deadline_s)
        tokens, result = len(request.token_ids), None
        self._backlog.sent(tokens)
        try:
            place = await self.places.place(tokens, routing, arrived_s=arrived_s, deadline_s=deadline_s)
        finally:
            self._backlog.failed(tokens)  # ``_attempt`` counts them again
        if place.outcome is PlaceOutcome.LATE:
            return None
        try:
            placed = replace(routing, preferred=place.replica_id)
            result = await self._attempt(replace(request, routing=placed), deadline_s)
        finally:
            self.places.end(place, is_computed=result is not None)
        return result

    async def _attempt(self, request: PrefillRequest, deadline_s: float) -> PrefillResult | None:
        """The result of one replica; ``None``: it has failed or refused."""
        tokens = len(request.token_ids)
        self._backlog.sent(tokens)
        answer: PrefillAnswer | None = None
        try:
            with self._caller.call(request, deadline_s) as call:
                started_s = time.monotonic()
                try:
                    answer = await call.piece()
                    await call.piece()  # the end of the answer; without it the call would be cancelled
                except CallError as error:
                    self._report_failure(request, call, error)
                if answer is not None:
                    self._report_answer(request, call, answer, started_s)
        except asyncio.CancelledError:
            # The client has disconnected, and prefill aborts the prompt. If prefill's answer is still on the way, the
            # KV is freed when its lease ends.
            if isinstance(answer, PrefillResult):
                await self.release(request.request_id, answer.kv_transfer_params)
            raise
        finally:
            if answer is None:
                self._backlog.failed(tokens)
            else:
                self._backlog.answered(tokens, answer.replica_id, answer.backlog_tokens, time.monotonic())
        return replace(answer, chosen=request.routing.chosen()) if isinstance(answer, PrefillResult) else None

    def _report_answer(
        self, request: PrefillRequest, call: Call[PrefillAnswer], answer: PrefillAnswer, started_s: float
    ) -> None:
        call.health.report_answer()
        if isinstance(answer, PrefillRefusal):
            logger.debug("prefill refuses request %s: %s", request.request_id, answer.why)
        else:
            now_s = time.monotonic()
            REMOTE_PREFILL_S.observe(now_s - started_s)
            if (chosen := request.routing.chosen()) is not None:
                ROUTED.labels(Role.PREFILL, chosen.reason).inc()
            if answer.cached_tokens is not None:
                note_found(
                    self._caller.pool,
                    Role.PREFILL,
                    request.routing,
                    input_tokens=len(request.token_ids),
                    cached_tokens=answer.cached_tokens,
                    block_tokens=answer.block_tokens,
                )
            if answer.computed_s is not None:  # without time in the queue, which is no sign of a slow replica
                thousand_tokens_s = answer.computed_s * 1000 / max(len(request.token_ids), _LEAST_PACE_TOKENS)
                call.health.report_pace(thousand_tokens_s, self._config.outlier.slow_prefill_s)
            self.pulls.peers.heard(answer.replica_id, now_s)
        if self._failures >= _OUTAGE_FAILURES:
            logger.warning("prefill answers again")
        self._failures = 0

    def _report_failure(self, request: PrefillRequest, call: Call[PrefillAnswer], error: CallError) -> None:
        if error.failure is not CallFailure.LOST:  # the call has already reported a lost replica
            call.health.report_failure()
        PREFILL_FAILURES.inc()
        self._failures += 1
        level = logging.WARNING if self._failures == _OUTAGE_FAILURES else logging.DEBUG
        why = f"{error} ({self._config.prefill_timeout_s:g} s)" if error.failure is CallFailure.LATE else error
        logger.log(level, "prefill of request %s failed: %s", request.request_id, why)

    def _is_late(self, result: PrefillResult) -> bool:
        """Whether the KV may be gone.

        From now on this engine's heartbeats extend the lease. But the lease may have ended already if a process or the
        network stood still. Then the engine would pull the blocks of another prompt without an error (vllm issue
        52234).
        """
        return time.time() - result.answered_at_s > _SAFE_LEASE_FRAC * self._lease_s
