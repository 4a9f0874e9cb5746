"""Resident memory of a cluster's processes over time, and which kind of them has grown."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import fmean, median

import psutil

from serve_app.processes import OTHER, kind

# Of the whole time: caches, pools and code that is loaded late fill up first.
_WARM_UP_FRAC = 0.15
# Beyond both is growth: a twentieth of the smallest processes is less than their buffers.
_MOST_GROWTH_FRAC, _MOST_GROWTH_MIB = 0.05, 4.0
# So is a steady rise of more than this, however large the process: 4 kB a request where one of 2,000 does not let go.
_MOST_STEADY_MIB = 8.0
_PARTS = 5
# Of the mean rise between parts, for which a leak has no reason to change, while what fills up falls below it.
_LEAST_RISE_FRAC = 0.25

Growth = dict[str, dict[str, float]]


class Memory:
    """Resident memory of every process of a cluster."""

    def __init__(self, processes: Callable[[], list[psutil.Process]], warm_up_frac: float = _WARM_UP_FRAC) -> None:
        """``warm_up_frac``: how much of the time or of the requests is none of it."""
        self._processes = processes
        self._warm_up_frac = warm_up_frac
        self._kinds: dict[int, str] = {}
        self._seen: dict[int, list[tuple[float, int]]] = {}

    def sample(self, done_frac: float) -> None:
        """Look at all of them now, when this share of the time or of the requests is over."""
        for process in self._processes():
            if self._kinds.get(process.pid, OTHER) == OTHER:
                self._kinds[process.pid] = kind(process)
            try:
                rss = process.memory_info().rss
            except psutil.Error:
                continue
            if rss:  # else it has ended and nobody has asked how
                self._seen.setdefault(process.pid, []).append((done_frac, rss))

    def kinds(self) -> set[str]:
        """Those that were seen at all."""
        return {*self._kinds.values()} - {OTHER}

    def kind(self, pid: int) -> str:
        """What a process is."""
        return self._kinds.get(pid, OTHER)

    def growth(self) -> Growth:
        """Of each kind the process that grew most, by medians of the first and the last third after the warm-up.

        ``steady_mib`` is the most of any of its kind. Processes that were not there from the first third to the last
        say nothing here.
        """
        grown: Growth = {}
        for pid, samples in self._seen.items():
            if (row := _growth(samples, self._warm_up_frac)) is not None and self._kinds[pid] != OTHER:
                known = grown.get(self._kinds[pid], row)
                steady_mib = max(known["steady_mib"], row["steady_mib"])
                most = max(known, row, key=lambda row: row["growth_frac"])
                grown[self._kinds[pid]] = {**most, "steady_mib": steady_mib}
        return grown

    def means(self) -> Growth:
        """As ``growth``, of what those of a kind have on average: for where they end and others take their place.

        Not of their sum, which rises with how many are there: of HAProxies, those that end their streams beside those
        that have taken over.
        """
        sizes: dict[str, dict[float, list[int]]] = {}
        for pid, samples in self._seen.items():
            for done, rss in samples:
                sizes.setdefault(self._kinds[pid], {}).setdefault(done, []).append(rss)
        rows = {
            one: _growth([(done, fmean(here)) for done, here in of_kind.items()], self._warm_up_frac)
            for one, of_kind in sizes.items()
            if one != OTHER
        }
        return {one: row for one, row in rows.items() if row is not None}


def has_grown(row: dict[str, float], *, may_rise: bool = False) -> bool:
    """Whether a row of ``growth`` is more than caches and buffers explain; ``may_rise``: some of them still fill."""
    grown_mib = row["last_third_mib"] - row["first_third_mib"]
    is_much = row["growth_frac"] > _MOST_GROWTH_FRAC and grown_mib > _MOST_GROWTH_MIB
    return is_much or (row["steady_mib"] > _MOST_STEADY_MIB and not may_rise)


def _growth(samples: Sequence[tuple[float, float]], warm_up_frac: float) -> dict[str, float] | None:
    """What the thirds after the warm-up have, and how steadily it rose; ``None``: it was not there all the time."""
    third = (1.0 - warm_up_frac) / 3
    first = [rss for done, rss in samples if warm_up_frac <= done < warm_up_frac + third]
    last = [rss for done, rss in samples if done >= 1.0 - third]
    if not first or not last:
        return None
    before, after = median(first) / 2**20, median(last) / 2**20
    return {
        "first_third_mib": before,
        "last_third_mib": after,
        "growth_frac": after / before - 1.0,
        "steady_mib": _steady_mib(samples, warm_up_frac),
    }


def _steady_mib(samples: Sequence[tuple[float, float]], warm_up_frac: float) -> float:
    """What the whole time adds at the pace after the warm-up, where each part of it adds about as much; else 0."""
    parts: list[list[float]] = [[] for _ in range(_PARTS)]
    for done, rss in samples:
        if done >= warm_up_frac:
            parts[min(_PARTS - 1, int((done - warm_up_frac) / (1.0 - warm_up_frac) * _PARTS))].append(rss)
    if not all(parts):
        return 0.0
    sizes = [median(part) / 2**20 for part in parts]
    mean = (sizes[-1] - sizes[0]) / (_PARTS - 1)
    if min(after - before for before, after in pairwise(sizes)) <= _LEAST_RISE_FRAC * mean:
        return 0.0
    return mean * _PARTS / (1.0 - warm_up_frac)
