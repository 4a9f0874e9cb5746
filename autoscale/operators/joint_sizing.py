"""Greedy sizing of all operators together on GPUs that host all of them (pure).

Algorithm 1 sizes an operator as if its replicas had GPUs of their own. On shared GPUs that goes wrong: a large batch
costs the wait until it is full once for all operators, so it helps only if all operators of a GPU take it. So here the
replicas of all operators change together. The steps are those of Algorithm 1:

- First (lines 1 to 6), all operators have one batch and one parallel size, or each its fastest option. They get the
  fewest GPUs that keep the objective.
- Down (lines 11 to 17): some GPUs less for all operators together.
- Up (lines 20 to 25): the one operator whose other batch or parallel size lowers T_total most gets it, until T_total is
  within the objective again. If no such move is left, the step down is taken back.

An operator v with R_v = GPUs / P_v replicas takes T_v (1 + wait(R_v, rho)), where rho is the busy share of the GPUs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autoscale.operators.evaluation import Assumptions, Choice
from autoscale.operators.joint_memory import JointMemory
from autoscale.operators.options import OperatorOptions, OptionTable

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# A step down takes a sixteenth of the GPUs, and one if that is too many, as Algorithm 1 does here with replicas.
_STEP_FRAC = 1 / 16
# First sizings that are improved: those with the fewest GPUs. More of them find nothing better in the gap study.
_SEEDS = 2
# Above any latency; the busy share is added, so that moves lead out of an overload.
_OVERLOADED_S = 1e6
# Sums of service times below this are rounding errors of a subtraction.
_ROUNDING_S = 1e-12
# Busy shares at which waits are computed once for each number of servers.
_BUSY = np.concatenate([np.linspace(0.0, 0.95, 96), np.linspace(0.955, 0.9995, 90)])


@dataclass(frozen=True, slots=True, kw_only=True)
class JointSizing:
    """Options of all operators, and the number of GPUs that host all of them."""

    choice: Choice
    gpus: int


def joint_sizings(table: OptionTable, assumptions: Assumptions, most_gpus: int) -> Iterator[JointSizing]:
    """Sizings that keep the objective by estimate: a few first ones with the fewest GPUs, and each after all steps.

    The first ones are among them since estimates are too low where GPUs host only a part of the operators.
    """
    together = Together(table=table, assumptions=assumptions)
    # By ``is_divided``: where no GPU holds all operators, fewer GPUs by estimate may be more in the end.
    seeds: dict[bool, list[tuple[int, float, Choice]]] = {False: [], True: []}
    for bound, choice in sorted((together.least_by_work(choice), choice) for choice in together.first_choices()):
        known = seeds[together.is_divided(choice)]
        if len(known) >= _SEEDS and bound > sorted(known)[_SEEDS - 1][0]:
            continue
        gpus = together.least_gpus(choice, most_gpus)
        if gpus is not None:
            known.append((gpus, together.latency_s(choice, gpus), choice))
    for gpus, _, choice in (one for known in seeds.values() for one in sorted(known)[:_SEEDS]):
        yield together.shrunk(choice, gpus)
        yield JointSizing(choice=choice, gpus=gpus)


@dataclass(frozen=True, kw_only=True)
class Together:
    """Estimates of T_total of all operators on common GPUs; options of all operators are in one row.

    ``curves``: by servers, the waits on a grid, filled as they are asked for.
    """

    table: OptionTable
    assumptions: Assumptions
    curves: dict[int, Floats] = field(default_factory=dict, repr=False)

    @cached_property
    def _first(self) -> list[int]:
        counts = [len(one.batch) for one in self.table.operators]
        return [0, *np.cumsum(counts).tolist()]

    @cached_property
    def _owner(self) -> Ints:
        return np.repeat(np.arange(len(self.table.operators)), np.diff(self._first))

    @cached_property
    def _batch(self) -> Ints:
        return np.concatenate([one.batch for one in self.table.operators])

    @cached_property
    def _parallel(self) -> Ints:
        return np.concatenate([one.parallel for one in self.table.operators])

    @cached_property
    def _sizes(self) -> Ints:
        return np.unique(self._parallel)

    @cached_property
    def _time_s(self) -> Floats:
        return np.concatenate([one.time_s for one in self.table.operators])

    @cached_property
    def _work(self) -> Floats:
        """By option, the GPUs that it keeps busy, as the other operators on them see it."""
        gpu_s = np.concatenate([one.gpu_s for one in self.table.operators])
        return self.table.demand.passes_per_s * load_frac(self.table, self.assumptions) * gpu_s

    @cached_property
    def _least_gpus(self) -> Ints:
        """By option, the GPUs that its queue and its memory need; 0: it does not fit into memory."""
        return np.concatenate([least * one.parallel for one, least in self._options()])

    @cached_property
    def _memory(self) -> JointMemory:
        return JointMemory(table=self.table)

    @cached_property
    def _by_size(self) -> Floats:
        """By option and parallel size, T_v at its own size, and 0 at the others."""
        return np.where(self._parallel[:, None] == self._sizes, self._time_s[:, None], 0.0)

    def _fill_s(self, batch: Floats | Ints) -> Floats:
        rate = self.table.demand.passes_per_s
        if not self.assumptions.is_fill_counted or not rate:
            return np.zeros(np.shape(batch))
        return (np.asarray(batch, dtype=np.float64) - 1.0) / (2.0 * rate)

    def _options(self) -> list[tuple[OperatorOptions, Ints]]:
        return list(zip(self.table.operators, self.table.least_replicas, strict=True))

    def first_choices(self) -> Iterator[Choice]:
        """The fastest options, and all operators with one batch and one parallel size.

        An operator whose shape does not allow the size takes its largest one below it.
        """
        yield tuple(int(np.where(least > 0, one.time_s, np.inf).argmin()) for one, least in self._options())
        for size in self._sizes.tolist():
            options = [_by_batch(one, least, size) for one, least in self._options()]
            for batch in sorted(set.intersection(*(set(each) for each in options))):
                yield tuple(each[batch] for each in options)

    def latency_s(self, choice: Choice, gpus: int) -> float:
        """T_total of a choice on ``gpus`` GPUs; above ``_OVERLOADED_S`` if they have no time for it."""
        at = self._at(choice)
        fill = self._fill_s(self._batch[at].max(initial=1))
        by_size, work = self._by_size[at].sum(axis=0)[None, :], self._work[at].sum()[None]
        return float(self._total_s(by_size, work, gpus, self.assumptions.wait)[0] + fill)

    def least_by_work(self, choice: Choice) -> int:
        """GPUs below which a choice has no time or no memory."""
        at = self._at(choice)
        by_memory = self._memory.gpus(at)
        holding = 1 if np.isinf(by_memory) else int(by_memory)
        return max(1, int(self._least_gpus[at].max()), int(self._work[at].sum()), holding)

    def is_divided(self, choice: Choice) -> bool:
        """Whether no GPU has the memory for all operators, so that ``full_layouts`` divides them over several GPUs."""
        return bool(np.isinf(self._memory.gpus(self._at(choice))))

    def least_gpus(self, choice: Choice, most: int) -> int | None:
        """The fewest GPUs on which a choice keeps the objective; None: ``most`` are too few."""
        at, slo_s = self._at(choice), self.table.demand.slo_s
        if float(self._time_s[at].sum() + self._fill_s(self._batch[at].max())) > slo_s:
            return None
        high = self.least_by_work(choice)
        low = high - 1
        while high <= most and self.latency_s(choice, high) > slo_s:
            low, high = high, high + max(1, high // 4)
        if high > most:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.latency_s(choice, middle) <= slo_s else (middle, high)
        return high

    def shrunk(self, choice: Choice, gpus: int) -> JointSizing:
        """Steps down and up from a sizing that keeps the objective, until none is left."""
        step = max(1, int(gpus * _STEP_FRAC))
        while gpus > 1:
            moved = self.sped_up(choice, gpus - step)
            if moved is not None:
                choice = moved
                gpus = self.least_gpus(choice, gpus - step) or gpus - step
            elif step == 1:
                break
            step = max(1, min(step // 2 if moved is None else step, gpus - 1))
        return JointSizing(choice=choice, gpus=gpus)

    def sped_up(self, choice: Choice, gpus: int) -> Choice | None:
        """The choice after the moves that lower T_total most, as soon as it is within the objective; None: it is not.

        A move from an overload lowers the work.
        """
        latency = self.latency_s(choice, gpus)
        while latency > self.table.demand.slo_s:
            moved = self._moved_s(choice, gpus)
            best = int(moved.argmin())
            if not moved[best] < latency * (1.0 - 1e-9):
                return None
            owner = int(self._owner[best])
            choice = (*choice[:owner], best - self._first[owner], *choice[owner + 1 :])
            before, latency = latency, self.latency_s(choice, gpus)
            if not latency < before:  # the move was better on the grid alone
                return None
        return choice

    def _at(self, choice: Choice) -> Ints:
        return np.array([first + option for first, option in zip(self._first, choice, strict=False)])

    def _moved_s(self, choice: Choice, gpus: int) -> Floats:
        """T_total for each option of each operator, the others as they are."""
        at = self._at(choice)
        by_size = self._by_size[at].sum(axis=0) - self._by_size[at][self._owner] + self._by_size
        work = self._work[at].sum() - self._work[at][self._owner] + self._work
        batches = self._batch[at]
        order = np.argsort(batches)
        others = np.full(len(at), batches[order[-1]])
        others[order[-1]] = batches[order[-2]] if len(at) > 1 else 1
        fills = self._fill_s(np.maximum(others[self._owner], self._batch))
        usable = (self._least_gpus > 0) & (self._least_gpus <= gpus)
        if not self.is_divided(choice):
            usable &= self._memory.gpus_after_moves(at, self._owner) <= gpus
        moved = np.full(len(self._owner), np.inf)
        moved[usable] = fills[usable] + self._total_s(by_size[usable], work[usable], gpus, self._wait_on_grid)
        return moved

    def _wait_on_grid(self, servers: int, busy: Floats) -> Floats:
        """The wait rule between points of a grid: wait x (1 - rho) is smooth up to rho = 1."""
        if servers not in self.curves:
            self.curves[servers] = self.assumptions.wait(servers, _BUSY) * (1.0 - _BUSY)
        waits: Floats = np.interp(busy, _BUSY, self.curves[servers]) / (1.0 - busy)
        return waits

    def _total_s(self, by_size: Floats, work: Floats, gpus: int, wait: Callable[[int, Floats], Floats]) -> Floats:
        """Services and waits; rows are choices. ``by_size``: the sum of T_v by parallel size."""
        busy = work / gpus
        has_time = busy < 1.0
        total: Floats = by_size.sum(axis=1) + np.where(has_time, 0.0, _OVERLOADED_S * busy)
        for place, size in enumerate(self._sizes.tolist()):
            own_s = by_size[:, place]
            if not own_s.any():
                continue
            if size > gpus:
                total = np.where(own_s > _ROUNDING_S, np.inf, total)
            else:
                total = total + own_s * wait(gpus // size, np.where(has_time, busy, 0.0))
        return total


def _by_batch(one: OperatorOptions, least: Ints, size: int) -> dict[int, int]:
    """By batch, the option that fits into memory with the largest parallel size up to ``size``."""
    fits = np.flatnonzero((one.parallel <= size) & (least > 0))
    batches = one.batch.tolist()
    return {batches[at]: at for at in fits[np.argsort(one.parallel[fits], kind="stable")].tolist()}


def load_frac(table: OptionTable, assumptions: Assumptions) -> float:
    """What a second of work takes from the other operators on its GPU: the mean of ``taken_frac``, weighted by work."""
    least = [int(one.gpu_s.argmin()) for one in table.operators]
    works = np.array([float(one.gpu_s[option]) for one, option in zip(table.operators, least, strict=True)])
    taken = assumptions.contention.taken_fracs(
        [one.activities[option] for one, option in zip(table.operators, least, strict=True)]
    )
    np.fill_diagonal(taken, 1.0)
    return float(works @ taken @ works / works.sum() ** 2)
