"""Which deployments have replicas, as far as the request routers of this process know.

A module of its own: Serve sends the router's class by value, and with it copies of the globals beside it.
"""

from collections.abc import Collection, Mapping
from typing import Any, Protocol


class _Router(Protocol):
    @property
    def curr_replicas(self) -> Mapping[Any, Any]: ...

    def routed(self) -> Collection[str]: ...


_ROUTERS: dict[str, list[_Router]] = {}


def add(deployment: str, router: _Router) -> None:
    """A router of this process for a deployment."""
    _ROUTERS.setdefault(deployment, []).append(router)


def has_replicas(deployment: str) -> bool:
    """Whether a deployment has replicas; taken for granted before this process's first request to it."""
    return all(router.curr_replicas for router in _ROUTERS.get(deployment, []))


def count(deployment: str) -> int:
    """To how many replicas of a deployment requests go; 0 before this process's first request to it."""
    return max((len(router.routed()) for router in _ROUTERS.get(deployment, [])), default=0)


def is_known(deployment: str) -> bool:
    """Whether this process has sent it a request."""
    return deployment in _ROUTERS


def has_others(deployment: str, than: Collection[str | None]) -> bool:
    """Whether requests go to a replica of a deployment that is none of these, as far as is known."""
    return any(name not in than for router in _ROUTERS.get(deployment, []) for name in router.routed())
