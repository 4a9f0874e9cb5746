"""Which replicas get no traffic for a while, since they fail or are slow, and who may try whether they do again (pure).

Source: the pattern is Envoy's outlier detection (https://www.envoyproxy.io/docs/envoy/latest/intro/arch_overview/upstream/outlier):
consecutive failures, ejections that grow longer, a panic threshold. Here what all callers saw counts together, and a
replica returns by one probe at a time instead of by the clock alone.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field


class OutlierConfig(BaseModel):
    """Bounds of ejection."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    failures: int = Field(
        3,
        ge=1,
        le=100,
        description="A replica that fails so often, and half of the time, of late gets no more traffic.",
    )
    ejection_s: float = Field(
        5.0,
        gt=0.0,
        description="For so long, and twice as long each time that its probe fails; then one request tries it.",
    )
    most_ejection_s: float = Field(60.0, gt=0.0)
    most_frac: float = Field(
        0.5,
        ge=0.0,
        le=1.0,
        description="Where a larger share of a pool is to be ejected the pool is what fails: nobody is.",
    )
    slow_factor: float = Field(
        5.0, gt=1.0, description="An answer counts as failed whose pace is so many times what is usual in its pool,"
    )
    slow_tpot_s: float = Field(0.25, ge=0.0, description="and, of a stream on decode, slower than this per token,")
    slow_prefill_s: float = Field(2.0, ge=0.0, description="or, of a prompt on prefill, than this per 1,000 tokens.")


def usable(names: Collection[str], ejected: Collection[str], most_frac: float) -> list[str]:
    """Those of a pool that get traffic: all of them where too many are ejected."""
    left = [name for name in names if name not in ejected]
    return left if left and len(names) - len(left) <= most_frac * len(names) else list(names)


class UsualPace:
    """What one caller's answers from one pool take per token, and which of them are slow.

    Per token, and not per answer: prompts and answers of all lengths are usual.
    """

    _KEPT = 101
    _LEAST = 10

    def __init__(self, config: OutlierConfig) -> None:
        self._slow_factor = config.slow_factor
        self._seen_s: deque[float] = deque(maxlen=self._KEPT)

    def is_slow(self, pace_s: float, least_s: float) -> bool:
        """Whether an answer was much slower than is usual, and than ``least_s``; it counts from now on."""
        may_be = pace_s > least_s and len(self._seen_s) >= self._LEAST
        is_slow = may_be and pace_s > self._slow_factor * median(self._seen_s)
        self._seen_s.append(pace_s)
        return is_slow


class By(StrEnum):
    """What an answer is judged by; each by itself, for an answer that shows no pace says nothing of slowness."""

    ERROR = "error"
    PACE = "pace"


class Seen(NamedTuple):
    """What a caller saw of a replica; ``is_probe``: by the request that was to show whether it still fails."""

    replica_id: str
    has_failed: bool
    by: By = By.ERROR
    is_probe: bool = False


@dataclass(slots=True)
class _Suspect:
    """A replica that has failed of late; ``seen``: its last answers, whether each failed."""

    pool: str
    seen: dict[By, deque[bool]]
    heard_s: float = 0.0
    ejections: int = 0
    until_s: float | None = None  # ejected
    probed_until_s: float | None = None  # a request is on its way to show whether it still fails

    def fails(self, failures: int) -> bool:
        """Whether among its last few, however many of them one looks at, so many failed and half of them."""
        return any(_fails(seen, failures) for seen in self.seen.values())


def _fails(seen: Collection[bool], failures: int) -> bool:
    failed = 0
    for count, has_failed in enumerate(reversed(list(seen)), start=1):
        failed += has_failed
        if failed >= failures and 2 * failed >= count:
            return True
    return False


class Outliers:
    """What all callers together know of the replicas that fail."""

    _PROBE_S = 60.0  # a whole answer
    # Nothing heard of a suspect for so long: it has gone, or it was one bad moment.
    _FORGET_S = 600.0
    _LEAST_KEPT = 10

    def __init__(self, config: OutlierConfig) -> None:
        self._config = config
        self._kept = max(self._LEAST_KEPT, 2 * config.failures)
        self._suspects: dict[str, _Suspect] = {}

    def saw(self, seen: Seen, pool: str, now_s: float) -> None:
        """A request to a replica has failed, or has been answered."""
        suspect = self._suspects.get(seen.replica_id)
        if suspect is None:
            if not seen.has_failed:
                return
            suspect = self._suspects[seen.replica_id] = _Suspect(pool, {by: deque(maxlen=self._kept) for by in By})
        suspect.heard_s = now_s
        if suspect.until_s is not None:
            if not seen.is_probe or suspect.probed_until_s is None:
                return  # sent before
            suspect.probed_until_s = None
            if not seen.has_failed:
                suspect.until_s = None
                suspect.seen[seen.by].clear()
        suspect.seen[seen.by].append(seen.has_failed)
        if seen.has_failed and suspect.fails(self._config.failures):
            self._eject(suspect, now_s)
        elif not any(map(any, suspect.seen.values())):
            del self._suspects[seen.replica_id]

    def suspects(self) -> frozenset[str]:
        """Those whose next answer is news."""
        return frozenset(self._suspects)

    def ejected(self, now_s: float) -> frozenset[str]:
        """Those that get no traffic but a probe."""
        self._suspects = {
            name: suspect for name, suspect in self._suspects.items() if now_s - suspect.heard_s <= self._FORGET_S
        }
        return frozenset(name for name, suspect in self._suspects.items() if suspect.until_s is not None)

    def due(self, pool: str, now_s: float) -> frozenset[str]:
        """Which of the ejected ones of a pool one request may be sent to."""
        return frozenset(
            name for name, suspect in self._suspects.items() if suspect.pool == pool and self._is_due(suspect, now_s)
        )

    def probe(self, replica_id: str, now_s: float) -> bool:
        """Whether a request that is there may be sent to an ejected replica.

        Another one may after its result, or after a minute without one.
        """
        suspect = self._suspects.get(replica_id)
        if suspect is None or not self._is_due(suspect, now_s):
            return False
        suspect.probed_until_s = now_s + self._PROBE_S
        return True

    def _is_due(self, suspect: _Suspect, now_s: float) -> bool:
        is_probed = suspect.probed_until_s is not None and now_s < suspect.probed_until_s
        return suspect.until_s is not None and now_s >= suspect.until_s and not is_probed

    def _eject(self, suspect: _Suspect, now_s: float) -> None:
        longer_s = self._config.ejection_s * 2.0**suspect.ejections
        suspect.until_s = now_s + min(longer_s, self._config.most_ejection_s)
        suspect.ejections = min(suspect.ejections + 1, 30)
        suspect.probed_until_s = None
