"""Calls of replicas through Serve: of all replicas at once, and an error whose class does not show its meaning."""

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from grpc import StatusCode
from grpc.aio import AioRpcError
from ray.serve import context as serve_context
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

logger = logging.getLogger(__name__)


async def answers_in_time(handle: DeploymentHandle, method: str, timeout_s: float, *arguments: Any) -> list[Any]:
    """The answers of the replicas that answer ``method`` within ``timeout_s``; the others are logged and left out.

    ``arguments``: of the method.

    Serve's public ``results_async`` returns no answer at all if one replica does not answer.

    Needs: ``_fetch_replica_results_async`` of what ``DeploymentHandle.broadcast`` returns, and ``get_async`` of each.
    Without it: the metrics page fails with an error that names the missing part.
    """
    until_s, name = time.monotonic() + timeout_s, handle.deployment_name
    try:
        async with asyncio.timeout(timeout_s):
            results = await handle.broadcast(method, *arguments)._fetch_replica_results_async()
    except (TimeoutError, RayServeException) as error:
        # For example, Serve restarts all replicas of this deployment. Other deployments may still answer.
        logger.warning("no replica of %s answers %s: %s", name, method, error or "not in time")
        return []
    replies = [asyncio.ensure_future(result.get_async()) for result in results]
    if not replies:
        return []
    done, late = await asyncio.wait(replies, timeout=max(0.0, until_s - time.monotonic()))
    for reply in late:
        reply.cancel()
    if late:
        numbers = f"{len(late)} of {len(replies)}"
        logger.warning("%s replicas of %s did not answer %s in %g s", numbers, name, method, timeout_s)
    return [reply.result() for reply in done if not reply.cancelled() and reply.exception() is None]


@contextmanager
def own_call_id() -> Iterator[None]:
    """Context in which a call of another replica has an id of its own.

    Serve gives all calls of one request the id of that request. Its router finds waiting calls by this id, so of two
    calls at the same time one is never sent: a completion of two prompts waited for the time limit of prefill.

    Needs: ``_serve_request_context`` of ``ray.serve.context``, a frozen or plain dataclass with
    ``_internal_request_id``; without that id a call gets a new one.
    Without it: no replica serves a request; the error names the missing part.
    """
    present = serve_context._get_serve_request_context()
    token = serve_context._serve_request_context.set(replace(present, _internal_request_id=""))
    try:
        yield
    finally:
        serve_context._serve_request_context.reset(token)


def is_answer_too_large(error: Exception) -> bool:
    """Whether one piece of an answer is larger than gRPC's limit for a message.

    gRPC has no status of its own for this: a server that lacks resources sends the same status with other details.

    Needs: "larger than max" in the details that gRPC gives for such a message.
    Without it: such a request is tried on other replicas and then ends with 503 instead of 400.
    """
    if not isinstance(error, AioRpcError) or error.code() is not StatusCode.RESOURCE_EXHAUSTED:
        return False
    return "larger than max" in (error.details() or "")
