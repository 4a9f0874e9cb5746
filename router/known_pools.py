"""Which deployments have replicas, as far as the request routers of this process know.

A module of its own: Serve sends the router's class by value, and with it copies of the globals beside it.
"""

from collections.abc import Collection, Mapping
from typing import Any, Protocol


class _Router(Protocol):
    @property
    def curr_replicas(self) -> Mapping[Any, Any]: ...


_ROUTERS: dict[str, list[_Router]] = {}


def add(deployment: str, router: _Router) -> None:
    """A router of this process for a deployment."""
    _ROUTERS.setdefault(deployment, []).append(router)


def has_replicas(deployment: str) -> bool:
    """Whether a deployment has replicas; taken for granted before this process's first request to it."""
    return all(router.curr_replicas for router in _ROUTERS.get(deployment, []))


def count(deployment: str) -> int:
    """How many replicas a deployment has; 0 before this process's first request to it."""
    return max((len(router.curr_replicas) for router in _ROUTERS.get(deployment, [])), default=0)


def has_others(deployment: str, than: Collection[str]) -> bool:
    """Whether a router of this process knows a replica of a deployment that is none of these."""
    return any(
        replica.unique_id not in than for router in _ROUTERS.get(deployment, []) for replica in router.curr_replicas
    )
