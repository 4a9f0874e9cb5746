"""Where replicas are: units of GPUs, and the operators that each GPU of a unit hosts (pure).

A unit is a few GPUs that replicas may span. Units that host the same replicas are one entry with a count, so a plan of
a thousand GPUs is a handful of entries.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Replica:
    """A replica of an operator inside a unit.

    ``gpus``: numbers of its GPUs in the unit. ``is_base``: it belongs to the complete model instance of its unit.
    """

    operator: int
    gpus: tuple[int, ...]
    is_base: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Unit:
    """``count`` equal units of ``gpus`` GPUs, with the replicas that each hosts."""

    gpus: int
    replicas: tuple[Replica, ...]
    count: int = 1

    def hosts(self, operator: int, gpu: int) -> bool:
        """Whether a GPU of the unit has a replica of the operator."""
        return any(one.operator == operator and gpu in one.gpus for one in self.replicas)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """All units of a plan."""

    units: tuple[Unit, ...]

    @property
    def gpus(self) -> int:
        """GPUs of all units."""
        return sum(unit.gpus * unit.count for unit in self.units)

    def replicas(self, operator: int) -> int:
        """Replicas of an operator in all units."""
        return sum(unit.count * sum(one.operator == operator for one in unit.replicas) for unit in self.units)


def merged(units: Iterable[Unit]) -> Layout:
    """A layout with equal units as one entry, and without empty ones."""
    counts: dict[tuple[int, tuple[Replica, ...]], int] = {}
    for unit in units:
        if unit.count and unit.replicas:
            key = unit.gpus, tuple(sorted(unit.replicas))
            counts[key] = counts.get(key, 0) + unit.count
    return Layout(
        units=tuple(Unit(gpus=gpus, replicas=of, count=count) for (gpus, of), count in sorted(counts.items()))
    )


def with_replica(units: tuple[Unit, ...], index: int, replica: Replica) -> tuple[Unit, ...]:
    """The units, one of those at ``index`` with one more replica."""
    unit = units[index]
    grown = replace(unit, replicas=(*unit.replicas, replica), count=1)
    return merged([*units[:index], replace(unit, count=unit.count - 1), grown, *units[index + 1 :]]).units
