"""The relay of a request over decode replicas: attempts, retries, continued streams, and full replicas."""

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
from deployments.wire.messages import FAILED, FULL, LOST, Frame, failure, full
from router import known_pools
from router.routing import Choice, Routing
from router.stream_pace import StreamPace

logger = logging.getLogger(__name__)

# Share of a request's time limit that a replica must have had to count as failed if a stream got no frame from it. A
# smaller share would count replicas that the request reached late, a larger one would miss some that stand still.
_SILENT_FRAC = 0.5
# Seconds that a request which has lost a replica waits until it tries a full pool again. A smaller value asks full
# replicas more often, a larger one makes the request wait longer than it must.
_FULL_RETRY_S = 0.5
_LOST_FRAME = failure(503, "the decode replica was lost; the request may be sent again", "replica_lost")
_TOO_LARGE_FRAME = failure(
    400,
    "the answer is larger than a replica can send in one piece: request a stream, or fewer answers or logprobs",
    "invalid_request",
)


async def attempt(request: ClientRequest, group: DecodeGroup, routing: Routing) -> AsyncGenerator[Frame, None]:
    """The frames of one decode replica's answer; the last one is a failure if the answer is incomplete."""
    pace, is_health_reported, is_waiting = StreamPace(), False, False
    slow_tpot_s, load, prompt_tokens = request.model.slow_tpot_s, group.load, request.place.tokens
    started_s = time.monotonic()
    with group.caller.call(request.for_decode(routing), request.deadline_s) as call:
        load.requests += 1
        load.prompt_tokens += prompt_tokens
        try:
            while True:
                is_waiting = True
                frame = await call.piece()
                if frame is None:
                    break
                is_waiting, now_s = False, time.monotonic()
                pace_s = pace.frame(sum(map(len, frame.outputs)), now_s - call.since_s, now_s)
                if pace_s is not None:
                    call.health.paced(pace_s, slow_tpot_s)
                if prompt_tokens:  # this is the first frame
                    load.prompt_tokens -= prompt_tokens
                    prompt_tokens = 0
                if frame.error is not None and not is_health_reported:
                    # Before the frame leaves: after a failure the relay may not ask for another one.
                    is_health_reported = _report_health(call, frame)
                yield frame
            if call.has_ended and not is_health_reported:
                call.health.answered()
        except CallError as error:
            yield _failure_frame(request, call, error, started_s)
        finally:
            now_s = time.monotonic()
            pace_s = pace.ended(now_s - call.since_s if is_waiting else 0.0, now_s)
            if pace_s is not None:
                call.health.paced(pace_s, slow_tpot_s)
            load.requests -= 1
            load.prompt_tokens -= prompt_tokens


def _report_health(call: Call[Frame], frame: Frame) -> bool:
    """Report the replica's health from its own error frame. Returns whether it was reported. A full replica is healthy.

    An error in the request itself says nothing about the replica's health.
    """
    if frame.error in FAILED:
        call.health.failed()
    elif frame.error == FULL:
        call.health.answered()
    else:
        return False
    return True


def _failure_frame(request: ClientRequest, call: Call[Frame], error: CallError, started_s: float) -> Frame:
    """The frame of an attempt whose call has failed; reports a replica that gave a stream no frame in time."""
    if error.failure is CallFailure.FULL:
        return full(f"every decode replica is full: {error}")
    if error.failure is CallFailure.TOO_LARGE:
        return _TOO_LARGE_FRAME  # the same answer from another replica would be as large
    if error.failure is CallFailure.LATE:
        # A healthy replica may need longer than the limit for an answer in one piece, or for a request that came late.
        time_limit_s = request.deadline_s - request.arrived_s
        had_time = time.monotonic() - started_s > _SILENT_FRAC * time_limit_s
        if request.place.is_stream and not call.has_begun and had_time:
            call.health.failed()
        message = f"the request took longer than {time_limit_s:g} s (ingress.request_timeout_s)"
        return failure(408, message, "timeout")
    cause = error.__cause__
    if cause is not None:
        # Errors of a lost connection (Serve passes gRPC's on as they are); any other is logged with its traceback.
        is_known = isinstance(cause, (RayError, RayServeException, AioRpcError))
        logger.warning(
            "request %s lost its decode replica: %s", request.request_id, error, exc_info=None if is_known else cause
        )
    return _LOST_FRAME


