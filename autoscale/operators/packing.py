"""Layouts with as many replicas as the memory of the GPUs holds (pure)."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from autoscale.operators.evaluation import Choice
from autoscale.operators.layout import Layout, Replica, Unit, merged
from autoscale.operators.options import OptionTable

# Widest units in which operators are divided over several GPUs when one GPU has no memory for all.
_MOST_UNIT_GPUS = 8


def full_layouts(table: OptionTable, choice: Choice, gpus: int) -> Iterator[Layout]:
    """Layouts on ``gpus`` GPUs: each hosts all operators, or they are divided over the GPUs of wider units."""
    narrowest = max(int(one.parallel[option]) for one, option in zip(table.operators, choice, strict=True))
    most = min(gpus, max(_MOST_UNIT_GPUS, narrowest))
    widths = {narrowest << power for power in range(_MOST_UNIT_GPUS.bit_length())} | {gpus}
    for width in sorted(one for one in widths if one <= most):
        main = _filled(table, choice, width, gpus, is_complete=True)
        if main is not None:
            tail = _filled(table, choice, gpus % width, gpus, is_complete=False) if gpus % width else None
            yield merged([replace(main, count=gpus // width), *([tail] if tail is not None else [])])
            if all(main.hosts(place, gpu) for place in range(len(choice)) for gpu in range(width)):
                return  # wider units would host the same


def _filled(table: OptionTable, choice: Choice, width: int, gpus: int, *, is_complete: bool) -> Unit | None:
    """A unit whose GPUs host as many operators as their memory holds; None: not every operator has its place.

    First each operator gets one place, the largest memory first. Then copies are added, the operator with the most work
    on its busiest place first.
    """
    picked = list(zip(table.operators, choice, strict=True))
    # Before the layout is there, the KV counts as if every GPU group had a replica.
    resident = [max(1.0, table.in_flight / max(1, gpus // int(one.parallel[option]))) for one, option in picked]
    needs = [one.gpu_bytes(option, held) for (one, option), held in zip(picked, resident, strict=True)]
    works = [float(one.time_s[option]) / float(one.batch[option]) for one, option in picked]
    room = [table.memory_bytes] * width
    load = [0.0] * width
    replicas: list[Replica] = []
    counts = [0] * len(picked)
    free = [_windows(width, int(one.parallel[option])) for one, option in picked]

    def add(place: int, key: Callable[[tuple[int, ...]], tuple[float, ...]]) -> bool:
        free[place] = [one for one in free[place] if min([room[gpu] for gpu in one]) >= needs[place]]
        if not free[place]:
            return False
        window = min(free[place], key=key)
        free[place].remove(window)
        for gpu in window:
            room[gpu] -= needs[place]
            load[gpu] += works[place]
        replicas.append(Replica(operator=place, gpus=window, is_base=True))
        counts[place] += 1
        return True

    for place in sorted(range(len(picked)), key=lambda place: -needs[place]):
        is_placed = add(place, lambda window: (max(load[gpu] for gpu in window), -min(room[gpu] for gpu in window)))
        if is_complete and not is_placed:
            return None
    growing = set(range(len(picked)))
    while growing:
        place = max(growing, key=lambda place: (works[place] / max(counts[place], 1), -place))
        if not add(place, lambda window: (max(load[gpu] for gpu in window),)):
            growing.discard(place)
    return Unit(gpus=width, replicas=tuple(replicas)) if replicas else None


def _windows(width: int, size: int) -> list[tuple[int, ...]]:
    """Groups of neighbouring GPUs that a replica of ``size`` GPUs may take."""
    return [tuple(range(first, first + size)) for first in range(0, width - size + 1, size)]
