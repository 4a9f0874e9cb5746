"""Which replicas get no traffic for a while because they fail or are slow, and when one request tests them (pure).

Source: the pattern is Envoy's outlier detection (https://www.envoyproxy.io/docs/envoy/latest/intro/arch_overview/upstream/outlier):
consecutive failures, ejections that grow longer, a panic threshold (here ``most_frac``). Two things differ here: the
observations of all callers count together, and a replica returns only after a *probe*, one request that tests whether
it still fails. A *suspect* is a replica that has failed lately, ejected or not.
"""

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import NamedTuple

from pydantic import Field

from kvtransfer.strict_config import StrictConfig


class OutlierConfig(StrictConfig):
    """Bounds of ejection."""

    failures: int = Field(3, ge=1, le=100)
    """Number of failures that ejects a replica, if at least half of its last answers are failures."""
    ejection_s: float = Field(5.0, gt=0.0)
    """Length of a replica's first ejection, seconds. After that one request tests the replica. Each failed test doubles
    the length."""
    most_ejection_s: float = Field(60.0, gt=0.0, description="Longest ejection of a replica, seconds.")
    most_frac: float = Field(0.5, ge=0.0, le=1.0)
    """Largest share of a pool that may be ejected, 0..1. If more replicas are ejected, the whole pool gets traffic."""
    slow_factor: float = Field(5.0, gt=1.0)
    """An answer this many times slower than the median of its pool counts as a failure."""
    slow_tpot_s: float = Field(0.25, ge=0.0)
    """Streams on decode that take less than this, seconds per output token, never count as slow."""
    slow_prefill_s: float = Field(2.0, ge=0.0)
    """Prompts on prefill that take less than this, seconds per 1,000 tokens, never count as slow."""


_DEFAULTS = OutlierConfig()


def usable(names: Collection[str], ejected: Collection[str], most_frac: float) -> list[str]:
    """The replicas of a pool that get traffic: all of them if all, or more than ``most_frac`` of them, are ejected."""
    healthy = [name for name in names if name not in ejected]
    is_within = len(names) - len(healthy) <= most_frac * len(names)
    return healthy if healthy and is_within else list(names)


class UsualPace:
    """The usual pace of one pool's answers to one caller. It is a time per token, since answers differ in length."""

    # Number of last answers whose median is the usual pace. With a larger number it follows a change of the load later,
    # with a smaller one it varies more.
    _MEDIAN_ANSWERS = 101
    # Number of answers that must have come before any counts as slow. With fewer, the first answers decide what is
    # usual.
    _LEAST_ANSWERS = 10

    def __init__(self, config: OutlierConfig) -> None:
        self._slow_factor = config.slow_factor
        self._paces_s: deque[float] = deque(maxlen=self._MEDIAN_ANSWERS)

    def is_slow(self, pace_s: float, least_s: float) -> bool:
        """Whether an answer's pace is above ``least_s`` and far above the usual one. Afterwards the answer counts too.

        All paces have the same unit: seconds per output token on decode, per 1,000 prompt tokens on prefill.
        """
        may_be_slow = pace_s > least_s and len(self._paces_s) >= self._LEAST_ANSWERS
        is_slow = may_be_slow and pace_s > self._slow_factor * median(self._paces_s)
        self._paces_s.append(pace_s)
        return is_slow


class Measure(StrEnum):
    """How an answer is judged. Each measure has its own counts: an answer without a pace says nothing about speed."""

    ERROR = "error"  # whether it failed
    PACE = "pace"  # whether it was slow


class Observation(NamedTuple):
    """One answer or failure of a replica, as its caller observed it."""

    replica_id: str
    has_failed: bool
    measure: Measure = Measure.ERROR
    is_probe: bool = False  # whether the request tested an ejected replica


@dataclass(slots=True)
class _Suspect:
    """A replica that has failed lately."""

    pool: str
    failures: dict[Measure, deque[bool]]  # the last answers by measure: whether each failed
    observed_s: float = 0.0  # time of the last observation
    ejections: int = 0  # number of ejections so far
    until_s: float | None = None  # end of the ejection, from when a request may test it; ``None``: it is not ejected
    probed_until_s: float | None = None  # time when another probe may be sent; ``None``: no probe is on its way


def _is_failing(answers: Collection[bool], least_failures: int) -> bool:
    """Whether, for some N, at least half of the last N answers and at least ``least_failures`` of them are failures."""
    failures = 0
    for count, has_failed in enumerate(reversed(list(answers)), start=1):
        failures += has_failed
        if failures >= least_failures and 2 * failures >= count:
            return True
    return False