class Relay:
    """Answers each request from as many decode replicas as it takes."""

    def __init__(self, retries: int) -> None:
        """``retries``: decode replicas that one request may lose and still be answered."""
        self._retries = retries
        self._rng = random.Random()

    async def frames(self, request: ClientRequest) -> AsyncGenerator[Frame, None]:
        """The frames of the answer; if a replica is lost, another one continues the stream."""
        failed: Frame | None = None
        has_moved = False  # whether the request has changed replica and has got no frame since
        while request.lost_replicas <= self._retries:
            group = request.model.choose(request.failed_groups | request.full_groups, self._rng)
            avoid, probe = await group.caller.health.guide()
            routing = Routing(exclude=request.exclude, avoid=avoid, probe=probe)
            is_resumed, failed = not request.sent.is_empty, None
            async with aclosing(attempt(request, group, routing)) as frames:
                async for frame in frames:
                    if frame.error is not None:
                        if _may_retry(request, group, frame.error, routing.choice):
                            failed = frame
                            break
                    elif has_moved:
                        has_moved = False
                        (metrics.RESUMED if is_resumed else metrics.RETRIED).inc()
                    if frame.text:
                        request.sent.add(frame.text, frame.outputs)
                    yield frame
            if failed is None:
                return
            has_moved = await _prepare_retry(request, group, failed.error == FULL, routing.choice) or has_moved
        if failed is not None:
            yield failed


def _may_retry(request: ClientRequest, group: DecodeGroup, error: str, choice: Choice) -> bool:
    """Whether another attempt may answer after this failure.

    All requests of a lost replica move to the other replicas at once, so they may wait for room there. A request that
    has lost no replica does not wait: it tries the replicas that have not refused it yet.
    """
    if error in LOST:
        return True
    return error == FULL and (request.has_lost_replica or _has_others(request, group, choice))


async def _prepare_retry(request: ClientRequest, group: DecodeGroup, is_full: bool, choice: Choice) -> bool:
    """Prepare the next attempt: exclude a replica or a group, or wait for room.

    ``is_full``: the replica has refused the request; otherwise it was lost. Returns whether the attempt counts as a
    lost replica.
    """
    exclude = request.exclude if choice.replica_id is None else request.exclude | {choice.replica_id}
    if is_full and not request.has_lost_replica:  # another replica may have room
        if choice.replica_id is None or not known_pools.has_others(group.pool, exclude):
            request.full_groups.add(group.name)
        request.exclude = exclude
        return False
    if is_full and time.monotonic() + _FULL_RETRY_S < request.deadline_s:
        await asyncio.sleep(_FULL_RETRY_S)
        return False
    # Also a full replica shortly before the deadline: it counts as lost, so that the attempts come to an end.
    request.lost_replicas += 1
    request.failed_groups.add(group.name)
    request.exclude = exclude
    return True


def _has_others(request: ClientRequest, group: DecodeGroup, choice: Choice) -> bool:
    """Whether there is a replica that has not refused or failed the request."""
    if choice.replica_id in request.exclude:  # the router chose an excluded replica, so there was no other
        return False
    excluded = {*request.exclude, choice.replica_id}
    others = [one.pool for one in request.model.serving() if one is not group and one.name not in request.full_groups]
    # This process learns a pool's replicas with its first request to it; until then one of them may have room.
    if any(known_pools.has_others(pool, excluded) or not known_pools.is_known(pool) for pool in others):
        return True
    # Without a choice Serve itself has found every replica of this group full.
    return choice.replica_id is not None and known_pools.has_others(group.pool, excluded)
