"""The routing facts of one call: where it may go, and where its router sent it (pure)."""

from dataclasses import dataclass, field
from typing import Protocol


class Choice:
    """A router's answer to one call, which the router fills in while the call is on its way.

    Serve returns nothing about a call before a replica has accepted it, and a replica that hangs never accepts. So the
    caller adds this empty object to the call, and the router, which runs in the same process, fills it. The request
    stays as its caller made it. The object does not travel: a replica unpickles an empty one.
    """

    __slots__ = ("replica_id", "unreached")

    def __init__(self, replica_id: str | None = None) -> None:
        self.replica_id = replica_id  # that has the call; ``None`` until one is chosen, or while another one is
        self.unreached: set[str] = set()  # replicas that did not take the call: they could not be reached

    def __reduce__(self) -> tuple[type["Choice"], tuple[()]]:
        return Choice, ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Where one call may go."""

    work_tokens: int = 1  # weight of the call in the queue of its replica
    exclude: frozenset[str] = frozenset()  # replicas that the call must not go to; it waits for another one first
    avoid: frozenset[str] = frozenset()  # replicas that fail; it goes there only where most of the pool fail
    probe: str | None = None  # the ejected replica that it tests; tried first
    last_resort: str | None = None  # the replica that has failed this very request; tried last
    choice: Choice = field(default_factory=Choice, compare=False)  # where the router writes what it chose


class Routed(Protocol):
    """A request that a ``TandemRouter`` can route."""

    @property
    def routing(self) -> Routing:
        """Its routing facts."""
