"""The relay of a request over decode replicas: attempts, retries, resumed streams, and full replicas.

An attempt is one call of one replica. A full replica has no room for the request. A lost replica has ended, hangs, or
has ended the answer too early.
"""

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from grpc.aio import AioRpcError
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from deployments import metrics
from deployments.endpoint.client_request import ClientRequest
from deployments.endpoint.served_model import DecodeGroup
from deployments.wire.call import Call, CallError, CallFailure
from deployments.wire.messages import FAILED, FULL, LOST, Frame, PromptRoute, failure, full
from deployments.wire.prefix_hits import note_found
from kvtransfer.topology import Role
from router import known_pools
from router.routing import Choice, Routing
from router.stream_pace import StreamPace

logger = logging.getLogger(__name__)

# Share of a request's time limit. At the deadline, a replica counts as failed if it has sent no frame of a stream for
# longer than this. A smaller share would count replicas that the request reached late, a larger one would miss some
# that hang.
_SILENT_FRAC = 0.5
# Seconds that a request that has lost a replica waits after an attempt at a full one. A smaller value loads full
# replicas with more attempts, a larger one makes the request wait longer than it must.
_FULL_RETRY_S = 0.5
_LOST_FRAME = failure(503, "the decode replica was lost; the request may be sent again", "replica_lost")
_TOO_LARGE_FRAME = failure(
    400,
    "the answer is larger than a replica can send in one piece: request a stream, or fewer answers or logprobs",
    "invalid_request",
)


async def attempt(request: ClientRequest, group: DecodeGroup, routing: Routing) -> AsyncGenerator[Frame, None]:
    """The frames of one decode replica's answer; if the answer is incomplete, the last frame is a failure."""
    # ``pace``: seconds per token of this stream, by which the health board finds slow replicas.
    pace, is_health_reported, is_waiting = StreamPace(), False, False
    slow_tpot_s, load = request.model.slow_tpot_s, group.load
    waiting_prompt_tokens = request.place.tokens  # part of the group's load until the first frame, then 0
    started_s = time.monotonic()
    with group.caller.call(request.for_decode(routing), request.deadline_s) as call:
        load.requests += 1
        load.prompt_tokens += waiting_prompt_tokens
        try:
            while True:
                is_waiting = True
                frame = await call.piece()
                if frame is None:
                    break
                is_waiting, now_s = False, time.monotonic()
                if frame.route is not None:
                    _note_route(request, group, routing, frame.route)
                tokens = sum(map(len, frame.outputs))
                pace_s = pace.frame(tokens, now_s - call.since_s, now_s)
                if pace_s is not None:
                    call.health.report_pace(pace_s, slow_tpot_s)
                load.prompt_tokens -= waiting_prompt_tokens
                waiting_prompt_tokens = 0
                if frame.error is not None and not is_health_reported:
                    # Before the ``yield``: after a failure the relay may take no further frame.
                    is_health_reported = _report_health(call, frame)
                yield frame
            # A call that has not ended failed after its whole answer; then nothing is reported.
            if call.has_ended and not is_health_reported:
                call.health.report_answer()
            if (chosen := routing.chosen()) is not None:
                metrics.ROUTED.labels(Role.DECODE, chosen.reason).inc()
        except CallError as error:
            yield _failure_frame(request, call, error, started_s)
        finally:
            now_s = time.monotonic()
            pace_s = pace.ended(now_s - call.since_s if is_waiting else 0.0, now_s)
            if pace_s is not None:
                call.health.report_pace(pace_s, slow_tpot_s)
            load.requests -= 1
            load.prompt_tokens -= waiting_prompt_tokens


def _note_route(request: ClientRequest, group: DecodeGroup, routing: Routing, route: PromptRoute) -> None:
    """Note where the prompt was computed, and whether the decode engine had of it what the router expected."""
    request.chosen, request.prompt_route = routing.chosen(), route
    if request.pieces is not None:
        request.model.note_tokens(request.pieces, route.input_tokens)
    note_found(
        group.pool,
        Role.DECODE,
        routing,
        input_tokens=route.input_tokens,
        cached_tokens=route.cached_tokens,
        block_tokens=route.block_tokens,
    )


def _report_health(call: Call[Frame], frame: Frame) -> bool:
    """Report a replica's health from its error frame; a full replica is healthy.

    Returns ``False`` if the error is in the request, which shows nothing about the replica.
    """
    if frame.error in FAILED:
        call.health.report_failure()
    elif frame.error == FULL:
        call.health.report_answer()
    else:
        return False
    return True


