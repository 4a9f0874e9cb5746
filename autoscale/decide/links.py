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

# By group: the time of a window, and the mean size (bytes) and duration (seconds) of its pulls; the oldest first.
Links = Mapping[str, tuple[tuple[float, float, float], ...]]


def with_window(links: Links, snapshot: Snapshot, window_s: float) -> Links:
    """The links with the window of this snapshot, once a window has passed since the last one that was taken."""
    result = {}
    for group in sorted({pool.key.group for pool in snapshot.pools}):
        # A window in the future is from before the clock was set back.
        known = tuple(point for point in links.get(group, ()) if point[0] <= snapshot.now_s)
        pulls = _pulls(snapshot, PoolKey(group, Role.DECODE))
        if pulls is not None and (not known or snapshot.now_s - known[-1][0] >= window_s):
            known = (*known, (snapshot.now_s, *pulls))[-_REMEMBERED_WINDOWS:]
        if known:
            result[group] = known
    return result


def _pulls(snapshot: Snapshot, key: PoolKey) -> tuple[float, float] | None:
    """Mean size and duration of a pull of a pool's replicas in the window; ``None``: nothing was pulled."""
    replicas = [replica for pool in snapshot.pools if pool.key == key for replica in pool.replicas]
    pulls = [(each.pull_bytes, each.pull_s) for each in replicas if each.pull_bytes and each.pull_s]
    if not pulls:
        return None
    return math.fsum(size for size, _ in pulls) / len(pulls), math.fsum(seconds for _, seconds in pulls) / len(pulls)
