"""A search for the best policy and parameters on a workload, in a pool of processes.

Every policy gets the same number of tries, or as many as its space has points if that is fewer. Each try is one point
of the policy's space, with a random value of each parameter.

Source: HeteroScale Algorithm 1.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, as_completed
from dataclasses import dataclass
from typing import Any

from autoscale.decide.tuning import merged
from autoscale.policies.heteroscale import Signal
from autoscale.sim.compare import OracleResult, run_named
from autoscale.sim.config import SimConfig
from autoscale.sim.outcome import Result
from autoscale.sim.pressure import PressureResult
from kvtransfer.topology import Role

# Possible values of each parameter, by the parameter's path in the section ``autoscale``.
Space = Mapping[str, Sequence[Any]]

# Values of guard, gate and window for every policy except fixed counts.
_COMMON: Space = {
    "guard.cooldown_in_s": (0.0, 30.0, 60.0, 120.0),
    "guard.damping_in_frac": (0.5, 1.0),
    "guard.step_out_replicas": (8, 32),
    "gate.observation_s": (0.0, 10.0, 30.0),
    "window_s": (20.0, 30.0, 60.0),
}
# Values of each policy's own fields. The values of a name with a star are factors: of a figure of the pressure test, or
# of the smallest fixed counts. The value of ``pd_ratio*`` is not used: the ratio is always that of the pressure test.
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


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A policy with parameters, as changes of a configuration's ``autoscale``, and the result of its run."""

    kind: str
    changes: Mapping[str, Any]
    result: Result

    def score(self, attainment_frac: float) -> tuple[bool, float]:
        """A sort key, the best candidate last.

        Candidates below ``attainment_frac`` come first, by rising attainment. The others follow by falling GPU-hours.
        """
        outcome = self.result.outcome
        if outcome.slo_attainment_frac < attainment_frac:
            return False, outcome.slo_attainment_frac
        return True, -outcome.gpu_hours


def draw(
    config: SimConfig,
    kind: str,
    tries: int,
    pressure: PressureResult,
    first: Mapping[str, int],
    rng: random.Random,
) -> list[dict[str, Any]]:
    """``tries`` different points of a policy's space, each as changes of ``autoscale``; fewer if it has fewer.

    Points that the other settings do not allow are left out, such as a window shorter than two decisions.

    ``first``: fixed counts that serve the workload, by role; ``static`` takes multiples of them.
    """
    space = {**SPACES[kind], **({} if kind == "static" else _COMMON)}
    drawn: dict[str, dict[str, Any]] = {}
    for _ in range(20 * tries):  # points may repeat: more draws than tries, but not for ever
        point = {name: rng.choice(values) for name, values in space.items()}
        if str(point) not in drawn:
            changes: dict[str, Any] = {"policy": {"kind": kind}}
            for name, value in point.items():
                changes = merged(changes, _change(config, name, value, pressure, first))
            if _is_possible(config, kind, changes):
                drawn[str(point)] = changes
        if len(drawn) == tries:
            break
    return list(drawn.values())


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
    """Simulate every policy with ``tries`` parameters on the oracle's scenario: candidates by policy, the best first.

    A policy without possible parameters is left out. ``pool``: its processes simulate. ``on_done``: called with each
    candidate.

    Raises:
        ValueError: no policy has possible parameters.
    """
    jobs = {}
    for kind in kinds:
        # Each policy has its own random numbers, so its points do not depend on which other policies are searched.
        for changes in draw(config, kind, tries, pressure, oracle.static.fixed_counts, random.Random(f"{seed} {kind}")):
            changed = config.model_copy(update={"policies": {kind: changes}})
            jobs[pool.submit(run_named, changed, kind, oracle.scenario, oracle.first_counts)] = (kind, changes)
    candidates: dict[str, list[Candidate]] = {kind: [] for kind in kinds}
    for job in as_completed(jobs):
        kind, changes = jobs[job]
        candidate = Candidate(kind=kind, changes=changes, result=job.result())
        candidates[kind].append(candidate)
        on_done(candidate)
    least = oracle.least_frac
    ranked = {kind: sorted(each, key=lambda one: one.score(least), reverse=True) for kind, each in candidates.items()}
    if not any(ranked.values()):
        raise ValueError(f"{', '.join(kinds)}: the configuration allows no parameters that are searched")
    return {kind: each for kind, each in ranked.items() if each}


def _is_possible(config: SimConfig, kind: str, changes: Mapping[str, Any]) -> bool:
    """Whether the configuration allows the changes."""
    try:
        config.model_copy(update={"policies": {kind: changes}}).autoscale_config(kind)
    except ValueError:
        return False
    return True


def _change(
    config: SimConfig, name: str, value: Any, pressure: PressureResult, first: Mapping[str, int]
) -> dict[str, Any]:
    """The change of ``autoscale`` for one parameter of a space and its value.

    ``first``: as in ``draw``.
    """
    best = pressure.best
    if name == "pd_ratio*":
        return {"pd_ratio": str(pressure.pd_ratio)}
    if name == "policy.target*":
        expected = best.signals[Signal.DECODE_TPS] or 1.0  # ``None``: no split keeps the objectives at any rate
        return {"policy": {"signal": str(Signal.DECODE_TPS), "target": expected * value}}
    if name == "policy.counts*":
        pools = {str(role): config.groups[0].pool(role) for role in Role}
        wanted = {role: max(pools[role].lowest_replicas, round(count * value)) for role, count in first.items()}
        return {"policy": {role: min(count, pools[role].highest_replicas) for role, count in wanted.items()}}
    if name.endswith("*"):  # a factor of one replica's rate at the best split
        # 0: no split keeps the objectives at any rate.
        value *= (best.requests_per_s or 1.0) / (best.prefill if "prefill" in name else best.decode)
    # From the path "a.b" to {"a": {"b": value}}.
    for part in reversed(name.removesuffix("*").split(".")):
        value = {part: value}
    return {**value}
