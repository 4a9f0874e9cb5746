"""Resident memory of a cluster's processes over time, and the kinds whose memory has grown."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import fmean, median

import psutil

from tests.lab.stand.processes import OTHER, kind

# Share of the time that is left out at the start: caches, pools and late imports fill memory first.
_WARM_UP_FRAC = 0.15
# Memory has grown if it rose by more than this share and by more than this many MiB. A twentieth of the smallest
# processes is less than their buffers.
_MAX_GROWTH_FRAC = 0.05
_MAX_GROWTH_MIB = 4.0
# A steady rise of more than this is growth too, in MiB, in a process of any size: 4 kB for each of 2,000 requests.
_MAX_STEADY_MIB = 8.0
# A steady rise is looked for between this many equal parts of the time.
_PARTS = 5
# A rise is steady if each part adds at least this share of the mean rise. A leak goes on; a cache fills more slowly.
_MIN_RISE_FRAC = 0.25

Growth = dict[str, dict[str, float]]


class Memory:
    """Resident memory of every process of a cluster."""

    def __init__(self, processes: Callable[[], list[psutil.Process]], warm_up_frac: float = _WARM_UP_FRAC) -> None:
        """``warm_up_frac``: share of the time or of the requests that is left out at the start."""
        self._processes = processes
        self._warm_up_frac = warm_up_frac
        self._kinds: dict[int, str] = {}
        self._seen: dict[int, list[tuple[float, int]]] = {}

    def sample(self, done_frac: float) -> None:
        """Sample all processes now; ``done_frac``: share of the time or of the requests that is over."""
        for process in self._processes():
            if self._kinds.get(process.pid, OTHER) == OTHER:
                self._kinds[process.pid] = kind(process)
            try:
                rss = process.memory_info().rss
            except psutil.Error:
                continue
            if rss:  # 0: a zombie
                self._seen.setdefault(process.pid, []).append((done_frac, rss))

    def kinds(self) -> set[str]:
        """All kinds that were sampled."""
        return {*self._kinds.values()} - {OTHER}

    def kind(self, pid: int) -> str:
        """The kind of a process."""
        return self._kinds.get(pid, OTHER)

    def growth(self) -> Growth:
        """For each kind the process that grew most, by medians of the first and the last third after the warm-up.

        ``steady_mib`` is the largest of the kind. Only processes that lived from the first third to the last count.
        """
        grown: Growth = {}
        for pid, samples in self._seen.items():
            if (row := _growth(samples, self._warm_up_frac)) is not None and self._kinds[pid] != OTHER:
                so_far = grown.get(self._kinds[pid], row)
                steady_mib = max(so_far["steady_mib"], row["steady_mib"])
                most = max(so_far, row, key=lambda row: row["growth_frac"])
                grown[self._kinds[pid]] = {**most, "steady_mib": steady_mib}
        return grown

    def means(self) -> Growth:
        """As ``growth``, for the mean memory of each kind, so that processes may end and be replaced.

        The sum would rise with the number of processes: an old HAProxy ends its streams beside the new one.
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
    """Whether a row of ``growth`` is more than caches and buffers; ``may_rise``: caches still fill."""
    grown_mib = row["last_third_mib"] - row["first_third_mib"]
    is_much = row["growth_frac"] > _MAX_GROWTH_FRAC and grown_mib > _MAX_GROWTH_MIB
    return is_much or (row["steady_mib"] > _MAX_STEADY_MIB and not may_rise)


def _growth(samples: Sequence[tuple[float, float]], warm_up_frac: float) -> dict[str, float] | None:
    """Memory in the thirds after the warm-up, and its steady rise; ``None``: the process did not live all the time."""
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
    """Rise over the whole time at the pace after the warm-up, if each part adds about the same; else 0."""
    parts: list[list[float]] = [[] for _ in range(_PARTS)]
    for done, rss in samples:
        if done >= warm_up_frac:
            parts[min(_PARTS - 1, int((done - warm_up_frac) / (1.0 - warm_up_frac) * _PARTS))].append(rss)
    if not all(parts):
        return 0.0
    sizes = [median(part) / 2**20 for part in parts]
    mean = (sizes[-1] - sizes[0]) / (_PARTS - 1)
    if min(after - before for before, after in pairwise(sizes)) <= _MIN_RISE_FRAC * mean:
        return 0.0
    return mean * _PARTS / (1.0 - warm_up_frac)
