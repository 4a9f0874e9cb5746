"""What all callers of an application know of replicas that fail, in one place: no traffic for them from anybody.

One actor per application, started, watched and ended by Serve with the ingress deployment. It keeps nothing: what it
knew is seen again after its death by three more failures, which callers send elsewhere anyway.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray import serve
from ray.serve.config import DeploymentActorConfig

from router.outliers import OutlierConfig, Outliers, Seen
from router.ray_actors import keep_announced
from router.ray_health import board_key

_WATCH_S = 5.0
# While somebody is ejected, callers hear whether somebody may be probed.
_PROBE_WATCH_S = 0.5


class HealthBoard:
    """See the module; every method is called by other processes."""

    def __init__(self, *, config: Mapping[str, Any]) -> None:
        self._outliers = Outliers(OutlierConfig.model_validate(config))
        self._said: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())
        self._version = 0
        self._changed = asyncio.Event()
        key = board_key(serve.get_deployment_actor_context().app_name)
        name = ray.get_runtime_context().get_actor_name() or ""
        self._announcing = asyncio.get_running_loop().create_task(keep_announced(key, name))

    async def tell(self, pool: str, seen: Sequence[Seen]) -> None:
        """What a caller has seen in a pool, in its order."""
        now_s = time.monotonic()
        for one in seen:
            self._outliers.saw(one, pool, now_s)
        self._note(now_s)

    async def probe(self, replica_id: str) -> bool:
        """Whether the request that asks is the one to show whether an ejected replica still fails."""
        return self._outliers.probe(replica_id, time.monotonic())

    async def watch(self, pool: str, version: int) -> tuple[int, frozenset[str], frozenset[str], frozenset[str]]:
        """Who is ejected, who is suspected, as soon as that is news, and who of a pool may be probed.

        Args:
            pool: which the caller sends to.
            version: what it was told last.
        """
        if version == self._version:
            try:
                async with asyncio.timeout(_PROBE_WATCH_S if self._said[0] else _WATCH_S):
                    await self._changed.wait()
            except TimeoutError:
                pass
        now_s = time.monotonic()
        self._note(now_s)
        return self._version, *self._said, self._outliers.due(pool, now_s)

    def _note(self, now_s: float) -> None:
        said = (self._outliers.ejected(now_s), self._outliers.suspects())
        if said != self._said:
            self._said = said
            self._version += 1
            self._changed.set()
            self._changed = asyncio.Event()


def health_board_actor(config: OutlierConfig) -> DeploymentActorConfig:
    """The actor as Serve starts it with the ingress deployment."""
    return DeploymentActorConfig(
        name="health_board",
        actor_class=ray.remote(HealthBoard),
        init_kwargs={"config": config.model_dump(mode="json")},
        actor_options={"num_cpus": 0, "max_concurrency": 1000},
    )
