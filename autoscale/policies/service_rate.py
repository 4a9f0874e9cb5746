"""Requests per second that a busy standard replica serves (mu), learned from replicas while they serve (pure).

A prefill replica computes prompts one after another. So the requests that are served, divided by the time for which
replicas are busy, are the requests per second of a busy one, whatever the load is. Decode answers many requests at a
time, and more at a time are slower. So only decode replicas with a queue, which can do no more, show their rate here;
``decode_rate`` learns it from their steps.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from autoscale.policies.policy import admitted_replicas, weight_of
from autoscale.types import ReplicaStats, Snapshot
from kvtransfer.topology import Role

# Age at which an observation has a third (1/e) of the weight of the newest one, seconds. A shorter one follows chance,
# a longer one learns a change of prompts or engines later.
_MEMORY_S = 300.0
# Longest time for which one observation counts, seconds. A longer time is a stall or a set clock, and the observation
# at its end does not hold for all of it.
_MOST_ELAPSED_S = 60.0
# Replica-seconds of busy replicas from which on a learned rate counts. At the default interval of 5 s these are 24
# observations of one replica, whose mean is 10 % off (one standard deviation) if a replica is busy half of the time.
_LEAST_BUSY_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceRate:
    """Sums over the past, in which older observations weigh less.

    Attributes:
        served: number of requests that were served while replicas were observed.
        busy_s: replica-seconds of standard replicas for which replicas were busy.
        at_s: time of the last observation; ``None``: there was none.
    """

    served: float = 0.0
    busy_s: float = 0.0
    at_s: float | None = None

    @classmethod
    def of(cls, memory: Mapping[str, tuple[float, ...]], role: Role, now_s: float) -> "ServiceRate":
        """Read a policy's memory; an observation of the future is forgotten, since the clock was set back."""
        sums = memory.get(_name(role), ())
        return cls(served=sums[0], busy_s=sums[1], at_s=sums[2]) if len(sums) == 3 and sums[2] <= now_s else cls()

    def memory(self, role: Role) -> dict[str, tuple[float, ...]]:
        """The sums as a part of a policy's memory."""
        return {} if self.at_s is None else {_name(role): (self.served, self.busy_s, self.at_s)}

    def observed(self, snapshot: Snapshot, role: Role) -> "ServiceRate":
        """The sums with what a snapshot shows of a role; unchanged if it shows no rate."""
        served_per_s, replicas = snapshot.traffic.served_per_s, admitted_replicas(snapshot, role)
        elapsed_s = 0.0 if self.at_s is None else min(snapshot.now_s - self.at_s, _MOST_ELAPSED_S)
        kept = math.exp(-elapsed_s / _MEMORY_S)
        is_busy = _is_computing if role is Role.PREFILL else _has_queue
        busy = [(replica, weight) for replica, weight in replicas if is_busy(replica)]
        # Prompts that aggregated replicas compute are served too, but these replicas are also busy with answers.
        is_mixed = any(pool.limits.prompt_capacity and pool.replicas for pool in snapshot.pools)
        shows_rate = not is_mixed if role is Role.PREFILL else len(busy) == len(replicas)
        if served_per_s is None or not snapshot.traffic.is_whole or not shows_rate:
            return ServiceRate(served=kept * self.served, busy_s=kept * self.busy_s, at_s=snapshot.now_s)
        return ServiceRate(
            served=kept * self.served + served_per_s * elapsed_s,
            busy_s=kept * self.busy_s + weight_of(busy) * elapsed_s,
            at_s=snapshot.now_s,
        )

    @property
    def requests_per_s(self) -> float | None:
        """The learned rate of one busy replica; ``None``: too little was observed."""
        return self.served / self.busy_s if self.busy_s >= _LEAST_BUSY_S and self.served else None


def _name(role: Role) -> str:
    return f"{role}_service_rate"


def _is_computing(replica: ReplicaStats) -> bool:
    return bool(replica.running_requests or replica.waiting_requests)


def _has_queue(replica: ReplicaStats) -> bool:
    return bool(replica.waiting_requests)
