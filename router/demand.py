"""Requests that users ask one model for at one replica of the endpoint, whether they are served or not (pure).

The autoscaler sizes by them: replicas of engines see only the requests that admission lets through. A request that a
limit of its own key refuses is no demand, since more replicas would not serve it.
"""

from collections import Counter
from dataclasses import dataclass, field

from router.admission_config import Priority


@dataclass(slots=True)
class Demand:
    """Counters since the replica's start; tokens are prompt tokens as the endpoint estimates them.

    Attributes:
        offered_requests: requests that were served, wait, or were refused for lack of capacity.
        offered_tokens: their prompt tokens.
        offered_tokens_squared: sum of the squares of their prompt lengths, for the spread of lengths.
        passed_requests: those of them that went on to the engines.
        passed_tokens: prompt tokens of the requests that went on.
        refused: those of them that were refused or dropped, by reason and priority.
    """

    offered_requests: int = 0
    offered_tokens: int = 0
    offered_tokens_squared: int = 0
    passed_requests: int = 0
    passed_tokens: int = 0
    refused: Counter[tuple[str, Priority]] = field(default_factory=Counter)

    def offer(self, tokens: int) -> None:
        """Count a request that arrives; ``tokens``: length of its prompt."""
        self.offered_requests += 1
        self.offered_tokens += tokens
        self.offered_tokens_squared += tokens * tokens

    def offer_unread(self) -> None:
        """Count a request that was refused before its body was read: its prompt counts with the mean length so far."""
        self.offer(self.offered_tokens // self.offered_requests if self.offered_requests else 0)

    def let_pass(self, tokens: int) -> None:
        """Count a request that goes on to the engines."""
        self.passed_requests += 1
        self.passed_tokens += tokens

    def figures(self) -> dict[str, float]:
        """The counters by name, for the endpoint's report; refusals are named ``refused_REASON_PRIORITY``."""
        refused = {f"refused_{reason}_{priority.name.lower()}": n for (reason, priority), n in self.refused.items()}
        return {
            "offered_requests": float(self.offered_requests),
            "offered_tokens": float(self.offered_tokens),
            "offered_tokens_squared": float(self.offered_tokens_squared),
            "passed_requests": float(self.passed_requests),
            "passed_tokens": float(self.passed_tokens),
            **{name: float(number) for name, number in refused.items()},
        }

    def refuse(self, reason: str, priority: Priority) -> None:
        """Count a request that is refused, or dropped after a wait, for lack of capacity."""
        self.refused[reason, priority] += 1
