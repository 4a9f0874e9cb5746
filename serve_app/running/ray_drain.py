"""Ends an application without losing requests: its endpoint answers what it has begun before anything is deleted."""

import asyncio
import time

from serve_app.local.cluster import DeployError
from serve_app.running.ray_serve import status_of

# Time, seconds, that a replica of the endpoint has to answer after the drain's timeout.
_ANSWER_S = 10.0
# Seconds between two checks.
_POLL_S = 0.5
# Longest time of a deletion, seconds; more than the default of graceful_shutdown_timeout_s.
_DELETION_TIMEOUT_S = 900.0


def drain(application: str, timeout_s: float) -> int | None:
    """Wait until every request of an application has been answered; its endpoint refuses new ones meanwhile (503).

    Returns the number of requests that were not answered within ``timeout_s``; ``None``: a replica of the endpoint did
    not report.
    """
    return asyncio.run(_drain(application, timeout_s))


async def _drain(application: str, timeout_s: float) -> int | None:
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    until_s = time.monotonic() + timeout_s
    try:
        broadcast = serve.get_deployment_handle("ingress", application).broadcast("drain", timeout_s)
        answers = await broadcast.results_async(timeout_s=timeout_s + _ANSWER_S, return_exceptions=True)
        # Replicas that an update has replaced finish their requests by themselves.
        while status_of(application).replicas.get("ingress", {}).get("STOPPING") and time.monotonic() < until_s:
            await asyncio.sleep(_POLL_S)
    except (RayError, RayServeException, TimeoutError):  # the endpoint is not Tandem's, does not run, or hangs
        return None
    counts = [answer for answer in answers if isinstance(answer, int)]
    return sum(counts) if len(counts) == len(answers) else None


def delete(application: str, timeout_s: float) -> int | None:
    """Drain an application for at most ``timeout_s``, delete it and wait until it is gone; returns as ``drain``.

    A request that was not answered by then has the ``graceful_shutdown_timeout_s`` of its replica to end. Raises
    DeployError after a quarter of an hour.
    """
    from ray import serve

    unanswered = drain(application, timeout_s)
    serve.delete(application, _blocking=False)
    until_s = time.monotonic() + _DELETION_TIMEOUT_S
    while application in serve.status().applications:
        if time.monotonic() > until_s:
            raise DeployError(
                f"{application} is still being deleted after {_DELETION_TIMEOUT_S:g} s: see `tandem status`"
            )
        time.sleep(_POLL_S)
    return unanswered


def unanswered_message(unanswered: int | None) -> str | None:
    """Message about requests that were not answered; ``None``: all were answered."""
    if unanswered is None:
        return "how many requests were not answered is unknown: a replica of the endpoint does not say"
    return f"{unanswered} requests were not answered in time" if unanswered else None
