"""Which replicas get no traffic for a while, since they fail or are slow, and who may try whether they do again (pure).

Source: the pattern is Envoy's outlier detection (https://www.envoyproxy.io/docs/envoy/latest/intro/arch_overview/upstream/outlier):
consecutive failures, ejections that grow longer, a panic threshold. Here what all callers saw counts together, and a
replica returns by one probe at a time instead of by the clock alone.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from statistics import median

from pydantic import BaseModel, ConfigDict, Field


class OutlierConfig(BaseModel):
    """Bounds of ejection."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    failures: int = Field(3, ge=1, le=100, description="A replica that fails so often in a row gets no more traffic.")
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
        usual_s = median(self._seen_s) if len(self._seen_s) >= self._LEAST else None
        self._seen_s.append(pace_s)
        return usual_s is not None and pace_s > max(least_s, self._slow_factor * usual_s)


@dataclass(slots=True)
class _Suspect:
    """A replica that has failed since it last answered."""

    pool: str
    failures: int = 0
    ejections: int = 0
    until_s: float | None = None  # ejected
    prober: str | None = None  # who may send the one request
    probe_until_s: float = 0.0


class Outliers:
    """What all callers together know of the replicas that fail."""

    _PROBE_S = 60.0  # a whole answer
    # Nothing heard of a suspect for so long: it has gone, or it was one bad moment.
    _FORGET_S = 600.0

    def __init__(self, config: OutlierConfig) -> None:
        self._config = config
        self._suspects: dict[str, _Suspect] = {}
        self._heard_s: dict[str, float] = {}

    def failed(self, replica_id: str, pool: str, caller: str, now_s: float) -> None:
        """A request to it has failed."""
        suspect = self._suspects.setdefault(replica_id, _Suspect(pool))
        self._heard_s[replica_id] = now_s
        if suspect.until_s is None:
            suspect.failures += 1
            if suspect.failures >= self._config.failures:
                self._eject(suspect, now_s)
        elif suspect.prober == caller:
            self._eject(suspect, now_s)
        # Else it was sent before.

    def answered(self, replica_id: str, caller: str, now_s: float) -> None:
        """A request to it has been answered."""
        suspect = self._suspects.get(replica_id)
        if suspect is not None and (suspect.until_s is None or suspect.prober == caller):
            del self._suspects[replica_id], self._heard_s[replica_id]

    def suspects(self) -> frozenset[str]:
        """Those whose next answer is news."""
        return frozenset(self._suspects)

    def ejected(self, now_s: float) -> frozenset[str]:
        """Those that get no traffic but a probe."""
        for replica_id, heard_s in list(self._heard_s.items()):
            if now_s - heard_s > self._FORGET_S:
                del self._suspects[replica_id], self._heard_s[replica_id]
        return frozenset(name for name, suspect in self._suspects.items() if suspect.until_s is not None)

    def probes(self, caller: str, pool: str, now_s: float) -> frozenset[str]:
        """Which of the ejected ones of a pool this caller may send one request to.

        Another one may after a minute without a result.
        """
        granted = set()
        for name, suspect in self._suspects.items():
            if suspect.pool != pool or suspect.until_s is None or now_s < suspect.until_s:
                continue
            if suspect.prober is None or now_s >= suspect.probe_until_s:
                suspect.prober, suspect.probe_until_s = caller, now_s + self._PROBE_S
                granted.add(name)
        return frozenset(granted)

    def _eject(self, suspect: _Suspect, now_s: float) -> None:
        longer_s = self._config.ejection_s * 2.0**suspect.ejections
        suspect.until_s = now_s + min(longer_s, self._config.most_ejection_s)
        suspect.ejections = min(suspect.ejections + 1, 30)
        suspect.prober = None