class Outliers:
    """Ejects replicas that fail, and lets one request at a time test them.

    Observations of all callers count together.
    """

    # Longest wait for the result of a probe, seconds; then another request may test the replica. It is long enough for
    # a whole answer. A larger value keeps a replica ejected for longer after a probe without a result.
    _PROBE_S = 60.0
    # Time without observations after which a suspect is forgotten, seconds: it has gone, or it failed for a moment
    # only. A larger value remembers for longer that a replica was ejected, and also replicas that have gone.
    _FORGET_S = 600.0
    # Number of last answers of each measure that count. It becomes twice ``failures`` if that is more, so that half of
    # the answers can be that many failures.
    _LEAST_ANSWERS = 10
    # Largest number of ejections that counts for the length, which doubles with each. Without it the power of 2 would
    # at last exceed a float. ``most_ejection_s`` limits the length long before.
    _MOST_EJECTIONS = 30

    def __init__(self, configs: Mapping[str, OutlierConfig]) -> None:
        """``configs``: bounds of ejection by pool; a pool that is left out has the defaults."""
        self._configs = configs
        self._suspects: dict[str, _Suspect] = {}

    def observe(self, observation: Observation, pool: str, now_s: float) -> None:
        """Count the failure or the answer of a replica."""
        suspect = self._suspects.get(observation.replica_id)
        if suspect is None:
            if not observation.has_failed:
                return
            counted_answers = max(self._LEAST_ANSWERS, 2 * self._config(pool).failures)
            suspect = _Suspect(pool, {measure: deque(maxlen=counted_answers) for measure in Measure})
            self._suspects[observation.replica_id] = suspect
        suspect.observed_s = now_s
        answers = suspect.failures[observation.measure]
        if suspect.until_s is not None:
            if not observation.is_probe or suspect.probed_until_s is None:
                return  # the request was sent before the ejection, or because too many replicas are ejected
            suspect.probed_until_s = None
            if not observation.has_failed:
                suspect.until_s = None
                answers.clear()  # of this measure only: the probe did not test the other one
        answers.append(observation.has_failed)
        least = self._config(suspect.pool).failures
        if observation.has_failed and any(_is_failing(each, least) for each in suspect.failures.values()):
            self._eject(suspect, now_s)
        elif not any(map(any, suspect.failures.values())):  # none of the last answers failed
            del self._suspects[observation.replica_id]

    def suspects(self) -> frozenset[str]:
        """Replicas that have failed lately. Callers report all answers of a suspect, and only failures of others."""
        return frozenset(self._suspects)

    def ejected(self, now_s: float) -> frozenset[str]:
        """Replicas that get only probes. Forgets replicas without recent observations."""
        self._suspects = {k: v for k, v in self._suspects.items() if now_s - v.observed_s <= self._FORGET_S}
        return frozenset(name for name, suspect in self._suspects.items() if suspect.until_s is not None)

    def due(self, pool: str, now_s: float) -> frozenset[str]:
        """Ejected replicas of a pool that one request may test now."""
        return frozenset(
            name for name, suspect in self._suspects.items() if suspect.pool == pool and self._is_due(suspect, now_s)
        )

    def probe(self, replica_id: str, now_s: float) -> bool:
        """Reserve the test of an ejected replica for one request. Returns whether it may test.

        Another request may test the replica once the result is there, or ``_PROBE_S`` later.
        """
        suspect = self._suspects.get(replica_id)
        if suspect is None or not self._is_due(suspect, now_s):
            return False
        suspect.probed_until_s = now_s + self._PROBE_S
        return True

    def _config(self, pool: str) -> OutlierConfig:
        return self._configs.get(pool, _DEFAULTS)

    def _is_due(self, suspect: _Suspect, now_s: float) -> bool:
        is_probed = suspect.probed_until_s is not None and now_s < suspect.probed_until_s
        return suspect.until_s is not None and now_s >= suspect.until_s and not is_probed

    def _eject(self, suspect: _Suspect, now_s: float) -> None:
        config = self._config(suspect.pool)
        suspect.until_s = now_s + min(config.ejection_s * 2.0**suspect.ejections, config.most_ejection_s)
        suspect.ejections = min(suspect.ejections + 1, self._MOST_EJECTIONS)
        suspect.probed_until_s = None
