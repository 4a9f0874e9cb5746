"""A service that nobody asks goes to zero, and wakes with the first request that waits for it (pure)."""

from collections.abc import Mapping

from autoscale.ratio import PdRatio
from autoscale.types import Decision, Snapshot
from kvtransfer.topology import Role

NOBODY: Mapping[Role, int] = dict.fromkeys(Role, 0)


def can_sleep(snapshot: Snapshot) -> bool:
    """Whether every pool may have no replica."""
    return all(pool.lowest_replicas == 0 for pool in snapshot.pools)


def is_asleep(snapshot: Snapshot) -> bool:
    """Whether no replica is wanted."""
    return not any(snapshot.state.desired.values())


def is_idle(snapshot: Snapshot) -> bool:
    """Whether every replica says that it has nothing to do, and nobody has asked or waits: silence is no idleness."""
    replicas = [replica for pool in snapshot.pools for replica in pool.replicas]
    quiet = all(
        value == 0.0
        for replica in replicas
        for value in (replica.running_requests, replica.waiting_requests, replica.deferred_requests or 0.0)
    )
    return bool(replicas) and quiet and snapshot.traffic.requests_per_s == 0.0 and not snapshot.is_awaited


def woken(ratio: PdRatio) -> Decision:
    """One replica of the larger role, and those that are due with it, at once."""
    return Decision(
        wanted={ratio.leader: 1.0, ratio.follower: 0.0}, reason="requests wait for it", is_step=True, is_urgent=True
    )


def asleep() -> Decision:
    """Nothing to do."""
    return Decision(wanted=None, reason="it sleeps until a request waits for it")
