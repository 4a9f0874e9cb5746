"""Has an application's endpoint answer what it has begun and take nothing new."""

import asyncio
from contextlib import suppress

_MORE_S = 10.0


def drain(application: str, timeout_s: float) -> int:
    """Wait until every request has been answered; the endpoint refuses new ones from now on (503).

    Args:
        application: on the cluster that this process is connected to.
        timeout_s: how long to wait.

    Returns:
        How many requests were left after ``timeout_s``; none where the endpoint is not there.
    """
    return asyncio.run(_drain(application, timeout_s))


async def _drain(application: str, timeout_s: float) -> int:
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    # No endpoint of ours, none that runs, or one that hangs: nothing to wait for.
    with suppress(RayError, RayServeException, TimeoutError):
        asked = serve.get_deployment_handle("ingress", application).broadcast("drain", timeout_s)
        left = await asked.results_async(timeout_s=timeout_s + _MORE_S, return_exceptions=True)
        return sum(one for one in left if isinstance(one, int))
    return 0
