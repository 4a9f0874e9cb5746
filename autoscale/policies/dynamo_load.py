"""Dynamo's load planner: one replica more or fewer by the length of the prefill queue and by decode's KV usage.

Source: ``examples/llm/components/planner.py`` (make_adjustments) of ai-dynamo 0.2 to 0.4, with the defaults of
``LoadPlannerDefaults`` (planner/defaults.py). It also counts GPUs against its budget; here that is the guard's.
"""

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from autoscale.headcount import desired_replicas
from autoscale.policies.independent import Memory, decided, is_due, mean, serving_replicas, standing, summed
from autoscale.ratio import PdRatio
from autoscale.slo import SloConfig
from autoscale.types import Decision, ReplicaStats, Shown, Snapshot
from kvtransfer.topology import Role

# Share of a decode engine's KV that one waiting request is taken to need (collect_metrics).
_WAITING_KV_FRAC = 0.02


class DynamoLoadConfig(BaseModel):
    """The thresholds, and how long their means are taken over."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    kind: Literal["dynamo_load"] = "dynamo_load"
    adjustment_s: float = Field(180.0, gt=0.0, description="Time between two decisions: --adjustment-interval.")
    pull_s: float = Field(10.0, gt=0.0, description="Time between two looks: --metric-pulling-interval.")
    prefill_up_requests: float = Field(5.0, ge=0.0, description="A longer mean queue adds a prefill replica.")
    prefill_down_requests: float = Field(0.2, ge=0.0, description="A shorter one takes one away.")
    decode_up_kv_frac: float = Field(0.9, ge=0.0, description="A higher mean KV usage adds a decode replica.")
    decode_down_kv_frac: float = Field(0.5, ge=0.0, description="A lower one takes one away.")
    decode_grace_intervals: int = Field(
        3,
        ge=0,
        description="No decode replica leaves before so many intervals have ended, from that on which added one: "
        "NEW_DECODE_WORKER_GRACE_PERIOD.",
    )
    prefill_trend_intervals: float = Field(
        3.0,
        ge=0.0,
        description="So far ahead the queue's trend must leave it too long: NEW_PREFILL_WORKER_QUEUE_BUFFER_PERIOD.",
    )

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
    """-1, 0 or 1: by the mean queue, and more only where its trend does not bring it down by itself.

    Args:
        mean_queue: requests, over the interval.
        first: the queue when the interval began.
        last: the queue now.
        config: the thresholds.
    """
    if mean_queue < config.prefill_down_requests:
        return -1
    ahead = last + (last - first) * config.prefill_trend_intervals
    return int(mean_queue > config.prefill_up_requests and ahead > config.prefill_up_requests)


def decode_step(mean_kv_frac: float, grace_intervals: float, config: DynamoLoadConfig) -> int:
    """-1, 0 or 1: by the mean KV usage, and fewer only after the grace of the last one that was added."""
    if mean_kv_frac < config.decode_down_kv_frac:
        return 0 if grace_intervals > 0 else -1
    return int(mean_kv_frac > config.decode_up_kv_frac)


class DynamoLoad:
    """The policy; see ``decide``."""

    def __init__(self, config: DynamoLoadConfig, *, ratio: PdRatio, slo: SloConfig) -> None:
        self._config = config

    def decide(self, snapshot: Snapshot) -> Decision:
        """Once an interval a step of each role, unless replicas came or went in it."""
        config, now = self._config, (snapshot.now_s,)
        serving = serving_replicas(snapshot)
        counts = tuple(float(len(serving[role])) for role in Role)
        memory: dict[str, tuple[float, ...]] = {"began_s": now, "workers": counts, **snapshot.state.memory}
        if "pulled_s" not in memory or is_due(snapshot, memory, "pulled_s", config.pull_s):
            memory |= {"pulled_s": now, **_looked(serving, memory)}
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


def _looked(serving: dict[Role, list[ReplicaStats]], memory: Memory) -> dict[str, tuple[float, ...]]:
    """The interval's sums with one look at the queue of all prefill replicas, and at each decode replica."""
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
