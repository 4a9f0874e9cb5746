"""Replicas of a pool that get requests: those that the plan admits, or all if no plan holds (pure).

A plan holds while the coordinator answers: after a long silence it may be stale.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """The replicas of an application that the last plan admits."""

    admitted: frozenset[str]
    heard_s: float  # time of the coordinator's last answer
    pools: Mapping[str, int] = field(default_factory=dict)  # admitted replicas of each pool that has one


def obeyed(membership: Membership | None, *, now_s: float, silence_s: float) -> Membership | None:
    """The membership if it holds; ``None``: it is unknown, or the last answer is older than ``silence_s``."""
    return membership if membership is not None and now_s - membership.heard_s <= silence_s else None


def routable(replica_ids: Sequence[str], admitted: frozenset[str] | None) -> Sequence[str]:
    """Those of the replicas that the plan admits; ``admitted``: ``None`` if no plan holds.

    They are all replicas if no plan holds or the plan admits none of them: a stale plan must not stop the service.
    """
    if admitted is None:
        return replica_ids
    return [name for name in replica_ids if name in admitted] or replica_ids
