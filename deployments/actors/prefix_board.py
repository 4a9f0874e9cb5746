"""The prefix board: it passes on which pieces of prompts the replicas hold, so that all routers know the same.

One actor per application whose routing depends on prefixes; Serve starts, watches and ends it with the ingress
deployment. It stores nothing: after its end replicas report all of their pieces again.
"""

import asyncio
import time
from collections import defaultdict

import ray
from ray import serve

from router.ray_actors import Bell, keep_announced
from router.ray_prefix import prefix_board_key
from router.shared_prefixes import HeldReport, PoolNews, PoolPrefixes

_WATCH_S = 5.0  # longest wait of a router for a change, seconds


class PrefixBoard:
    """The actor, whose public methods other processes call."""

    def __init__(self) -> None:
        # By time, so that the versions of this board are above those of boards before it.
        first_version = time.time_ns() // 1_000_000
        self._pools: defaultdict[str, PoolPrefixes] = defaultdict(lambda: PoolPrefixes(first_version))
        self._changed: defaultdict[str, Bell] = defaultdict(Bell)  # wakes callers of ``watch``, by pool
        key = prefix_board_key(serve.get_deployment_actor_context().app_name)
        name = ray.get_runtime_context().get_actor_name() or ""
        self._announcing = asyncio.get_running_loop().create_task(keep_announced(key, name))

    async def report(self, pool: str, report: HeldReport) -> bool:
        """Take a replica's report. ``False``: the replica must report all of its pieces."""
        prefixes = self._pools[pool]
        before = prefixes.version
        is_taken = prefixes.report(report, time.monotonic())
        if prefixes.version != before:
            self._changed[pool].ring()
        return is_taken

    async def watch(self, pool: str, version: int) -> PoolNews:
        """The changes of a pool after a version. Returns at once if there are any, otherwise after some seconds."""
        prefixes = self._pools[pool]
        if version == prefixes.version:
            await self._changed[pool].wait(_WATCH_S)
        prefixes.drop_silent(time.monotonic())
        return prefixes.since(version)
