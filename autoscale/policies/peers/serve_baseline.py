"""Ray Serve's own autoscaling by ongoing requests, each deployment by itself (Ray 2.60.0, which is not imported).

Source: ``ray/serve/autoscaling_policy.py`` of Ray 2.60.0, ``_core_replica_queue_length_policy`` (the target),
``_apply_scaling_factors`` and ``_apply_delay_logic``; defaults of ``ray.serve.config.AutoscalingConfig``. A test
compares the functions below with them.
"""

import math
from typing import Literal

from pydantic import Field

from autoscale.headcount import desired_replicas
from autoscale.policies.peers.independent import decided, decided_by, serving_replicas
from autoscale.policies.policy import Policy
from autoscale.types import Decision, Shown, Snapshot
from kvtransfer.strict_config import StrictConfig
from kvtransfer.topology import Role

# Tolerance of elapsed times, seconds: Ray's _DELAY_ELAPSED_EPS_S.
_EPSILON_S = 1e-6


class RayBaselineConfig(StrictConfig):
    """``AutoscalingConfig`` of both deployments.

    Ray Serve LLM sets 1e9 ongoing requests, which never scales, so a comparison chooses its own target.
    """

    kind: Literal["ray_baseline"] = "ray_baseline"
    prefill_ongoing_requests: float = Field(2.0, gt=0.0, description="target_ongoing_requests of one prefill replica.")
    decode_ongoing_requests: float = Field(2.0, gt=0.0, description="target_ongoing_requests of one decode replica.")
    upscaling_factor: float = Field(1.0, gt=0.0, description="Share of a wanted growth that is applied.")
    downscaling_factor: float = Field(1.0, gt=0.0, description="Share of a wanted shrinkage that is applied.")
    upscale_delay_s: float = Field(30.0, ge=0.0, description="How long more replicas must be wanted without a break.")
    downscale_delay_s: float = Field(600.0, ge=0.0)
    """How long fewer replicas must be wanted without a break."""
    look_back_s: float = Field(30.0, gt=0.0, description="Ongoing requests are averaged over this time.")


def replicas_for_ongoing(ongoing_requests: float, running_replicas: int, target: float) -> float:
    """``running * (ongoing / (target * running))``, as Ray rounds it (``_core_replica_queue_length_policy``)."""
    return running_replicas * (ongoing_requests / (target * running_replicas))


def scaled(desired: float, running_replicas: int, config: RayBaselineConfig) -> int:
    """Go a share of the way from the running replicas to the desired ones (``_apply_scaling_factors``)."""
    if running_replicas == 0:
        return math.ceil(desired)
    delta = desired - running_replicas
    count = math.ceil(running_replicas + (config.upscaling_factor if delta > 0 else config.downscaling_factor) * delta)
    # Rounding up would otherwise keep the last surplus replica for ever.
    is_stuck = math.ceil(float(desired)) < running_replicas and count == running_replicas
    return count - 1 if is_stuck else count


def delayed(
    desired: int, target_replicas: int, since: tuple[float, ...], now_s: float, config: RayBaselineConfig
) -> tuple[int, tuple[float, ...]]:
    """The count once it has been wanted for long enough, the present target before that (``_apply_delay_logic``).

    ``since``: the direction, 1 up or -1 down, that has been wanted without a break, and since when; empty: neither. The
    second result is ``since`` for the next time.
    """
    if desired == target_replicas:
        return target_replicas, ()
    way = 1.0 if desired > target_replicas else -1.0
    if way < 0.0 and target_replicas != 1:
        desired = max(1, desired)  # to zero only from one
    began_s = since[1] if since and since[0] == way else now_s
    if now_s - began_s + _EPSILON_S >= (config.upscale_delay_s if way > 0.0 else config.downscale_delay_s):
        return desired, ()
    return target_replicas, (way, began_s)


class RayBaseline(Policy[RayBaselineConfig]):
    """Replicas of each role from the mean of their ongoing requests over a time."""

    def decide(self, snapshot: Snapshot) -> Decision:
        """Size each role by its mean ongoing requests; a role without reports stays as it is."""
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
            # Requests that a replica has accepted and not answered yet.
            observed = [
                running + (replica.waiting_requests or 0.0) + (replica.deferred_requests or 0.0)
                for replica in replicas
                if (running := replica.running_requests) is not None
            ]
            if observed:
                window.append((now_s, math.fsum(observed)))
            memory[times], memory[totals] = tuple(at for at, _ in window), tuple(total for _, total in window)
            if not window or not replicas:
                continue
            total = math.fsum(memory[totals]) / len(window)
            desired = max(0, scaled(replicas_for_ongoing(total, len(replicas), target), len(replicas), config))
            wanted[role], memory[since] = delayed(desired, present[role], memory.get(since, ()), now_s, config)
            shown.append(Shown(name=f"{role}_ongoing_requests", value=total / len(replicas), target=target))
        if not shown:
            return decided(snapshot, None, "no replica reports its ongoing requests", memory=memory)
        return decided_by(snapshot, wanted, shown, memory=memory)
