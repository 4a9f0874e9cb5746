"""Mean decode steps of the last windows, by which a policy holds its profile against its engines (pure)."""

from statistics import fmean

from autoscale.headcount import EPSILON_REPLICAS
from autoscale.types import DecodeStep, Snapshot
from kvtransfer.topology import Role

# Number of windows that are remembered: as many as of links, so that one odd window does not change the median.
_REMEMBERED_WINDOWS = 9

# The time of a window, and its mean step; the oldest first.
Steps = tuple[tuple[float, DecodeStep], ...]


def with_steps(steps: Steps, snapshot: Snapshot, window_s: float) -> Steps:
    """The steps with the window of this snapshot, once a window has passed since the last one that was taken.

    Only standard replicas count: a policy's profile is theirs. Steps of the future are from before the clock was set.
    """
    steps = tuple(point for point in steps if point[0] <= snapshot.now_s)
    observed = [
        replica.decode_step
        for pool in snapshot.pools
        if pool.key.role is Role.DECODE and abs(pool.limits.capacity - 1.0) < EPSILON_REPLICAS
        for replica in pool.replicas
        if replica.decode_step is not None
    ]
    if not observed or (steps and snapshot.now_s - steps[-1][0] < window_s):
        return steps
    mean = DecodeStep(
        batch=fmean(step.batch for step in observed),
        context_tokens=fmean(step.context_tokens for step in observed),
        seconds=fmean(step.seconds for step in observed),
    )
    return (*steps, (snapshot.now_s, mean))[-_REMEMBERED_WINDOWS:]
