"""Which deployments have replicas, as far as the request routers of this process know.

This is a module of its own, since it has a global. Serve pickles the router's class by value, and each copy would bring
its own copy of a global in the same module.
"""

from collections.abc import Collection, Mapping
from typing import Any, Protocol

from router.pool_router import ReplicaView
from router.prompt_keys import PromptKeys


class _Router(Protocol):
    @property
    def curr_replicas(self) -> Mapping[Any, Any]: ...

    def routed(self) -> Collection[str]: ...

    def overlap_tokens(self, prompt: PromptKeys) -> Mapping[str, int]: ...

    def note_false_hit(self, replica: ReplicaView, prompt: PromptKeys, found_tokens: int) -> None: ...


# Registry: the request routers of this process by deployment. Serve makes them, and returns them to no caller.
_ROUTERS: dict[str, list[_Router]] = {}


def add(deployment: str, router: _Router) -> None:
    """Register a router of this process for a deployment."""
    _ROUTERS.setdefault(deployment, []).append(router)


def has_replicas(deployment: str) -> bool:
    """Whether a deployment has replicas; true before this process's first request to it."""
    return all(router.curr_replicas for router in _ROUTERS.get(deployment, []))


def count(deployment: str) -> int:
    """Number of a deployment's replicas that requests go to; 0 before this process's first request to it."""
    return max((len(router.routed()) for router in _ROUTERS.get(deployment, [])), default=0)


def routed(deployment: str) -> frozenset[str]:
    """Names of a deployment's replicas that requests go to; empty before this process's first request to it."""
    return frozenset(name for router in _ROUTERS.get(deployment, []) for name in router.routed())


def overlap_tokens(deployment: str, prompt: PromptKeys) -> dict[str, int]:
    """Tokens of a prompt that replicas of a deployment hold, by replica; replicas without any are left out."""
    overlaps: dict[str, int] = {}
    for router in _ROUTERS.get(deployment, []):
        overlaps |= router.overlap_tokens(prompt)
    return overlaps


def note_false_hit(deployment: str, replica: ReplicaView, prompt: PromptKeys, found_tokens: int) -> None:
    """Correct what this process's routers of a deployment take a replica to hold of a prompt.

    ``replica``: as its router saw it. ``found_tokens``: what its engine had, in the tokens of ``prompt``.
    """
    for router in _ROUTERS.get(deployment, []):
        router.note_false_hit(replica, prompt, found_tokens)


def is_known(deployment: str) -> bool:
    """Whether this process has sent a request to a deployment."""
    return deployment in _ROUTERS


def has_others(deployment: str, excluded: Collection[str | None]) -> bool:
    """Whether requests go to a replica of a deployment that is not excluded."""
    return any(name not in excluded for router in _ROUTERS.get(deployment, []) for name in router.routed())
