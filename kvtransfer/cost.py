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


def transfer_end_s(now_s: float, size_bytes: float, base_s: float, wires: Sequence[Wire]) -> float:
    """When a transfer has ended that begins as soon as all its wires are free, and keeps them until it is through.

    Args:
        now_s: when it is asked for.
        size_bytes: what is to be moved.
        base_s: what a transfer of nothing takes; it keeps no wire busy.
        wires: what it passes; the slowest sets the pace.
    """
    begins_s = max([now_s, *(wire.free_s for wire in wires)])
    ends_s = begins_s + size_bytes / min(wire.bytes_per_s for wire in wires)
    for wire in wires:
        wire.free_s = ends_s
    return ends_s + base_s
