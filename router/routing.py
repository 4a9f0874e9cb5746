"""What a caller tells the router about one call, and what the router answers: where it sent the call (pure)."""

from dataclasses import dataclass, field
from typing import Protocol

from router.prompt_keys import PromptKeys


class Choice:
    """A router's answer to one call, which the router fills in while the call is on its way.

    Serve returns nothing about a call before a replica has accepted it, and a replica that hangs never accepts. So the
    caller adds this empty object to the call, and the router, which runs in the same process, fills it. The object's
    content does not travel: a replica unpickles an empty one.
    """

    __slots__ = ("replica_id", "unreached")

    def __init__(self, replica_id: str | None = None) -> None:
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


class Routed(Protocol):
    """A request that a ``TandemRouter`` can route."""

    @property
    def routing(self) -> Routing:
        """Where the request may go."""
