"""How long KV takes from one engine to another where transfers share wires (pure)."""

from collections.abc import Sequence

# Cross-switch transfers reach about a fifth less bandwidth (HeteroScale section 3.5).
CROSS_SWITCH_FRAC = 0.8


class Wire:
    """What transfers pass one after another: a network card, or a group's uplink."""

    __slots__ = ("bytes_per_s", "free_s")

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.free_s = 0.0

    def passed_s(self, now_s: float, size_bytes: float) -> float:
        """When so many bytes more are through, behind all that came before."""
        self.free_s = max(now_s, self.free_s) + size_bytes / self.bytes_per_s
        return self.free_s


def transfer_end_s(now_s: float, size_bytes: float, base_s: float, wires: Sequence[Wire]) -> float:
    """When a transfer has ended.

    It waits for its turn on each of its wires, and on one that is free it keeps nobody waiting meanwhile: a card feeds
    many transfers at a time, so one to a busy replica does not hold up those to others.

    Args:
        now_s: when it is asked for.
        size_bytes: what is to be moved.
        base_s: what a transfer of nothing takes; it keeps no wire busy.
        wires: what it passes; the one that is through last sets the end.
    """
    return max(wire.passed_s(now_s, size_bytes) for wire in wires) + base_s
