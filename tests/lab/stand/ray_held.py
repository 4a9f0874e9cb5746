"""What the replicas of an application hold at one instant, by their own counters."""

import asyncio
import time

import ray
from ray import serve
from ray.exceptions import RayError

# A replica must answer within this time, in seconds.
_TIMEOUT_S = 30.0
# Time between two looks, in seconds.
_POLL_S = 1.0
_ENGINE = ("running_requests", "waiting_requests", "deferred_requests", "kv_usage_frac", "unread_kv_requests")


def placement_groups() -> int:
    """Number of placement groups in the cluster."""
    return sum(group["state"] != "REMOVED" for group in ray.util.placement_group_table().values())


async def held(application: str) -> dict[str, float]:
    """Requests in replicas and in engines, and KV in use, summed over all replicas; all 0 at rest.

    Raises:
        RayError: a replica has just ended.
        TimeoutError: a replica does not answer.
    """
    actors = [
        ray.get_actor(actor["name"], namespace=actor["namespace"])
        for actor in ray.util.list_named_actors(all_namespaces=True)
        if actor["name"].startswith(f"SERVE_REPLICA::{application}#")
    ]
    async with asyncio.timeout(_TIMEOUT_S):
        counts = [await actor.get_num_ongoing_requests.remote() for actor in actors]
    totals = {"ongoing_requests": float(sum(counts)), **dict.fromkeys(_ENGINE, 0.0)}
    for name in serve.status().applications[application].deployments:
        if name == "ingress":
            continue
        handle = serve.get_deployment_handle(name, application)
        if (
            not handle.is_initialized
        ):  # Serve caches the handle, which would belong to an event loop that ends with this call
            handle._init(_run_router_in_separate_loop=True)
        for stats in await handle.broadcast("record_autoscaling_stats").results_async(timeout_s=_TIMEOUT_S):
            for key in _ENGINE:
                totals[key] += stats.get(key, 0.0)  # only prefill has unread KV
    return totals


def left_after(application: str, seconds: float) -> dict[str, float]:
    """What replicas still hold after this time, as ``held``; empty as soon as they hold nothing."""
    until_s = time.monotonic() + seconds
    while True:
        try:
            remaining = {name: value for name, value in asyncio.run(held(application)).items() if value}
        except (RayError, TimeoutError) as error:
            remaining = {f"unknown: {type(error).__name__}": 1.0}
        if not remaining or time.monotonic() > until_s:
            return remaining
        time.sleep(_POLL_S)
