"""The differences that stay, each by a rule with its reason."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from tests.lab.compat.compare import Difference
from tests.lab.compat.shape import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """One rule; every pattern must match the whole of its text.

    Attributes:
        reason: why Tandem's answer is right.
        kind: kind of the difference.
        where: place of the difference.
        shape: name of the shape.
        vllm: what vLLM has.
        tandem: what Tandem has.
    """

    reason: str
    kind: str
    where: str
    shape: str = ".*"
    vllm: str = ".*"
    tandem: str = ".*"

    def holds(self, shape: Shape, difference: Difference) -> bool:
        """Whether this rule explains a difference."""
        pairs = (
            (self.kind, difference.kind),
            (self.where, difference.where),
            (self.shape, shape.name),
            (self.vllm, difference.vllm),
            (self.tandem, difference.tandem),
        )
        return all(re.fullmatch(pattern, text, re.DOTALL) for pattern, text in pairs)


EXPECTED: tuple[Expected, ...] = (
    Expected(
        reason="Tandem names every answer, so that a log line can be found.",
        kind="header",
        where="x-request-id",
        vllm="",
    ),
)


def rule_of(shape: Shape, difference: Difference, rules: Iterable[Expected] = EXPECTED) -> Expected | None:
    """The first rule that explains a difference; ``None``: none does."""
    return next((rule for rule in rules if rule.holds(shape, difference)), None)
