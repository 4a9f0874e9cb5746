"""A clairvoyant planner: the cheapest whole replicas over time that serve a trace which it knows (pure).

Counts of both roles are constant over bins of time. What each bin's work takes is read from the profile; that plan is
mended where users missed their objectives, and thinned where they did not, until neither helps.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autoscale.capacity import decode_tokens_per_s
from autoscale.sim.scenario import Run, Scenario, run_schedule
from autoscale.types import PoolKey
from kvtransfer.topology import Role

Counts = dict[Role, NDArray[np.int64]]

# How busy engines are in the first plan.
_FULL_FRAC = {Role.PREFILL: 0.85, Role.DECODE: 0.95}
_MOST_MENDINGS, _MOST_FAILURES = 30, 5


@dataclass(frozen=True, kw_only=True)
class ClairvoyantPlan:
    """Ready replicas of each role in every bin."""

    bin_s: float
    counts: Mapping[Role, Sequence[int]]

    @property
    def peak_replicas(self) -> int:
        """The most of both roles together in one bin."""
        prefill, decode = (self.counts[role] for role in Role)
        return max(p + d for p, d in zip(prefill, decode, strict=True))


@dataclass(frozen=True)
class _Tried:
    counts: Counts
    run: Run
    gpu_hours: float
    attainment_frac: float


class Oracle:
    """The planner of one scenario with one group."""

    def __init__(
        self,
        scenario: Scenario,
        *,
        attainment_frac: float = 0.994,
        bin_s: float = 15.0,
        tpot_s: float = 0.05,
        simulated_requests: int = 1_000_000,
        least_runs: int = 30,
        on_run: Callable[[str], None] = lambda line: None,
    ) -> None:
        """What to plan for.

        Args:
            scenario: trace and cluster.
            attainment_frac: the share of requests that must meet their objectives.
            bin_s: how long counts stay as they are, at least.
            tpot_s: what a decode replica's batch is limited by in the first plan.
            simulated_requests: how many requests all plans that are tried may have together.
            least_runs: but so many plans may be tried, however long the trace.
            on_run: told what each simulation has come to.
        """
        self._scenario = scenario
        self._most_runs = max(least_runs, simulated_requests // len(scenario.trace))
        self._least = attainment_frac
        self._bin_s = bin_s
        self._keys = {key.role: key for key in scenario.pools}
        self._bins = int(scenario.end_s // bin_s) + 1
        self._on_run = on_run
        self._known: dict[bytes, _Tried] = {}
        self._work = demands(scenario, self._keys, bin_s, tpot_s)

    def plan(
        self,
        fixed: Mapping[Role, int] | None = None,
        *,
        near: ClairvoyantPlan | None = None,
        is_rough: bool = False,
    ) -> tuple[ClairvoyantPlan, Run]:
        """The cheapest plan found, and its run; where none attains what it must, the one that came nearest.

        Args:
            fixed: the best fixed counts, to begin with too.
            near: that of the same trace with another seed, to begin with.
            is_rough: take the first plan that attains it.
        """
        best = self._mended_until_attained(self._first() if near is None else self._like(near))
        if not is_rough:
            if fixed is not None:
                even = self._try({role: np.full(self._bins, fixed[role]) for role in Role})
                ways = [self._thinned_while_better(each) for each in (best, even)]
                best = min(ways, key=self._rank)
            if self._is_attained(best):
                best = self._polished(best)
        lists = {role: [int(n) for n in best.counts[role]] for role in Role}
        return ClairvoyantPlan(bin_s=self._bin_s, counts=lists), best.run

    def _is_attained(self, tried: _Tried) -> bool:
        return tried.attainment_frac >= self._least

    def _rank(self, tried: _Tried) -> tuple[bool, float]:
        """Better is less."""
        is_attained = self._is_attained(tried)
        return not is_attained, tried.gpu_hours if is_attained else -tried.attainment_frac

    @property
    def _is_spent(self) -> bool:
        return len(self._known) >= self._most_runs

    def _mended_until_attained(self, counts: Counts) -> _Tried:
        best = tried = self._try(counts)
        for _ in range(_MOST_MENDINGS):
            if self._is_attained(best):
                break
            tried = self._try(self._mended(tried))
            best = max(best, tried, key=lambda each: each.attainment_frac)
        return best

    def _thinned_while_better(self, best: _Tried) -> _Tried:
        """Fewer replicas in many bins at once, mended again where that was too many."""
        share, failures = 1.0, 0
        while failures < _MOST_FAILURES and not self._is_spent and self._is_attained(best):
            tried = self._try(self._thinned(best, share))
            if not self._is_attained(tried):
                tried = self._try(self._mended(tried))
            if self._is_attained(tried) and tried.gpu_hours < best.gpu_hours:
                best = tried
            else:
                share, failures = share * 0.6, failures + 1
        return best

    def _polished(self, best: _Tried) -> _Tried:
        """One replica fewer in one stretch of bins at a time, until none can be spared or the runs are spent."""
        is_better = True
        while is_better:
            is_better = False
            for role, begin, end in self._stretches(best):
                if self._is_spent:
                    return best
                counts = {each: best.counts[each].copy() for each in Role}
                counts[role][begin:end] -= 1
                tried = self._try(counts)
                if self._is_attained(tried) and tried.gpu_hours < best.gpu_hours:
                    best, is_better = tried, True
        return best

    def _stretches(self, best: _Tried) -> list[tuple[Role, int, int]]:
        """Bins of equal counts, their halves, their ends and the least busy windows in them; least work first.

        Inside, nothing shorter than a start can be spared; see ``filled``.
        """
        found: list[tuple[float, Role, int, int]] = []
        for role in Role:
            counts = best.counts[role]
            shortest = int(self._scenario.pools[self._keys[role]].start_s / self._bin_s) + 1
            edges = [0, *(at for at in range(1, self._bins) if counts[at] != counts[at - 1]), self._bins]
            spans = {(a, b) for a, b in pairwise(edges)}
            for a, b in list(spans):
                if b - a > 1:
                    spans |= {(a, (a + b) // 2), ((a + b) // 2, b), (a, a + 1), (b - 1, b)}
                for bins in (shortest, 2 * shortest, 4 * shortest):
                    if bins < b - a:
                        sums = np.convolve(self._work[role][a:b], np.ones(bins), mode="valid")
                        least = a + int(sums.argmin())
                        spans.add((least, least + bins))
            found += [(float((self._work[role][a:b] / counts[a:b]).max()), role, a, b) for a, b in spans]
        return [(role, a, b) for _, role, a, b in sorted(found)]

    def _first(self) -> Counts:
        return {role: np.ceil(self._work[role] / _FULL_FRAC[role] - 1e-9).astype(np.int64) for role in Role}

    def _like(self, near: ClairvoyantPlan) -> Counts:
        """The counts of a plan whose trace may end some bins sooner or later."""
        at = np.minimum(np.arange(self._bins), len(near.counts[Role.DECODE]) - 1)
        return {role: np.array(near.counts[role])[at] for role in Role}

    def _legal(self, counts: Counts) -> Counts:
        legal = {}
        for role, wanted in counts.items():
            pool = self._scenario.pools[self._keys[role]]
            inside = np.clip(wanted, pool.lowest_replicas, pool.highest_replicas)
            legal[role] = filled(inside, pool.start_s / self._bin_s, self._scenario.warm_up_s / self._bin_s)
        return legal

    def _try(self, counts: Counts) -> _Tried:
        counts = self._legal(counts)
        key = b"".join(counts[role].tobytes() for role in Role)
        if key not in self._known:
            run = run_schedule(self._scenario, steps(counts, self._keys, self._bin_s))
            self._known[key] = _Tried(counts, run, run.gpu_hours, run.attainment_frac)
            self._on_run(f"{run.attainment_frac:.4f} attained with {run.gpu_hours:.4g} GPU-hours")
        return self._known[key]

    def _missed(self, run: Run) -> dict[Role, NDArray[np.float64]]:
        """Of each bin, how many requests missed an objective because of a role."""
        missed = {role: np.zeros(self._bins) for role in Role}
        for role, at_s in misses(run):
            missed[role][min(self._bins - 1, int(at_s // self._bin_s))] += 1.0
        return missed

    def _mended(self, tried: _Tried) -> Counts:
        """More replicas where most missed, enough bins to bring them below what is allowed."""
        missed = self._missed(tried.run)
        total = sum(each.sum() for each in missed.values())
        allowed = (1.0 - self._least) * len(tried.run.is_met)
        entries = sorted(
            ((missed[role][index], role, index) for role in Role for index in range(self._bins) if missed[role][index]),
            key=lambda entry: -entry[0],
        )
        counts = {role: each.copy() for role, each in tried.counts.items()}
        covered = 0.0
        for number, role, index in entries:
            if total - covered <= allowed * 0.9:
                break
            if counts[role][index] >= self._scenario.pools[self._keys[role]].highest_replicas:
                continue
            covered += number
            counts[role][index] += max(1, round(0.08 * counts[role][index]))
            if index and missed[role][index - 1] < number / 4:  # the queue was inherited
                counts[role][index - 1] += 1
        return counts

    def _thinned(self, best: _Tried, share: float) -> Counts:
        """Fewer replicas in the bins with least work for each, of those where hardly anyone missed."""
        missed = self._missed(best.run)
        allowed = (1.0 - self._least) * len(best.run.is_met)
        counts = {role: each.copy() for role, each in best.counts.items()}
        for role in Role:
            around = np.convolve(missed[role], np.ones(3), mode="same")
            order = np.argsort(self._work[role] / counts[role], kind="stable")
            spare = [index for index in order if around[index] <= allowed / self._bins]
            for index in spare[: math.ceil(share * self._bins)]:
                counts[role][index] -= max(1, int(0.06 * share * counts[role][index]))
        return counts


def misses(run: Run) -> Iterator[tuple[Role, float]]:
    """Which role is to blame for each request that missed an objective, and when the request arrived."""
    for record, slo, is_met in zip(run.measured, run.slos, run.is_met, strict=True):
        if is_met:
            continue
        is_late = record.ttft_s is None or record.ttft_s > slo.ttft_s
        # What prefill took of the time; the rest is waiting for decode's KV.
        prefill_s = 0.0 if record.prefilled_s is None else record.prefilled_s - record.sent_s
        yield Role.PREFILL if is_late and prefill_s > slo.ttft_s / 2 else Role.DECODE, record.sent_s


def demands(
    scenario: Scenario, keys: Mapping[Role, PoolKey], bin_s: float, tpot_s: float
) -> dict[Role, NDArray[np.float64]]:
    """How many engines of each role every bin's work keeps busy."""
    bins = int(scenario.end_s // bin_s) + 1
    prefill, tokens, context = np.zeros(bins), np.zeros(bins), np.zeros(bins)
    curve, decode = scenario.profiles[keys[Role.PREFILL]].prefill, scenario.profiles[keys[Role.DECODE]]
    for request in scenario.trace:
        index = int(request.at_s // bin_s)
        prefill[index] += curve.chunk_s(0.0, request.input_tokens)
        begins_s = request.at_s
        ends_s = begins_s + request.output_tokens * tpot_s * 0.8
        for at in range(index, min(bins - 1, int(ends_s // bin_s)) + 1):
            share = (min(ends_s, (at + 1) * bin_s) - max(begins_s, at * bin_s)) / (ends_s - begins_s)
            tokens[at] += share * request.output_tokens
            context[at] += share * request.output_tokens * (request.input_tokens + request.output_tokens / 2)
    engines = np.zeros(bins)
    for index in range(bins):
        if tokens[index]:
            each = decode_tokens_per_s(decode, context[index] / tokens[index], tpot_s)
            engines[index] = tokens[index] / bin_s / each
    return {Role.PREFILL: prefill / bin_s, Role.DECODE: engines}


def filled(counts: NDArray[np.int64], start_bins: float, held_bins: float) -> NDArray[np.int64]:
    """Counts without gaps that are shorter than a start: leaving and coming back would cost more.

    The first counts stay while all policies are held, and for a start more, before which nobody can be ready.
    """
    result = counts.copy()
    first = math.ceil(held_bins + start_bins)
    result[:first] = result[:first].max(initial=1)
    for level in range(1, int(result.max()) + 1):
        on = np.flatnonzero(result >= level)
        for left, right in pairwise(on):
            if 1 < right - left <= start_bins + 1:
                np.maximum(result[left:right], level, out=result[left:right])
    return result


def steps(counts: Counts, keys: Mapping[Role, PoolKey], bin_s: float) -> dict[PoolKey, list[tuple[float, int]]]:
    """Counts per bin as times at which they change."""
    return {
        keys[role]: [(index * bin_s, int(n)) for index, n in enumerate(each) if not index or n != each[index - 1]]
        for role, each in counts.items()
    }
