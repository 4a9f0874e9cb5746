"""A clairvoyant planner: the cheapest whole replicas over time that serve a trace which it knows (pure).

Counts of both roles are constant over bins of time. What each bin's work takes is read from the profile; that plan is
mended where users missed their objectives, and thinned where they did not, until neither helps.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autoscale.capacity import decode_tokens_per_s
from autoscale.sim.scenario import Run, Scenario, run_schedule
from autoscale.types import PoolKey
from kvtransfer.topology import Role

Counts = dict[Role, NDArray[np.int64]]


@dataclass(frozen=True, kw_only=True)
class ClairvoyantPlan:
    """Ready replicas of each role in every bin, and what they come to."""

    bin_s: float
    counts: Mapping[Role, Sequence[int]]
    run: Run

    @property
    def peak_replicas(self) -> int:
        """The most of both roles together in one bin."""
        return max(sum(pair) for pair in zip(*self.counts.values(), strict=True))


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
        on_run: Callable[[str], None] = lambda line: None,
    ) -> None:
        """What to plan for.

        Args:
            scenario: trace and cluster.
            attainment_frac: the share of requests that must meet their objectives.
            bin_s: how long counts stay as they are, at least.
            tpot_s: what a decode replica's batch is limited by in the first plan.
            on_run: told what each simulation has come to.
        """
        self._scenario = scenario
        self._least = attainment_frac
        self._bin_s = bin_s
        self._keys = {key.role: key for key in scenario.pools}
        self._tpot_s = tpot_s
        self._bins = int(scenario.end_s // bin_s) + 1
        self._on_run = on_run
        self._known: dict[bytes, _Tried] = {}

    def plan(self, most_runs: int = 60) -> ClairvoyantPlan:
        """The cheapest plan found."""
        tried = self._try(self._first())
        best: _Tried | None = None
        patience = 0
        slack = 1.0
        while len(self._known) < most_runs and patience < 6:
            if tried.attainment_frac >= self._least:
                if best is None or tried.gpu_hours < best.gpu_hours:
                    best, patience = tried, 0
                else:
                    patience += 1
                    slack *= 0.6
                counts = self._thinned(best, slack)
            else:
                counts = self._mended(tried)
            known = len(self._known)
            tried = self._try(counts)
            if len(self._known) == known:
                patience += 1
                slack *= 0.6
        if best is None:
            raise ValueError(f"no plan attains {self._least:.1%} within {most_runs} simulations")
        lists = {role: [int(n) for n in best.counts[role]] for role in Role}
        return ClairvoyantPlan(bin_s=self._bin_s, counts=lists, run=best.run)

    def _first(self) -> Counts:
        work = demands(self._scenario, self._keys, self._bin_s, self._tpot_s)
        share = {Role.PREFILL: 0.75, Role.DECODE: 0.9}
        return {role: np.ceil(work[role] / share[role] - 1e-9).astype(np.int64) for role in Role}

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
            self._on_run(f"{run.attainment_frac:.4f} {run.gpu_hours:.2f}")
        return self._known[key]

    def _misses(self, run: Run) -> dict[Role, NDArray[np.float64]]:
        """Of each bin, how many requests missed an objective because of a role."""
        missed = {role: np.zeros(self._bins) for role in Role}
        for record, slo, is_met in zip(run.measured, run.scenario.slos[-len(run.measured) :], run.is_met, strict=True):
            if is_met:
                continue
            bin_ = min(self._bins - 1, int(record.sent_s // self._bin_s))
            role = Role.DECODE
            if record.ttft_s is None or record.ttft_s > slo.ttft_s:
                answered_s = record.prefilled_s
                # What prefill took of the time; the rest is waiting for decode's KV.
                if answered_s is not None and answered_s - record.sent_s > slo.ttft_s / 2:
                    role = Role.PREFILL
            missed[role][bin_] += 1.0
        return missed

    def _mended(self, tried: _Tried) -> Counts:
        """More replicas where most missed, enough bins to bring them below what is allowed."""
        missed = self._misses(tried.run)
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
            covered += number
            counts[role][index] += max(1, round(0.08 * counts[role][index]))
            if index and missed[role][index - 1] < number / 4:  # the queue was inherited
                counts[role][index - 1] += 1
        return counts

    def _thinned(self, best: _Tried, slack: float) -> Counts:
        """Fewer replicas in the bins where fewest missed."""
        missed = self._misses(best.run)
        allowed = (1.0 - self._least) * len(best.run.is_met)
        counts = {role: each.copy() for role, each in best.counts.items()}
        for role in Role:
            around = np.convolve(missed[role], np.ones(3), mode="same")
            order = np.argsort(around, kind="stable")
            for index in order[: math.ceil(slack * self._bins)]:
                if around[index] <= allowed / self._bins:
                    counts[role][index] -= 1
        return counts


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
