"""Ends an application politely: its endpoint answers what it has begun, and only then is anything deleted."""

import asyncio
import time

from serve_app.cluster import DeployError

_MORE_S = 10.0
_POLL_S = 0.5
# Beyond every replica's own graceful_shutdown_timeout_s by default.
_DELETED_S = 900.0


def drain(application: str, timeout_s: float) -> int | None:
    """Wait until every request has been answered; the endpoint refuses new ones meanwhile (503).

    Args:
        application: on the cluster that this process is connected to.
        timeout_s: how long to wait.

    Returns:
        How many requests were left after ``timeout_s``; ``None`` where a replica of the endpoint did not say.
    """
    return asyncio.run(_drain(application, timeout_s))


async def _drain(application: str, timeout_s: float) -> int | None:
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    until_s = time.monotonic() + timeout_s
    try:
        asked = serve.get_deployment_handle("ingress", application).broadcast("drain", timeout_s)
        answers = await asked.results_async(timeout_s=timeout_s + _MORE_S, return_exceptions=True)
        # Those that an update has replaced end what they have by themselves.
        while _stopping(application) and time.monotonic() < until_s:
            await asyncio.sleep(_POLL_S)
    except (RayError, RayServeException, TimeoutError):  # no endpoint of ours, none that runs, or one that hangs
        return None
    left = [one for one in answers if isinstance(one, int)]
    return sum(left) if len(left) == len(answers) else None


def _stopping(application: str) -> int:
    from ray import serve

    status = serve.status().applications.get(application)
    ingress = None if status is None else status.deployments.get("ingress")
    return 0 if ingress is None else ingress.replica_states.get("STOPPING", 0)


def delete(application: str, timeout_s: float) -> int | None:
    """Drain an application, delete it and wait until it is gone.

    Args:
        application: on the cluster that this process is connected to.
        timeout_s: how long requests may take before it is deleted; replicas then end what they have in their own time.

    Returns:
        As of ``drain``.

    Raises:
        DeployError: it is still there after a quarter of an hour.
    """
    from ray import serve

    left = drain(application, timeout_s)
    serve.delete(application, _blocking=False)
    until_s = time.monotonic() + _DELETED_S
    while application in serve.status().applications:
        if time.monotonic() > until_s:
            raise DeployError(f"{application} is still being deleted after {_DELETED_S:g} s: see `tandem status`")
        time.sleep(_POLL_S)
    return left


def said(left: int | None) -> str | None:
    """What is told of requests that were not answered; nothing where all were."""
    if left is None:
        return "how many requests were not answered is unknown: a replica of the endpoint does not say"
    return f"{left} requests were not answered in time" if left else None
