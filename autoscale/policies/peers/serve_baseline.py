"""Ray Serve's own autoscaling by ongoing requests, which sizes each deployment by itself.

This room is pure, so Ray's functions are written again here. A test compares them with Ray's.

Source: ``ray/serve/autoscaling_policy.py`` of Ray 2.60.0, ``_core_replica_queue_length_policy``,
``_apply_scaling_factors`` and ``_apply_delay_logic``; defaults of ``ray.serve.config.AutoscalingConfig``.
"""

import math
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from autoscale.headcount import desired_replicas
from autoscale.policies.peers.independent import decided, decided_by, serving_replicas
from autoscale.policies.policy import Policy
from autoscale.types import Decision, ReplicaStats, Shown, Snapshot
from kvtransfer.strict_config import StrictConfig
from kvtransfer.topology import Role

# Tolerance of elapsed times, seconds: Ray's _DELAY_ELAPSED_EPS_S.
_EPSILON_S = 1e-6


class RayBaselineConfig(StrictConfig):
    """``AutoscalingConfig`` of both deployments.

    Ray Serve LLM's own target is 1e9 ongoing requests, which no load reaches. So a comparison has to choose targets.
    """

    kind: Literal["ray_baseline"] = "ray_baseline"
    prefill_ongoing_requests: float = Field(2.0, gt=0.0, description="target_ongoing_requests of one prefill replica.")
    decode_ongoing_requests: float = Field(2.0, gt=0.0, description="target_ongoing_requests of one decode replica.")
    upscaling_factor: float = Field(1.0, gt=0.0, description="Share of a needed growth that is applied.")
    downscaling_factor: float = Field(1.0, gt=0.0, description="Share of a possible shrinkage that is applied.")
    upscale_delay_s: float = Field(30.0, ge=0.0, description="Time for which more replicas must be needed.")
    downscale_delay_s: float = Field(600.0, ge=0.0)
    """Time for which fewer replicas must be needed."""
    look_back_s: float = Field(30.0, gt=0.0, description="Ongoing requests are averaged over this time.")


def replicas_for_ongoing(ongoing_requests: float, running_replicas: int, target: float) -> float:
    """Wanted replicas: ``running * (ongoing / (target * running))`` (``_core_replica_queue_length_policy``).

    The formula is not shortened, so that it has the same rounding errors as Ray's.

    ``ongoing_requests``: of all replicas together; ``running_replicas``: at least 1; ``target``: per replica.
    """
    return running_replicas * (ongoing_requests / (target * running_replicas))


def apply_scaling_factors(desired: float, running_replicas: int, config: RayBaselineConfig) -> int:
    """Go a share of the way from the running replicas to the desired ones (``_apply_scaling_factors``)."""
    if running_replicas == 0:
        return math.ceil(desired)
    delta = desired - running_replicas
    factor = config.upscaling_factor if delta > 0 else config.downscaling_factor
    count = math.ceil(running_replicas + factor * delta)
    # Because of the rounding up, the last surplus replica would stay for ever.
    is_stuck = math.ceil(float(desired)) < running_replicas and count == running_replicas
    return count - 1 if is_stuck else count


def apply_delay_logic(
    desired: int, target_replicas: int, change: tuple[float, ...], now_s: float, config: RayBaselineConfig
) -> tuple[int, tuple[float, ...]]:
    """The desired count once its delay has passed, before that the present target (``_apply_delay_logic``).

    Args:
        desired: count that the ongoing requests need now.
        target_replicas: count that the cluster works towards.
        change: the change that waits for its delay, as returned by the last call. It is (1 up or -1 down, time since
            which this direction is needed without a break), or empty.
        now_s: present time.
        config: the delays.

    Returns:
        The new target, and the change that waits now.
    """
    if desired == target_replicas:
        return target_replicas, ()
    direction = 1.0 if desired > target_replicas else -1.0
    if direction < 0.0 and target_replicas != 1:
        desired = max(1, desired)  # only a target of 1 falls to 0
    began_s = change[1] if change and change[0] == direction else now_s
    delay_s = config.upscale_delay_s if direction > 0.0 else config.downscale_delay_s
    if now_s - began_s + _EPSILON_S >= delay_s:
        return desired, ()
    return target_replicas, (direction, began_s)


def _ongoing_requests(replicas: Sequence[ReplicaStats]) -> float | None:
    """Requests that the replicas have accepted and not answered yet; ``None``: no replica reports them."""
    ongoing = [
        running + (replica.waiting_requests or 0.0) + (replica.deferred_requests or 0.0)
        for replica in replicas
        if (running := replica.running_requests) is not None
    ]
    return math.fsum(ongoing) if ongoing else None


class RayBaseline(Policy[RayBaselineConfig]):
    """Replicas of each role from the mean of their ongoing requests in the last ``look_back_s``."""

    is_fit_for_aggregated = True

    def decide(self, snapshot: Snapshot) -> Decision:
        """Size each role by its mean ongoing requests; a role without reports stays as it is."""
        config, memory = self._config, dict(snapshot.state.memory)
        present = desired_replicas(snapshot.state.desired)
        wanted, shown = {role: float(present[role]) for role in Role}, list[Shown]()
        for role, replicas in serving_replicas(snapshot).items():
            totals = self._window(role, _ongoing_requests(replicas), snapshot.now_s, memory)
            if not totals or not replicas:
                continue
            target = config.prefill_ongoing_requests if role is Role.PREFILL else config.decode_ongoing_requests
            mean_total, running = math.fsum(totals) / len(totals), len(replicas)
            needed = replicas_for_ongoing(mean_total, running, target)
            # Ray clips to its bounds at this place. Here 0 is the only bound: a downscaling_factor above 1 may lead
            # below it. The guard applies the configured bounds.
            desired = max(0, apply_scaling_factors(needed, running, config))
            change_name = f"{role}_since"
            wanted[role], memory[change_name] = apply_delay_logic(
                desired, present[role], memory.get(change_name, ()), snapshot.now_s, config
            )
            shown.append(Shown(name=f"{role}_ongoing_requests", value=mean_total / running, target=target))
        if not shown:
            return decided(snapshot, None, "no replica reports its ongoing requests", memory=memory)
        return decided_by(snapshot, wanted, shown, memory=memory)

    def _window(
        self, role: Role, ongoing_requests: float | None, now_s: float, memory: dict[str, tuple[float, ...]]
    ) -> tuple[float, ...]:
        """A role's ongoing requests at each tick of the last ``look_back_s``; updates the two series in ``memory``.

        ``ongoing_requests``: at this tick; ``None``: not observed.
        """
        times_name, totals_name = f"{role}_at_s", f"{role}_ongoing"
        oldest_s = now_s - self._config.look_back_s
        earlier = zip(memory.get(times_name, ()), memory.get(totals_name, ()), strict=True)
        window = [(at_s, total) for at_s, total in earlier if oldest_s <= at_s < now_s]
        if ongoing_requests is not None:
            window.append((now_s, ongoing_requests))
        memory[times_name] = tuple(at_s for at_s, _ in window)
        memory[totals_name] = tuple(total for _, total in window)
        return memory[totals_name]
