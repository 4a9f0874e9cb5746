"""Replicas of a pool that get requests: those that the plan admits, or all if no plan holds (pure)."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """Admitted replicas of an application by the last plan, and the pools that have any."""

    admitted: frozenset[str]
    heard_s: float  # time of the coordinator's last answer
    pools: frozenset[str] = frozenset()


def obeyed(membership: Membership | None, *, now_s: float, silence_s: float) -> Membership | None:
    """The membership if it holds; ``None``: it is unknown, or the coordinator was silent for longer than allowed."""
    return membership if membership is not None and now_s - membership.heard_s <= silence_s else None


def routable(replica_ids: Sequence[str], admitted: frozenset[str] | None) -> Sequence[str]:
    """Replicas that may get requests; one that the plan does not admit yet gets none.

    All replicas, if no plan holds or it admits none of these: a stale plan must not stop the service.
    """
    if admitted is None:
        return replica_ids
    return [name for name in replica_ids if name in admitted] or replica_ids
