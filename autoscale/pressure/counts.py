"""The counts of replicas that a pressure test tries, and the GPUs that they take (pure)."""

from collections.abc import Mapping

from autoscale.ratio import PdRatio
from autoscale.room import Room
from kvtransfer.topology import Role


def gpus_of(counts: Mapping[Role, float], room: Room) -> float:
    """The most GPUs that these counts may take; replicas without GPUs count as one each."""
    return sum(counts[role] * (room.most_gpus_per_replica[role] or 1.0) for role in Role)


def counts_at(ratio: PdRatio, room: Room, most_gpus: float) -> dict[Role, int] | None:
    """The fewest replicas at a ratio that lie inside the room and take at most these GPUs; ``None``: none do."""
    most = int(max(room.highest.values(), default=0.0))
    for factor in range(1, most + 1):
        counts = {role: factor * replicas for role, replicas in ratio.unit().items()}
        if room.holds(counts) and gpus_of(counts, room) <= most_gpus:
            return counts
    return None


def neighbours(ratio: PdRatio) -> list[PdRatio]:
    """A ratio, and those with one replica more or fewer of one role."""
    if ratio.is_aggregated:
        return [ratio]
    p, d = ratio.unit().values()
    pairs = ((p, d), (p, d - 1), (p, d + 1), (p - 1, d), (p + 1, d))
    ratios = [PdRatio.parse(f"{a}:{b}") for a, b in pairs if a and b and PdRatio(a, b).is_supported]
    return list(dict.fromkeys(ratios))
