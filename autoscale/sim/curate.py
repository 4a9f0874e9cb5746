"""Policies x parameters on a workload, and the best of them (pure but for the processes given).

Source: HeteroScale Algorithm 1. Every policy gets the same number of tries, drawn from its own space of parameters.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, as_completed
from dataclasses import dataclass
from typing import Any

from autoscale.policies.heteroscale import Signal
from autoscale.sim.compare import OracleResult, Result, run_named
from autoscale.sim.config import SimConfig
from autoscale.sim.pressure import PressureResult
from autoscale.tuning import merged
from kvtransfer.topology import Role

Space = Mapping[str, Sequence[Any]]

# What every policy may choose of the guard, the gate and the window.
_COMMON: Space = {
    "guard.cooldown_in_s": (0.0, 30.0, 60.0, 120.0),
    "guard.damping_in_frac": (0.5, 1.0),
    "guard.step_out_replicas": (8, 32),
    "gate.observation_s": (0.0, 10.0, 30.0),
    "window_s": (20.0, 30.0, 60.0),
}
# What each may choose of its own. Names with a star are multiples of what the pressure test expects.
SPACES: Mapping[str, Space] = {
    "default": {
        "policy.prefill_spare": (0.5, 0.75, 1.0, 1.25, 1.5),
        "policy.decode_spare": (1.0, 2.0, 3.0, 4.0),
        "policy.memory_s": (30.0, 60.0, 120.0),
        "policy.stay_starts": (1.0, 2.0, 4.0, 8.0),
        "policy.ahead_frac": (0.0, 0.5, 1.0),
        "gate.is_enabled": (False, True),
    },
    "dopd": {
        "policy.interval_s": (30.0, 60.0, 100.0),
        "policy.concurrency_frac": (0.6, 0.75, 0.9),
        "policy.queue_requests": (2, 5, 10),
    },
    "dynamo": {
        "policy.adjustment_s": (30.0, 60.0, 180.0),
        "policy.slack_frac": (0.6, 0.7, 0.8),
        "policy.is_reactive": (False, True),
    },
    "dynamo_load": {
        "policy.adjustment_s": (15.0, 30.0, 60.0, 180.0),
        "policy.prefill_up_requests": (0.5, 1.0, 2.0, 5.0),
        "policy.decode_up_kv_frac": (0.6, 0.75, 0.9),
    },
    "dynamo_sla": {
        "policy.adjustment_s": (30.0, 60.0, 180.0),
        "policy.is_corrected": (False, True),
    },
    "heteroscale": {
        "policy.target*": (0.5, 0.6, 0.7, 0.8, 0.9),
        "pd_ratio*": (1.0,),
        "guard.cooldown_out_s": (0.0, 15.0),
    },
    "hpa": {
        "policy.prefill.target": (0.4, 0.5, 0.6, 0.7, 0.8),
        "policy.decode.metric": ("kv_usage_frac",),
        "policy.decode.target": (0.4, 0.5, 0.6, 0.7, 0.8),
        "policy.down": tuple(
            {"window_s": window_s, "step_replicas": 0, "step_frac": 1.0, "period_s": 15.0}
            for window_s in (60.0, 120.0, 300.0)
        ),
    },
    "llmd_token_aware": {
        "policy.prefill_wait_s": (0.25, 0.5, 1.0, 1.5),
        "policy.decode_kv_frac": (0.5, 0.6, 0.7, 0.8),
        "policy.up": tuple(
            {"window_s": 0.0, "step_replicas": replicas, "step_frac": 0.0, "period_s": period_s}
            for replicas, period_s in ((1, 180.0), (4, 60.0), (16, 15.0))
        ),
    },
    "queue_depth": {
        "policy.prefill_requests_per_s*": (0.5, 0.6, 0.7, 0.8, 0.9),
        "policy.decode_requests_per_s*": (0.6, 0.7, 0.8, 0.9, 1.0),
        "policy.target_queue": (0, 4, 16),
        "policy.lead_s": (0.0, 30.0),
    },
    "ray_baseline": {
        "policy.prefill_ongoing_requests": (1, 2, 3, 4),
        "policy.decode_ongoing_requests": (20, 40, 60, 80, 120),
        "policy.upscale_delay_s": (0.0, 10.0, 30.0),
        "policy.downscale_delay_s": (60.0, 120.0, 600.0),
    },
    "static": {"policy.counts*": (0.9, 1.0, 1.1, 1.2, 1.3)},
    "token_velocity": {
        "policy.headroom_frac": (0.0, 0.1, 0.25, 0.4, 0.6),
        "policy.convertible_frac": (0.0, 0.25, 0.5),
    },
    "wva": {
        "policy.saturated_kv_frac": (0.6, 0.7, 0.8),
        "policy.saturated_waiting_requests": (5, 10),
        "policy.prefill_aggression_frac": (0.5, 1.0, 1.5),
        "policy.decode_aggression_frac": (0.5, 1.0, 1.5),
    },
}
# Kept out of the common space: they set counts by themselves.
_PLAIN = ("static",)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A policy with parameters, as what is put over a configuration's ``autoscale``, and how it fared."""

    kind: str
    changes: Mapping[str, Any]
    result: Result

    def score(self, attainment_frac: float) -> tuple[bool, float]:
        """Better is larger: whether it attains enough, then fewer GPU-hours; else what it attains."""
        found = self.result.outcome
        is_attained = found.slo_attainment_frac >= attainment_frac
        return is_attained, -found.gpu_hours if is_attained else found.slo_attainment_frac


