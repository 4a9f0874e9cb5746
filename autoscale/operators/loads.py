"""How the busy time of operators spreads over the GPUs of a layout (pure).

Replicas of operators on one GPU share its time. A replica of operator v that gets the share f of v's batches keeps each
of its GPUs busy for f lambda_v T_v of every second: lambda_v T_v / R_v if all replicas get the same.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from autoscale.operators.layout import Layout

Floats = NDArray[np.float64]

# Rounds in which each operator's batches are spread again over the loads of the others. Loads of the gap study's random
# layouts change by less than 1e-3 after the fourth.
_ROUNDS = 6
# Rounds end when no busy share changes by more than this.
_SETTLED = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Equal replicas of an operator: one in each of ``count`` equal units.

    ``slots``: numbers of its GPUs among the distinct GPUs of the layout. ``is_base``: as ``Replica`` says.
    """

    operator: int
    slots: tuple[int, ...]
    count: int
    is_base: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """Busy shares of all replicas.

    Attributes:
        places: equal replicas, with ``busy_fracs``: the share of time that one of them keeps each of its GPUs busy.
        slot_counts: how many GPUs each slot stands for.
        busy: by slot and operator, the busy share of a GPU, as a sum over its replicas.
    """

    places: tuple[Place, ...]
    busy_fracs: Floats
    slot_counts: NDArray[np.int64]
    busy: Floats


def places_of(layout: Layout) -> tuple[tuple[Place, ...], NDArray[np.int64]]:
    """All replicas of a layout as places, and the GPUs that each slot stands for."""
    places: list[Place] = []
    counts: list[int] = []
    for unit in layout.units:
        first = len(counts)
        counts += [unit.count] * unit.gpus
        places += [
            Place(
                operator=one.operator,
                slots=tuple(first + gpu for gpu in one.gpus),
                count=unit.count,
                is_base=one.is_base,
            )
            for one in unit.replicas
        ]
    return tuple(places), np.array(counts, dtype=np.int64)


def even_loads(layout: Layout, works: Floats) -> Loads:
    """Every replica of an operator gets the same share of its batches.

    ``works``: by operator, lambda_v T_v: the replicas that its batches keep busy.
    """
    places, counts = places_of(layout)
    replicas = np.zeros(len(works))
    for place in places:
        replicas[place.operator] += place.count
    shares = np.array([works[place.operator] / replicas[place.operator] for place in places])
    return _loads(places, counts, shares, len(works))


def balanced_loads(layout: Layout, works: Floats) -> Loads:
    """Batches go to the replica whose GPUs have the least load, as a router by load sends them.

    The shares are those at which no operator can lower the highest load of its replicas (water-filling, operator by
    operator, until loads hardly change). ``works`` is as in ``even_loads``.
    """
    places, counts = places_of(layout)
    mine: list[list[int]] = [[] for _ in works]
    for index, place in enumerate(places):
        mine[place.operator].append(index)
    shares = [0.0] * len(places)
    load = [0.0] * len(counts)
    slots = [place.slots for place in places]
    widths = [place.count for place in places]
    order = sorted(range(len(works)), key=lambda one: (len(mine[one]), -works[one]))
    for _ in range(_ROUNDS):
        most_change = 0.0
        for one in order:
            for index in mine[one]:
                for slot in slots[index]:
                    load[slot] -= shares[index]
            levels = [
                load[slots[index][0]] if len(slots[index]) == 1 else max(load[slot] for slot in slots[index])
                for index in mine[one]
            ]
            filled = _fill(levels, [widths[index] for index in mine[one]], float(works[one]))
            for index, share in zip(mine[one], filled, strict=True):
                most_change = max(most_change, abs(shares[index] - share))
                shares[index] = share
                for slot in slots[index]:
                    load[slot] += share
        if most_change < _SETTLED:
            break
    return _loads(places, counts, np.array(shares), len(works))


Spread = Callable[[Layout, Floats], Loads]
SPREADS: Mapping[str, Spread] = MappingProxyType({"even": even_loads, "balanced": balanced_loads})


def _fill(levels: Sequence[float], counts: Sequence[int], amount: float) -> list[float]:
    """What flows on top of each level if ``amount`` is poured over all, each level ``counts`` wide."""
    if len(levels) == 1:
        return [amount / counts[0]]
    width, below, surface = 0, 0.0, 0.0
    for level, count in sorted(zip(levels, counts, strict=True)):
        if width and surface <= level:
            break
        width += count
        below += count * level
        surface = (amount + below) / width
    return [max(0.0, surface - level) for level in levels]


def _loads(places: tuple[Place, ...], counts: NDArray[np.int64], shares: Floats, operators: int) -> Loads:
    busy = np.zeros((len(counts), operators))
    for place, share in zip(places, shares, strict=True):
        for slot in place.slots:
            busy[slot, place.operator] += share
    return Loads(places=places, busy_fracs=shares, slot_counts=counts, busy=busy)
