"""A claim of the operators' paper under both readings, and the reason where it does not come out (pure)."""

from collections.abc import Mapping
from dataclasses import dataclass

from tests.lab.papers.claim import Claim


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one reading gives: in words, and whether that is what the paper says."""

    ours: str
    is_reproduced: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperRow:
    """One row of ``make reproduce-operators``.

    ``source``, ``what``, ``claimed``, ``tolerance``: as in ``Claim``. ``results``: by the name of the reading.
    ``reason``: by reading, what was found to be the cause if it does not come out.
    """

    source: str
    what: str
    claimed: str
    tolerance: str
    results: Mapping[str, Result]
    reason: Mapping[str, str]

    def claims(self, assumption: str) -> list[Claim]:
        """One claim for each reading."""
        return [
            Claim(
                source=f"operators, {self.source}",
                what=f"{self.what}; {name}",
                claimed=self.claimed,
                ours=result.ours,
                tolerance=self.tolerance,
                is_reproduced=result.is_reproduced,
                assumption=assumption + (f" {self.reason[name]}" if not result.is_reproduced else ""),
            )
            for name, result in self.results.items()
        ]