def draw(
    kind: str,
    tries: int,
    pressure: PressureResult,
    first: Mapping[Role, int],
    limits: Mapping[Role, tuple[int, int]],
    rng: random.Random,
) -> list[dict[str, Any]]:
    """Parameters of a policy, each as what is put over ``autoscale``; no two the same.

    Args:
        kind: the policy.
        tries: how many; fewer where its space has fewer points.
        pressure: what the workload's signals are expected to be.
        first: fixed counts that serve the workload, of which ``static`` takes multiples.
        limits: the fewest and the most replicas that a role may have.
        rng: draws.
    """
    space = {**SPACES[kind], **({} if kind in _PLAIN else _COMMON)}
    drawn: list[dict[str, Any]] = []
    seen = set()
    for _ in range(20 * tries):
        point = {name: rng.choice(values) for name, values in space.items()}
        if (key := str(point)) not in seen:
            seen.add(key)
            drawn.append(_changes(kind, point, pressure, first, limits))
        if len(drawn) == tries:
            break
    return drawn


def curate(
    config: SimConfig,
    oracle: OracleResult,
    pressure: PressureResult,
    kinds: Sequence[str],
    *,
    tries: int,
    seed: int,
    pool: Executor,
    on_done: Callable[[Candidate], None] = lambda candidate: None,
) -> dict[str, list[Candidate]]:
    """Every policy with its parameters on a scenario, the best of each first.

    Args:
        config: cluster and objectives.
        oracle: the scenario, and the counts that all begin with.
        pressure: the workload's pressure test.
        kinds: the policies.
        tries: parameters of each.
        seed: draws parameters.
        pool: where simulations run.
        on_done: told each candidate.
    """
    fixed = {role: int(size) for role, size in oracle.static.sizes.items()}
    limits = {key.role: (pool.lowest_replicas, pool.highest_replicas) for key, pool in oracle.scenario.pools.items()}
    jobs = {}
    for kind in kinds:
        for changes in draw(kind, tries, pressure, fixed, limits, random.Random(f"{seed} {kind}")):
            named = config.model_copy(update={"policies": {kind: changes}})
            jobs[pool.submit(run_named, named, kind, oracle.scenario, oracle.first_counts)] = (kind, changes)
    found: dict[str, list[Candidate]] = {kind: [] for kind in kinds}
    for job in as_completed(jobs):
        kind, changes = jobs[job]
        candidate = Candidate(kind=kind, changes=changes, result=job.result())
        found[kind].append(candidate)
        on_done(candidate)
    least = oracle.least_frac
    return {kind: sorted(each, key=lambda one: one.score(least), reverse=True) for kind, each in found.items()}


def _changes(
    kind: str,
    point: Mapping[str, Any],
    pressure: PressureResult,
    first: Mapping[Role, int],
    limits: Mapping[Role, tuple[int, int]],
) -> dict[str, Any]:
    changes: dict[str, Any] = {"policy": {"kind": kind}}
    for name, value in point.items():
        if name == "pd_ratio*":
            changes = merged(changes, {"pd_ratio": str(pressure.pd_ratio)})
        elif name == "policy.target*":
            expected = pressure.best.signals[Signal.DECODE_TPS] or 1.0
            changes = merged(changes, {"policy": {"signal": str(Signal.DECODE_TPS), "target": expected * value}})
        elif name == "policy.counts*":
            counts = {
                str(role): min(max(limits[role][0], round(count * value)), limits[role][1])
                for role, count in first.items()
            }
            changes = merged(changes, {"policy": counts})
        elif name.endswith("_requests_per_s*"):
            best = pressure.best
            served = best.requests_per_s / (best.prefill if "prefill" in name else best.decode)
            changes = merged(changes, {"policy": {name.removeprefix("policy.").removesuffix("*"): served * value}})
        else:
            nested: Any = value
            for part in reversed(name.split(".")):
                nested = {part: nested}
            changes = merged(changes, nested)
    return changes
