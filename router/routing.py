"""What a caller tells the router about one call, and what the router answers: where it sent the call (pure)."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from router.pool_router import ReplicaView
from router.prompt_keys import PromptKeys

# Replicas that an explanation names after the chosen one.
_RUNNERS_UP = 2


class ChoiceReason(StrEnum):
    """Why a router chose a replica; a label of ``tandem_routed_total``."""

    LOAD = "load"  # its queue alone
    PREFIX = "prefix"  # its queue and the part of the prompt that it holds
    SESSION = "session"  # it has the session of the request
    PROBE = "probe"  # it is ejected, and the request tests it


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The replica that a router chose, why, and the best ones beside it, as the router saw them at that moment."""

    replica: ReplicaView
    reason: ChoiceReason
    runners_up: tuple[ReplicaView, ...] = ()


class Choice:
    """A router's answer to one call, which the router fills in while the call is on its way.

    Serve returns nothing about a call before a replica has accepted it, and a replica that hangs never accepts. So the
    caller adds this empty object to the call, and the router, which runs in the same process, fills it. The object's
    content does not travel: a replica unpickles an empty one.
    """

    __slots__ = ("considered", "replica_id", "session_place", "unreached")

    def __init__(self, replica_id: str | None = None) -> None:
        self.considered: tuple[ReplicaView, ...] = ()  # the best replicas in their order, at most a few
        self.session_place: str | None = None  # the replica of the request's session
        self.replica_id = replica_id  # the replica that has the call; ``None`` while the router chooses one
        self.unreached: set[str] = set()  # replicas that the call was sent to and that could not be reached

    def __reduce__(self) -> tuple[type["Choice"], tuple[()]]:
        return Choice, ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Where one call may go."""

    work_tokens: int = 1  # weight of the call in the queue of its replica
    exclude: frozenset[str] = frozenset()  # replicas that the call must not go to, unless it has waited for seconds
    avoid: frozenset[str] = frozenset()  # ejected replicas; the call goes there only if most of the pool is ejected
    probe: str | None = None  # the ejected replica that the call tests; it is tried first
    preferred: str | None = None  # the replica at which the call has a place; it is tried next
    last_resort: str | None = None  # a replica at which the same request has failed; it is tried last
    prompt: PromptKeys | None = None  # pieces of the prompt, by which its cached prefix is found; None: not known
    session: str | None = None  # calls of one session go to one replica, unless it is overloaded; None: no session
    choice: Choice = field(default_factory=Choice, compare=False)  # the router writes here what it chose

    def chosen(self) -> Chosen | None:
        """The choice with its reason; ``None``: no replica was chosen, or not among those that were considered."""
        replica_id, considered = self.choice.replica_id, self.choice.considered
        replica = next((view for view in considered if view.replica_id == replica_id), None)
        if replica is None:
            return None
        if replica_id == self.probe:
            reason = ChoiceReason.PROBE
        elif replica_id == self.choice.session_place:
            reason = ChoiceReason.SESSION
        else:
            reason = ChoiceReason.PREFIX if replica.overlap_tokens else ChoiceReason.LOAD
        others = [view for view in considered if view is not replica]
        return Chosen(replica=replica, reason=reason, runners_up=tuple(others[:_RUNNERS_UP]))


class Routed(Protocol):
    """A request that a ``TandemRouter`` can route."""

    @property
    def routing(self) -> Routing:
        """Where the request may go."""
