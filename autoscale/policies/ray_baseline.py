"""Ray Serve's own autoscaling by ongoing requests, one deployment by itself (Ray 2.60.0, no import of it).

Source: ``ray/serve/autoscaling_policy.py`` of Ray 2.60.0, ``_core_replica_queue_length_policy`` (the target),
``_apply_scaling_factors`` and ``_apply_delay_logic``; defaults of ``ray.serve.config.AutoscalingConfig``. A test holds
the functions below against those.
"""

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from autoscale.headcount import desired_replicas
from autoscale.policies.independent import decided, serving_replicas
from autoscale.ratio import PdRatio
from autoscale.slo import SloConfig
from autoscale.types import Decision, ReplicaStats, Shown, Snapshot
from kvtransfer.topology import Role

# Of elapsed times, as Ray's _DELAY_ELAPSED_EPS_S.
_EPSILON_S = 1e-6


class RayBaselineConfig(BaseModel):
    """``AutoscalingConfig`` of both deployments.

    Ray Serve LLM sets 1e9 ongoing requests, which never scales, so a comparison has to choose its own.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    kind: Literal["ray_baseline"] = "ray_baseline"
    prefill_ongoing_requests: float = Field(2.0, gt=0.0, description="Of one prefill replica: target_ongoing_requests.")
    decode_ongoing_requests: float = Field(2.0, gt=0.0, description="Of one decode replica: target_ongoing_requests.")
    upscaling_factor: float = Field(1.0, gt=0.0, description="Share of a wanted growth that is asked for.")
    downscaling_factor: float = Field(1.0, gt=0.0, description="Share of a wanted shrinkage that is asked for.")
    upscale_delay_s: float = Field(30.0, ge=0.0, description="How long more must be wanted without a break.")
    downscale_delay_s: float = Field(600.0, ge=0.0, description="How long fewer must be wanted without a break.")
    look_back_s: float = Field(30.0, gt=0.0, description="Ongoing requests are averaged over so long.")


def replicas_for_ongoing(ongoing_requests: float, running_replicas: int, target: float) -> float:
    """``running * (ongoing / (target * running))``, as Ray rounds it (``_core_replica_queue_length_policy``).

    Args:
        ongoing_requests: of all replicas of a deployment.
        running_replicas: at least one.
        target: ongoing requests of one replica.
    """
    return running_replicas * (ongoing_requests / (target * running_replicas))


def scaled(desired: float, running_replicas: int, *, upscaling_factor: float, downscaling_factor: float) -> int:
    """That share of the way from the running replicas to the desired ones, whole (``_apply_scaling_factors``)."""
    if running_replicas == 0:
        return math.ceil(desired)
    delta = desired - running_replicas
    count = math.ceil(running_replicas + (upscaling_factor if delta > 0 else downscaling_factor) * delta)
    # Rounding up would otherwise hold the last one for ever.
    is_stuck = math.ceil(float(desired)) < running_replicas and count == running_replicas
    return count - 1 if is_stuck else count


def delayed(
    desired: int,
    target_replicas: int,
    since: tuple[float, ...],
    now_s: float,
    *,
    upscale_delay_s: float,
    downscale_delay_s: float,
) -> tuple[int, tuple[float, ...]]:
    """The count once it has been wanted for long enough, the present target before that (``_apply_delay_logic``).

    Args:
        desired: replicas wanted now.
        target_replicas: what the deployment works towards.
        since: the way, 1 up or -1 down, in which it has been wanted without a break, and from when; empty for neither.
        now_s: the time.
        upscale_delay_s: for how long more must be wanted.
        downscale_delay_s: for how long fewer must be wanted.

    Returns:
        Replicas, and ``since`` for the next time.
    """
    if desired == target_replicas:
        return target_replicas, ()
    way = 1.0 if desired > target_replicas else -1.0
    if way < 0.0 and target_replicas != 1:
        desired = max(1, desired)  # to zero only from one
    began_s = since[1] if since and since[0] == way else now_s
    if now_s - began_s + _EPSILON_S >= (upscale_delay_s if way > 0.0 else downscale_delay_s):
        return desired, ()
    return target_replicas, (way, began_s)


class RayBaseline:
    """The policy; see ``decide``."""

    def __init__(self, config: RayBaselineConfig, *, ratio: PdRatio, slo: SloConfig) -> None:
        self._config = config

    def decide(self, snapshot: Snapshot) -> Decision:
        """Each role by the mean of its ongoing requests; one that shows none stays as it is."""
        config, now_s, memory = self._config, snapshot.now_s, dict(snapshot.state.memory)
        present = desired_replicas(snapshot.state.desired)
        wanted, shown = {role: float(present[role]) for role in Role}, list[Shown]()
        for role, replicas in serving_replicas(snapshot).items():
            target = config.prefill_ongoing_requests if role is Role.PREFILL else config.decode_ongoing_requests
            times, totals, since = f"{role}_at_s", f"{role}_ongoing", f"{role}_since"
            oldest_s = now_s - config.look_back_s
            window = [
                (at_s, ongoing)
                for at_s, ongoing in zip(memory.get(times, ()), memory.get(totals, ()), strict=True)
                if oldest_s <= at_s < now_s
            ]
            seen = [ongoing for replica in replicas if (ongoing := _ongoing(replica)) is not None]
            if seen:
                window.append((now_s, math.fsum(seen)))
            memory[times], memory[totals] = tuple(at for at, _ in window), tuple(total for _, total in window)
            if not window or not replicas:
                continue
            total = math.fsum(memory[totals]) / len(window)
            desired = scaled(
                replicas_for_ongoing(total, len(replicas), target),
                len(replicas),
                upscaling_factor=config.upscaling_factor,
                downscaling_factor=config.downscaling_factor,
            )
            wanted[role], memory[since] = delayed(
                max(0, desired),
                present[role],
                memory.get(since, ()),
                now_s,
                upscale_delay_s=config.upscale_delay_s,
                downscale_delay_s=config.downscale_delay_s,
            )
            shown.append(Shown(name=f"{role}_ongoing_requests", value=total / len(replicas), target=target))
        if not shown:
            return decided(snapshot, None, "no replica reports its ongoing requests", memory=memory)
        reason = ", ".join(f"{entry.name} {entry.value:.4g} for {entry.target:.4g}" for entry in shown)
        return decided(snapshot, wanted, reason, memory=memory, shown=tuple(shown))


def _ongoing(replica: ReplicaStats) -> float | None:
    """Requests that a replica has taken and not answered yet."""
    if replica.running_requests is None:
        return None
    return replica.running_requests + (replica.waiting_requests or 0.0) + (replica.deferred_requests or 0.0)
