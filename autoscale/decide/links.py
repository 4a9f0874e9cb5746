"""The bandwidth between the nodes of each group, learned from the KV that its decode replicas pull (pure).

A pull takes longer while others share the link. So the fastest of the last windows shows what the link can do.
"""

import math
from collections.abc import Mapping

from autoscale.types import PoolKey, Snapshot
from kvtransfer.topology import Role

# Number of windows that are remembered for a group. At the default window of 20 s they are three minutes: a link that
# has become slower is noticed after that time.
_REMEMBERED_WINDOWS = 9

# By group: the time of a window, and the bandwidth of its pulls, bytes/s; the oldest first.
Links = Mapping[str, tuple[tuple[float, float], ...]]


def with_window(links: Links, snapshot: Snapshot, window_s: float) -> Links:
    """The links with the window of this snapshot, once a window has passed since the last one that was taken."""
    result = {}
    for group in sorted({pool.key.group for pool in snapshot.pools}):
        # A window in the future is from before the clock was set back.
        known = tuple(point for point in links.get(group, ()) if point[0] <= snapshot.now_s)
        observed = _observed(snapshot, PoolKey(group, Role.DECODE))
        if observed is not None and (not known or snapshot.now_s - known[-1][0] >= window_s):
            known = (*known, (snapshot.now_s, observed))[-_REMEMBERED_WINDOWS:]
        if known:
            result[group] = known
    return result


def _observed(snapshot: Snapshot, key: PoolKey) -> float | None:
    """Mean bandwidth of the pulls of a pool's replicas in the window, bytes/s; ``None``: nothing was pulled."""
    replicas = [replica for pool in snapshot.pools if pool.key == key for replica in pool.replicas]
    observed = [each.pull_bytes_per_s for each in replicas if each.pull_bytes_per_s]
    return math.fsum(observed) / len(observed) if observed else None
