"""When a latency may be acted on: once it is that of all replicas that were asked for (pure)."""

from autoscale.types import Snapshot


def has_shown_what_it_did(snapshot: Snapshot) -> bool:
    """Whether latencies are those of all replicas that were asked for, or there are some to bring back."""
    state = snapshot.state
    is_lost_since = state.lost_s is not None and state.lost_s > (state.scaled_out_s or 0.0)
    # Who takes a lost one's place was not asked for because of a latency.
    if not is_lost_since and any(len(pool.replicas) < state.desired.get(pool.key, 0) for pool in snapshot.pools):
        return False
    # Who gets a first token now was sent so long ago, perhaps to a queue that was there before them.
    sent_s = snapshot.now_s - (snapshot.latency.ttft_s or 0.0)
    is_settled = state.settled_s is None or sent_s >= state.settled_s
    return bool(state.withdrawn) or (is_settled and not _are_entering(snapshot))


def _are_entering(snapshot: Snapshot) -> bool:
    """Whether a replica runs that did not a tick ago."""
    state = snapshot.state
    known = {*state.admitted, *state.held, *state.withdrawn, *state.victims}
    return bool(state.admitted) and any(
        replica.replica_id not in known for pool in snapshot.pools for replica in pool.replicas
    )
