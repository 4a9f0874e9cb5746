"""Time of a KV transfer between engines whose transfers share wires (pure)."""

from collections.abc import Sequence

# Share of the bandwidth that a transfer across switches reaches (HeteroScale section 3.5).
CROSS_SWITCH_FRAC = 0.8


class Wire:
    """A network card or a group's uplink, which transfers pass one after another."""

    __slots__ = ("bytes_per_s", "free_s")

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.free_s = 0.0  # time at which all bytes until now have passed

    def passed_s(self, now_s: float, size_bytes: float) -> float:
        """Send these bytes after all bytes before them. Returns the time at which they have passed."""
        self.free_s = max(now_s, self.free_s) + size_bytes / self.bytes_per_s
        return self.free_s


def transfer_end_s(now_s: float, size_bytes: float, base_s: float, wires: Sequence[Wire]) -> float:
    """Time at which a transfer that is requested now ends; ``base_s``: time of an empty transfer.

    A transfer waits for its turn on each wire. While it waits for one wire, it does not block another one: a card feeds
    many transfers at a time, so a transfer to a busy replica does not delay those to other replicas. ``base_s`` keeps
    no wire busy.
    """
    return max(wire.passed_s(now_s, size_bytes) for wire in wires) + base_s
