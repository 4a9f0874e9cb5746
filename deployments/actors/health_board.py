"""The health board: it counts the failures of replicas that all callers of an application observe, and ejects replicas.

An ejected replica gets no requests for a while, and then a probe: one request that tests it. A suspected replica has
failed lately (``router.ejection``).

One actor per application; Serve starts, watches and ends it with the ingress deployment. It stores nothing: after its
end it takes new failures (``OutlierConfig.failures``) to eject a replica again. Callers retry failed requests on other
replicas anyway.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray import serve

from router.ejection import Observation, OutlierConfig, Outliers
from router.ray_actors import Bell, keep_announced
from router.ray_health import board_key

_WATCH_S = 5.0  # longest wait of a caller for a change, seconds
_PROBE_WATCH_S = 0.5  # the same while a replica is ejected, so that callers learn soon that it may be probed


class HealthBoard:
    """The actor, whose public methods other processes call."""

    def __init__(self, *, configs: Mapping[str, Any]) -> None:
        """``configs``: an ``OutlierConfig`` in JSON for each pool, by the name of its deployment."""
        self._outliers = Outliers({pool: OutlierConfig.model_validate(config) for pool, config in configs.items()})
        self._view: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())  # ejected and suspected replicas
        self._version = 0  # of the view
        self._changed = Bell()  # wakes callers of ``watch``
        key = board_key(serve.get_deployment_actor_context().app_name)
        name = ray.get_runtime_context().get_actor_name() or ""
        self._announcing = asyncio.get_running_loop().create_task(keep_announced(key, name))

    async def observe(self, pool: str, observations: Sequence[Observation]) -> None:
        """Count a caller's observations of a pool, oldest first."""
        now_s = time.monotonic()
        for observation in observations:
            self._outliers.observe(observation, pool, now_s)
        self._update_view(now_s)

    async def probe(self, replica_id: str) -> bool:
        """Whether the caller's next request may test an ejected replica; each test is granted to one caller."""
        return self._outliers.probe(replica_id, time.monotonic())

    async def watch(self, pool: str, version: int) -> tuple[int, frozenset[str], frozenset[str], frozenset[str]]:
        """The version, the ejected replicas, the suspected ones, and the ejected ones of a pool that may be probed.

        Returns at once if the caller's version is old (-1: it has none), otherwise after a change or some seconds.
        """
        if version == self._version:
            await self._changed.wait(_PROBE_WATCH_S if self._view[0] else _WATCH_S)
        now_s = time.monotonic()
        self._update_view(now_s)
        return self._version, *self._view, self._outliers.due(pool, now_s)

    def _update_view(self, now_s: float) -> None:
        view = (self._outliers.ejected(now_s), self._outliers.suspects())
        if view != self._view:
            self._view = view
            self._version += 1
            self._changed.ring()
