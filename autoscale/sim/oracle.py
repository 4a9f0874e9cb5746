"""The oracle: a planner that knows the whole trace, and searches the cheapest counts over time for it (pure).

A plan has replicas of both roles for each bin of time. The first plan follows each bin's work by the profile. Then bins
in which requests missed their objectives get more replicas, and other bins get fewer. The search ends when neither
helps, or after ``most_runs`` simulations.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autoscale.sim.scenario import Run, Scenario
from autoscale.sim.schedule import Counts, demands, filled, keys_of, misses, run_counts
from kvtransfer.topology import Role

_ROWS = {role: row for row, role in enumerate(Role)}
# Share of time for which the engines of each role compute in the first plan: prefill, decode. The reason of this value
# and of those below is not recorded. They steer the search; each plan that it finds is judged by its simulation. A
# larger share begins with more misses; a smaller one begins with more GPU-hours.
_FULL_FRAC = np.array([[0.85], [0.95]])
# Most times that replicas are added to a plan until enough requests meet their objectives. A smaller number gives up on
# traces with many bins; a larger one takes longer if no plan is enough.
_MOST_ADDITIONS = 30
# Number of plans that were no better after which the search for fewer replicas in many bins ends. A larger number takes
# longer; a smaller one leaves more work to the search in single stretches.
_MOST_FAILURES = 5
# Share of the allowed misses. Bins get more replicas, those with most misses first, until the other bins have at most
# this share. With 1 no miss could remain in the bins that got replicas; a smaller share adds replicas that are not
# needed.
_ALLOWED_FRAC = 0.9
# Share of a bin's replicas that is added to a bin with misses, at least one replica. A larger share needs fewer
# simulations and ends with dearer plans.
_MORE_FRAC = 0.08
# Share of a bin's misses. With fewer misses than this in the bin before, that bin gets one replica more: the queue
# comes from there. A larger share adds such replicas more often.
_QUEUE_FRAC = 0.25
# Largest share of a bin's replicas that is removed from a bin that can spare replicas, at least one replica. A larger
# share needs fewer simulations and fails more often.
_FEWER_FRAC = 0.06
# Factor of the share of bins that lose replicas, after each plan that was no better. A smaller factor ends sooner.
_SHARE_FACTOR = 0.6


@dataclass(frozen=True)
class _SimulatedPlan:
    """Replicas of both roles in every bin, and the simulation with them."""

    counts: Counts
    run: Run


class Oracle:
    """The oracle of one scenario with one group."""

    def __init__(
        self, scenario: Scenario, least_frac: float, *, bin_s: float, tpot_s: float, most_runs: int = 1000
    ) -> None:
        """A planner of the cheapest counts with which enough requests meet their objectives.

        ``least_frac``: share of requests that is enough. ``bin_s``: length of a bin of time, seconds. ``tpot_s``: time
        per output token that limits a decode replica's batch in the first plan, seconds. ``most_runs``: number of
        simulations after which the search for fewer replicas ends.
        """
        self._scenario = scenario
        self._most_runs = most_runs
        self._least_frac = least_frac
        self._bin_s = bin_s
        self._pools = [scenario.pools[key] for key in keys_of(scenario)]
        self._runs_by_counts: dict[bytes, _SimulatedPlan] = {}
        self._work = demands(scenario, bin_s, tpot_s)
        self._bins = self._work.shape[1]
        self._first_counts: Counts = np.ceil(self._work / _FULL_FRAC - 1e-9).astype(np.int64)

    def rough_plan(self) -> Counts:
        """The first plan with which enough requests meet their objectives, else the plan with which most do."""
        return self._add_until_enough_are_met(self._first_counts).counts

    def plan(self, fixed: Mapping[Role, float] | None = None, near: Counts | None = None) -> tuple[Counts, Run]:
        """The cheapest plan found with which enough requests meet their objectives, and its run.

        Without such a plan, the plan with which most requests meet them. ``near``: the plan for the same trace with
        another seed, where the search begins; ``None``: it begins with the first plan. ``fixed``: the smallest fixed
        counts, where a second search begins; ``None``: there is no second search.
        """
        first = self._first_counts
        if near is not None:  # cut or extended to the bins of this trace
            first = near[:, np.minimum(np.arange(self._bins), near.shape[1] - 1)]
        best = self._add_until_enough_are_met(first)
        if fixed is not None:
            fixed_plan = self._simulated(np.tile([[int(fixed[role])] for role in Role], self._bins))
            improved_plans = [self._remove_while_better(each) for each in (best, fixed_plan)]
            best = min(improved_plans, key=lambda each: each.run.rank(self._least_frac))
        if self._are_enough_met(best):
            best = self._remove_one_by_one(best)
        return best.counts, best.run

    def _are_enough_met(self, candidate: _SimulatedPlan) -> bool:
        return candidate.run.attainment_frac >= self._least_frac

    def _is_better(self, candidate: _SimulatedPlan, best: _SimulatedPlan) -> bool:
        """Whether enough requests meet their objectives with fewer GPU-hours."""
        return self._are_enough_met(candidate) and candidate.run.gpu_hours < best.run.gpu_hours

    @property
    def _has_no_runs_left(self) -> bool:
        return len(self._runs_by_counts) >= self._most_runs

    def _add_until_enough_are_met(self, counts: Counts) -> _SimulatedPlan:
        best = candidate = self._simulated(counts)
        for _ in range(_MOST_ADDITIONS):
            if self._are_enough_met(best):
                break
            candidate = self._simulated(self._add_replicas(candidate))
            best = max(best, candidate, key=lambda each: each.run.attainment_frac)
        return best

    def _remove_while_better(self, best: _SimulatedPlan) -> _SimulatedPlan:
        """Remove replicas in many bins at once; add some again in bins in which requests then miss their objectives."""
        share, failures = 1.0, 0
        while failures < _MOST_FAILURES and not self._has_no_runs_left and self._are_enough_met(best):
            candidate = self._simulated(self._remove_replicas(best, share))
            if not self._are_enough_met(candidate):
                candidate = self._simulated(self._add_replicas(candidate))
            if self._is_better(candidate, best):
                best = candidate
            else:
                share, failures = share * _SHARE_FACTOR, failures + 1
        return best

    def _remove_one_by_one(self, best: _SimulatedPlan) -> _SimulatedPlan:
        """Remove one replica in one stretch at a time, until no stretch can spare one or no runs are left."""
        is_better = True
        while is_better:
            is_better = False
            for row, begin, end in self._stretches(best.counts):
                if self._has_no_runs_left:
                    return best
                counts = best.counts.copy()
                counts[row, begin:end] -= 1
                candidate = self._simulated(counts)
                if self._is_better(candidate, best):
                    best, is_better = candidate, True
        return best

    def _stretches(self, counts: Counts) -> list[tuple[int, int, int]]:
        """Stretches (row, begin, end) of bins with equal counts, their parts, and their least busy windows.

        The stretch with the lowest peak work per replica comes first. A window is longer than a start: see ``filled``.
        """
        stretches: list[tuple[float, Role, int, int]] = []
        for role, pool, row, work in zip(Role, self._pools, counts, self._work, strict=True):
            shortest = int(pool.start_s / self._bin_s) + 1
            edges = [0, *(np.flatnonzero(np.diff(row)) + 1).tolist(), self._bins]
            spans = set(pairwise(edges))
            for a, b in list(spans):
                if b - a > 1:
                    spans |= {(a, (a + b) // 2), ((a + b) // 2, b), (a, a + 1), (b - 1, b)}
                for bins in (shortest, 2 * shortest, 4 * shortest):
                    if bins < b - a:
                        least = a + int(np.convolve(work[a:b], np.ones(bins), mode="valid").argmin())
                        spans.add((least, least + bins))
            stretches += [(float((work[a:b] / row[a:b]).max()), role, a, b) for a, b in spans]
        return [(_ROWS[role], a, b) for _, role, a, b in sorted(stretches)]

    def _simulated(self, counts: Counts) -> _SimulatedPlan:
        """The plan of these counts within the pools' limits, without gaps shorter than a start, and its simulation."""
        warm_up_bins = self._scenario.warm_up_s / self._bin_s
        legal = [
            filled(np.clip(row, pool.lowest_replicas, pool.highest_replicas), pool.start_s / self._bin_s, warm_up_bins)
            for row, pool in zip(counts, self._pools, strict=True)
        ]
        counts = np.array(legal)
        key = counts.tobytes()
        if key not in self._runs_by_counts:
            self._runs_by_counts[key] = _SimulatedPlan(counts, run_counts(self._scenario, counts, self._bin_s))
        return self._runs_by_counts[key]

    def _misses(self, run: Run) -> tuple[NDArray[np.float64], float]:
        """Misses by role and bin in which the request arrived, and the number of misses that all bins may have."""
        missed = np.zeros_like(self._work)
        for role, at_s in misses(run):
            missed[_ROWS[role], min(self._bins - 1, int(at_s // self._bin_s))] += 1.0
        return missed, (1.0 - self._least_frac) * len(run.is_met)

    def _add_replicas(self, candidate: _SimulatedPlan) -> Counts:
        """Counts with more replicas in the bins with most misses.

        The other bins have at most ``_ALLOWED_FRAC`` of the allowed misses.
        """
        missed, allowed = self._misses(candidate.run)
        counts, others = candidate.counts.copy(), missed.sum()
        for place in np.argsort(-missed, axis=None, kind="stable"):
            row, index = divmod(int(place), self._bins)
            number = missed[row, index]
            if not number or others <= allowed * _ALLOWED_FRAC:
                break
            if counts[row, index] >= self._pools[row].highest_replicas:
                continue
            others -= number
            counts[row, index] += max(1, round(_MORE_FRAC * counts[row, index]))
            # The queue of these requests comes from the bin before.
            if index and missed[row, index - 1] < number * _QUEUE_FRAC:
                counts[row, index - 1] += 1
        return counts

    def _remove_replicas(self, best: _SimulatedPlan, share: float) -> Counts:
        """Counts with fewer replicas in a share of the bins: those with least work per replica and few misses."""
        missed, allowed = self._misses(best.run)
        counts = best.counts.copy()
        for row, work, role_missed in zip(counts, self._work, missed, strict=True):
            # Misses in each bin and in the bins beside it.
            around = np.convolve(role_missed, np.ones(3), mode="same")
            order = np.argsort(work / row, kind="stable")
            spare = order[around[order] <= allowed / self._bins][: math.ceil(share * self._bins)]
            row[spare] -= np.maximum(1, (_FEWER_FRAC * share * row[spare]).astype(np.int64))
        return counts
