"""Which of a pool's replicas get requests: the plan's admitted ones; fails open (pure)."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """The admitted replicas of an application, by the last plan, and the pools that have any.

    ``heard_s`` is when the coordinator last spoke.
    """

    admitted: frozenset[str]
    heard_s: float
    pools: frozenset[str] = frozenset()


def obeyed(membership: Membership | None, *, now_s: float, silence_s: float) -> Membership | None:
    """What holds now; ``None`` where there is nothing, or the coordinator is silent for too long."""
    if membership is None or now_s - membership.heard_s > silence_s:
        return None
    return membership


def routable(replica_ids: Sequence[str], admitted: frozenset[str] | None) -> Sequence[str]:
    """The replicas that may be routed to; a replica that the plan does not know yet is held.

    All of them where no plan holds, or where it admits none of them: a gate that has lost touch must not stop the
    service.
    """
    if admitted is None:
        return replica_ids
    return [name for name in replica_ids if name in admitted] or replica_ids
