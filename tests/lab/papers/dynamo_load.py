"""Dynamo's load planner: one replica more or fewer by the prefill queue, and by decode's KV usage.

Source: ``examples/llm/components/planner.py`` (make_adjustments) of ai-dynamo 0.2 to 0.4, with the defaults of
``LoadPlannerDefaults`` (planner/defaults.py). It also checks its GPU budget, which is the guard's work here.
"""

import math
from typing import Literal

from pydantic import Field, model_validator

from autoscale.headcount import desired_replicas
from autoscale.policies.peers.independent import Memory, decided, is_due, mean, serving_replicas, standing, summed
from autoscale.policies.policy import Policy
from autoscale.types import Decision, ReplicaStats, Shown, Snapshot
from kvtransfer.strict_config import StrictConfig
from kvtransfer.topology import Role

# Share of a decode engine's KV that one waiting request is taken to need (collect_metrics).
_WAITING_KV_FRAC = 0.02


class DynamoLoadConfig(StrictConfig):
    """The thresholds, and the interval of the means."""

    kind: Literal["dynamo_load"] = "dynamo_load"
    adjustment_s: float = Field(180.0, gt=0.0, description="Time between two decisions: --adjustment-interval.")
    pull_s: float = Field(10.0, gt=0.0, description="Time between two observations: --metric-pulling-interval.")
    prefill_up_requests: float = Field(5.0, ge=0.0, description="A longer mean queue adds a prefill replica.")
    prefill_down_requests: float = Field(0.2, ge=0.0, description="A shorter mean queue removes a prefill replica.")
    decode_up_kv_frac: float = Field(0.9, ge=0.0, description="A higher mean KV usage adds a decode replica.")
    decode_down_kv_frac: float = Field(0.5, ge=0.0, description="A lower mean KV usage removes a decode replica.")
    decode_grace_intervals: int = Field(3, ge=0)
    """Intervals after an added decode replica in which none leaves: NEW_DECODE_WORKER_GRACE_PERIOD."""
    prefill_trend_intervals: float = Field(3.0, ge=0.0)
    """A prefill replica is added only if the queue's trend leaves it too long after this many intervals:
    NEW_PREFILL_WORKER_QUEUE_BUFFER_PERIOD."""

    @model_validator(mode="after")
    def _check_order(self) -> "DynamoLoadConfig":
        for name, low, high in (
            ("prefill_requests", self.prefill_down_requests, self.prefill_up_requests),
            ("decode_kv_frac", self.decode_down_kv_frac, self.decode_up_kv_frac),
        ):
            if low >= high:
                raise ValueError(f"{name}: down ({low:g}) must be below up ({high:g}), or a step would undo itself")
        return self


def prefill_step(mean_queue: float, first: float, last: float, config: DynamoLoadConfig) -> int:
    """-1, 0 or 1 replicas by the mean queue; 1 only if its trend from first to last does not shorten it by itself."""
    if mean_queue < config.prefill_down_requests:
        return -1
    ahead = last + (last - first) * config.prefill_trend_intervals
    return int(mean_queue > config.prefill_up_requests and ahead > config.prefill_up_requests)


def decode_step(mean_kv_frac: float, grace_intervals: float, config: DynamoLoadConfig) -> int:
    """-1, 0 or 1 replicas by the mean KV usage; -1 only after the grace of the last added replica."""
    if mean_kv_frac < config.decode_down_kv_frac:
        return 0 if grace_intervals > 0 else -1
    return int(mean_kv_frac > config.decode_up_kv_frac)


class DynamoLoad(Policy[DynamoLoadConfig]):
    """One replica of each role more or fewer, by waiting requests of prefill and KV usage of decode."""

    def decide(self, snapshot: Snapshot) -> Decision:
        """Once an interval, one step of each role, unless replicas came or went in the interval."""
        config, now = self._config, (snapshot.now_s,)
        serving = serving_replicas(snapshot)
        counts = tuple(float(len(serving[role])) for role in Role)
        memory: dict[str, tuple[float, ...]] = {"began_s": now, "workers": counts, **snapshot.state.memory}
        if "pulled_s" not in memory or is_due(snapshot, memory, "pulled_s", config.pull_s):
            memory |= {"pulled_s": now, **_observed(serving, memory)}
        if not is_due(snapshot, memory, "began_s", config.adjustment_s):
            return standing(snapshot, f"it adjusts every {config.adjustment_s:g} s", memory=memory)
        queue, kv_frac, ends = mean(memory, "queue"), mean(memory, "kv_frac"), memory.get("queue_ends")
        before, (grace,) = memory["workers"], memory.get("grace", (0.0,))
        for name in ("queue", "kv_frac", "queue_ends", "pulled_s"):
            memory.pop(name, None)
        memory |= {"began_s": now, "workers": counts}
        if before != counts:
            return standing(snapshot, "replicas came or went in the interval", memory=memory)
        if queue is None or kv_frac is None or ends is None:
            return decided(snapshot, None, "no queue or no KV usage was observed in the interval", memory=memory)
        first, last = ends
        steps = {
            Role.PREFILL: prefill_step(queue, first, last, config),
            Role.DECODE: decode_step(kv_frac, grace, config),
        }
        if steps[Role.DECODE] > 0:
            grace = float(config.decode_grace_intervals)
        memory["grace"] = (max(0.0, grace - 1.0),)
        present = desired_replicas(snapshot.state.desired)
        wanted = {role: float(max(0, present[role] + steps[role])) for role in Role}
        reason = f"a mean of {queue:.3g} requests wait for prefill, decode's KV is {kv_frac:.0%} full"
        shown = (
            Shown(name="prefill_queue", value=queue, target=config.prefill_up_requests),
            Shown(name="decode_kv", value=kv_frac, target=config.decode_up_kv_frac),
        )
        return decided(snapshot, wanted, reason, memory=memory, shown=shown)


def _observed(serving: dict[Role, list[ReplicaStats]], memory: Memory) -> dict[str, tuple[float, ...]]:
    """The interval's sums with one more observation of the prefill queue and of each decode replica's KV."""
    queues = [q for r in serving[Role.PREFILL] if (q := r.waiting_requests) is not None]
    queue = math.fsum(queues) if queues else None
    series = summed(memory, {"queue": queue})
    if queue is not None:
        first, _ = memory.get("queue_ends", (queue, queue))
        series["queue_ends"] = (first, queue)
    total, count = memory.get("kv_frac", (0.0, 0.0))
    for replica in serving[Role.DECODE]:
        if replica.kv_usage_frac is not None:
            waiting = (replica.waiting_requests or 0.0) if replica.running_requests else 0.0
            total, count = total + replica.kv_usage_frac + _WAITING_KV_FRAC * waiting, count + 1.0
    return series | {"kv_frac": (total, count)}
