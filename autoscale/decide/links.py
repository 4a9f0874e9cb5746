"""The bandwidth between the nodes of each group, learned from the KV that its decode replicas pull (pure).

A pull takes longer while others share the link. So the fastest of the last windows shows what the link can do.
"""

import math
from collections.abc import Mapping, Sequence

from autoscale.types import PoolStats, Snapshot
from kvtransfer.topology import Role

# Number of windows that are remembered for a group. At the default window of 20 s they are three minutes: a link that
# has become slower is noticed after that time.
_REMEMBERED_WINDOWS = 9

# By group: the time of a window, and the bandwidth of its pulls, bytes/s; the oldest first.
Links = Mapping[str, tuple[tuple[float, float], ...]]


def with_window(links: Links, snapshot: Snapshot, window_s: float) -> Links:
    """The links with the window of this snapshot, once a window has passed since the last one that was taken."""
    # A group without replicas pulls nothing, and its next replicas may be on other nodes.
    groups = {pool.key.group for pool in snapshot.pools if pool.replicas}
    result = {
        group: known for group, points in links.items() if group in groups and (known := _until(points, snapshot.now_s))
    }
    for pool in snapshot.pools:
        if pool.key.role is not Role.DECODE:
            continue
        known = result.get(pool.key.group, ())
        is_due = not known or snapshot.now_s - known[-1][0] >= window_s
        if is_due and (observed := _observed(pool)) is not None:
            result[pool.key.group] = (*known, (snapshot.now_s, observed))[-_REMEMBERED_WINDOWS:]
    return result


def _until(points: Sequence[tuple[float, float]], now_s: float) -> tuple[tuple[float, float], ...]:
    """The windows that are not in the future, which are from before the clock was set back."""
    return tuple(point for point in points if point[0] <= now_s)


def _observed(pool: PoolStats) -> float | None:
    """Mean bandwidth of the pulls of a pool's replicas in the window, bytes/s; ``None``: nothing was pulled."""
    observed = [each.pull_bytes_per_s for each in pool.replicas if each.pull_bytes_per_s]
    return math.fsum(observed) / len(observed) if observed else None