def _failure_frame(request: ClientRequest, call: Call[Frame], error: CallError, started_s: float) -> Frame:
    """The last frame of an attempt whose call has failed.

    If the deadline has passed, it also reports a replica that has sent no frame of a stream for long.
    """
    if error.failure is CallFailure.FULL:
        return full(f"every decode replica is full: {error}")
    if error.failure is CallFailure.TOO_LARGE:
        return _TOO_LARGE_FRAME  # the answer of another replica would be as large
    if error.failure is CallFailure.LATE:
        # A healthy replica may be too slow for an answer in one piece, or for a request that reached it late.
        time_limit_s = request.deadline_s - request.arrived_s
        was_silent_long = time.monotonic() - started_s > _SILENT_FRAC * time_limit_s
        if request.place.is_stream and not call.has_begun and was_silent_long:
            call.health.report_failure()
        message = f"the request took longer than {time_limit_s:g} s (ingress.request_timeout_s)"
        return failure(408, message, "timeout")
    cause = error.__cause__
    if cause is not None:
        # A lost connection raises one of these errors (Serve does not wrap gRPC's). Others are logged with a traceback.
        is_usual = isinstance(cause, (RayError, RayServeException, AioRpcError))
        logger.warning(
            "request %s lost its decode replica: %s", request.request_id, error, exc_info=None if is_usual else cause
        )
    return _LOST_FRAME


class Relay:
    """Answers each request from one decode replica, or from further ones if replicas are lost or full."""

    def __init__(self, retries: int) -> None:
        """``retries``: number of decode replicas that a request may lose and still be answered."""
        self._retries = retries
        self._rng = random.Random()

    async def frames(self, request: ClientRequest) -> AsyncGenerator[Frame, None]:
        """The frames of the answer; if a replica is lost, another one continues the stream."""
        has_moved = False  # whether the request has lost a replica, and no frame has come since
        while True:
            group = request.choose_group(self._rng)
            # ``avoid``: ejected replicas, which have failed often. ``probe``: one of them, which this request tests.
            avoid, probe = await group.caller.health.guide()
            # During the attempt, the router writes the replica that it chose into ``routing.choice``.
            routing = Routing(
                exclude=request.exclude | request.lacking(group.pool),
                avoid=avoid,
                probe=probe,
                preferred=None if request.holder is None else request.holder.replica_id,
                prompt=request.pieces,
                session=request.session,
            )
            is_resumed = request.sent.frames > 0
            failure_frame: Frame | None = None
            async with aclosing(attempt(request, group, routing)) as frames:
                async for frame in frames:
                    if frame.error is not None:
                        if _may_retry(request, group, frame.error, routing.choice):
                            failure_frame = frame
                            break
                    elif has_moved:
                        has_moved = False
                        (metrics.RESUMED if is_resumed else metrics.RETRIED).inc()
                    if frame.text:
                        request.sent.add(frame.text, frame.outputs, frame.usage)
                    yield frame
            if failure_frame is None:
                return
            if await _prepare_retry(request, group, failure_frame.error == FULL, routing.choice):
                has_moved = True
            if request.lost_replicas > self._retries:
                yield failure_frame
                return


def _may_retry(request: ClientRequest, group: DecodeGroup, error: str, choice: Choice) -> bool:
    """Whether another attempt may answer after this failure.

    All requests of a lost replica move to other replicas at once, so they may wait for room there. Any other request
    does not wait: it tries each replica once.
    """
    if error == FULL:
        return request.lost_replicas > 0 or _has_others(request, group, choice)
    return error in LOST


async def _prepare_retry(request: ClientRequest, group: DecodeGroup, is_full: bool, choice: Choice) -> bool:
    """Prepare the next attempt: exclude a replica or a group, or wait for room.

    ``is_full``: the replica had no room; otherwise it was lost. Returns whether the attempt counts as a lost replica.
    """
    # If no replica was chosen, Serve's queue for the pool was full, or the pool has no replica.
    exclude = request.exclude if choice.replica_id is None else request.exclude | {choice.replica_id}
    if is_full and not request.lost_replicas:  # another replica may have room
        if choice.replica_id is None or not known_pools.has_others(group.pool, exclude | request.lacking(group.pool)):
            request.full_groups.add(group.name)
        request.exclude = exclude
        return False
    if is_full and time.monotonic() + _FULL_RETRY_S < request.deadline_s:
        await asyncio.sleep(_FULL_RETRY_S)
        return False
    # Shortly before the deadline a full replica counts as lost too, so that the number of attempts is bounded.
    request.lost_replicas += 1
    request.failed_groups.add(group.name)
    request.exclude = exclude
    return True


def _has_others(request: ClientRequest, group: DecodeGroup, choice: Choice) -> bool:
    """Whether there may be a replica that has not refused or failed the request."""
    if choice.replica_id in request.exclude:  # the router chose an excluded replica, so there was no other
        return False
    excluded = {*request.exclude, choice.replica_id}
    other_pools = [
        other.pool for other in request.model.serving() if other is not group and other.name not in request.full_groups
    ]
    # This process learns a pool's replicas with its first request to the pool; until then one of them may have room.
    if any(
        known_pools.has_others(pool, excluded | request.lacking(pool)) or not known_pools.is_known(pool)
        for pool in other_pools
    ):
        return True
    # If no replica was chosen, Serve's queue was full, so no replica of this group has room.
    return choice.replica_id is not None and known_pools.has_others(group.pool, excluded | request.lacking(group.pool))
