"""The oracle: a planner that knows the whole trace, and searches the cheapest counts over time for it (pure).

A plan has the number of replicas of both roles for each bin of time. The first plan has as many as each bin's work
needs by the profile. Then bins with misses (requests that missed their objectives) get more replicas, and other bins
get fewer. At last the search tries one replica less in each stretch (consecutive bins of one role). It ends when no
change helps, or after ``most_runs`` simulations.
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

# Row of each role in a plan's counts.
_ROWS = {role: row for row, role in enumerate(Role)}

# The reason of the values below is not recorded. They steer the search; each plan that it finds is judged by its
# simulation.
# Share of time for which the engines of each role compute in the first plan; rows: prefill, decode. A larger share
# begins with more misses; a smaller one begins with more GPU-hours.
_FULL_FRAC = np.array([[0.85], [0.95]])
# Most times that replicas are added to a plan until enough requests meet their objectives. A smaller number gives up on
# traces with many bins; a larger one takes longer if no plan is enough.
_MOST_ADDITIONS = 30
# Number of plans that were no better after which the search for fewer replicas in many bins ends. A larger number takes
# longer; a smaller one leaves more work to the search in single stretches.
_MOST_FAILURES = 5
# Bins get more replicas, those with most misses first, until the other bins have at most this share of the allowed
# misses. The rest of the allowed misses may remain in the bins that got replicas. A smaller share adds replicas that
# are not needed.
_ALLOWED_FRAC = 0.9
# Share of a bin's replicas that is added to a bin with misses, at least one replica. A larger share needs fewer
# simulations and ends with dearer plans.
_MORE_FRAC = 0.08
# The queue of a bin with misses comes from the bin before it. If that one has fewer misses than this share of the bin's
# misses, it gets one replica more. A larger share adds such replicas more often.
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
        # Plans that were simulated, by the bytes of their counts.
        self._plans: dict[bytes, _SimulatedPlan] = {}
        # Engines that the work of each bin keeps busy, by role and bin.
        self._work = demands(scenario, bin_s, tpot_s)
        self._bins = self._work.shape[1]
        # Rounded up. Without 1e-9, a rounding error above a whole number would add a replica.
        self._first_plan: Counts = np.ceil(self._work / _FULL_FRAC - 1e-9).astype(np.int64)

    def rough_plan(self) -> Counts:
        """The first plan's counts, with replicas added until enough requests meet their objectives.

        If there never are enough, the counts with which most requests meet them.
        """
        return self._add_until_enough_are_met(self._first_plan).counts

    def plan(self, fixed: Mapping[Role, float] | None = None, other_seed: Counts | None = None) -> tuple[Counts, Run]:
        """The cheapest plan found with which enough requests meet their objectives, and its run.

        If no such plan is found, it is the plan with which most requests meet them. ``fixed``: the smallest fixed
        counts, where a second search begins; ``None``: there is no second search, and replicas are only removed one by
        one. ``other_seed``: the plan for the same trace with another seed, where the first search begins; ``None``: it
        begins with the first plan.
        """
        first = self._first_plan
        if other_seed is not None:
            # The plan is cut to the bins of this trace, or its last counts are repeated.
            first = other_seed[:, np.minimum(np.arange(self._bins), other_seed.shape[1] - 1)]
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
    def _has_runs_left(self) -> bool:
        return len(self._plans) < self._most_runs

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
        share, failures = 1.0, 0  # share of the bins that lose replicas
        while failures < _MOST_FAILURES and self._has_runs_left and self._are_enough_met(best):
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
                if not self._has_runs_left:
                    return best
                counts = best.counts.copy()
                counts[row, begin:end] -= 1
                candidate = self._simulated(counts)
                if self._is_better(candidate, best):
                    best, is_better = candidate, True
        return best

    def _stretches(self, counts: Counts) -> list[tuple[int, int, int]]:
        """Stretches that may spare a replica, as (row, begin, end); ``end`` is the bin after the last one.

        They are consecutive bins with equal counts, their halves, their first and last bins, and their least busy
        windows of three lengths. The stretch with the lowest peak work per replica comes first.
        """
        stretches: list[tuple[float, Role, int, int]] = []
        for role, pool, row, work in zip(Role, self._pools, counts, self._work, strict=True):
            # Bins of the shortest window. It is longer than a start, since ``filled`` would fill a shorter gap.
            shortest = int(pool.start_s / self._bin_s) + 1
            # Bins at which the count changes.
            edges = [0, *(np.flatnonzero(np.diff(row)) + 1).tolist(), self._bins]
            spans = set(pairwise(edges))
            for begin, end in list(spans):
                if end - begin > 1:
                    middle = (begin + end) // 2
                    spans |= {(begin, middle), (middle, end), (begin, begin + 1), (end - 1, end)}
                for length in (shortest, 2 * shortest, 4 * shortest):
                    if length < end - begin:
                        work_by_window = np.convolve(work[begin:end], np.ones(length), mode="valid")
                        least_busy = begin + int(work_by_window.argmin())
                        spans.add((least_busy, least_busy + length))
            for begin, end in spans:
                peak = float((work[begin:end] / row[begin:end]).max())
                stretches.append((peak, role, begin, end))
        return [(_ROWS[role], begin, end) for _, role, begin, end in sorted(stretches)]

    def _simulated(self, counts: Counts) -> _SimulatedPlan:
        """The plan of these counts within the pools' limits, without gaps shorter than a start, and its simulation."""
        warm_up_bins = self._scenario.warm_up_s / self._bin_s
        rows = [
            filled(np.clip(row, pool.lowest_replicas, pool.highest_replicas), pool.start_s / self._bin_s, warm_up_bins)
            for row, pool in zip(counts, self._pools, strict=True)
        ]
        counts = np.array(rows)
        key = counts.tobytes()
        if key not in self._plans:
            self._plans[key] = _SimulatedPlan(counts, run_counts(self._scenario, counts, self._bin_s))
        return self._plans[key]

    def _misses_by_bin(self, run: Run) -> tuple[NDArray[np.float64], float]:
        """Misses by role and by the bin of the arrival, and the number of misses that all bins together may have."""
        missed = np.zeros_like(self._work)
        for role, at_s in misses(run):
            missed[_ROWS[role], min(self._bins - 1, int(at_s // self._bin_s))] += 1.0
        return missed, (1.0 - self._least_frac) * len(run.is_met)

    def _add_replicas(self, candidate: _SimulatedPlan) -> Counts:
        """Counts with more replicas in the bins with most misses.

        The other bins have at most ``_ALLOWED_FRAC`` of the allowed misses.
        """
        missed, allowed = self._misses_by_bin(candidate.run)
        counts, other_misses = candidate.counts.copy(), missed.sum()
        # A place is an index into the table of roles and bins, row after row.
        for place in np.argsort(-missed, axis=None, kind="stable"):
            row, index = divmod(int(place), self._bins)
            bin_misses = missed[row, index]
            if not bin_misses or other_misses <= allowed * _ALLOWED_FRAC:
                break
            if counts[row, index] >= self._pools[row].highest_replicas:
                continue
            other_misses -= bin_misses
            counts[row, index] += max(1, round(_MORE_FRAC * counts[row, index]))
            if index and missed[row, index - 1] < bin_misses * _QUEUE_FRAC:
                counts[row, index - 1] += 1
        return counts

    def _remove_replicas(self, best: _SimulatedPlan, share: float) -> Counts:
        """Counts with fewer replicas in a share of the bins: those with least work per replica and few misses.

        With a smaller share each of these bins also loses fewer replicas.
        """
        missed, allowed = self._misses_by_bin(best.run)
        counts = best.counts.copy()
        for row, work, role_missed in zip(counts, self._work, missed, strict=True):
            # Misses in each bin and in the bins beside it: few if they are at most an even share of the allowed misses.
            around = np.convolve(role_missed, np.ones(3), mode="same")
            least_work_first = np.argsort(work / row, kind="stable")
            has_few_misses = around[least_work_first] <= allowed / self._bins
            spare = least_work_first[has_few_misses][: math.ceil(share * self._bins)]
            row[spare] -= np.maximum(1, (_FEWER_FRAC * share * row[spare]).astype(np.int64))  # row is a view of counts
        return counts
