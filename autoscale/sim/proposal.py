"""A proposal for a running application: other settings that serve the day of its log with fewer GPU-hours (pure).

Source: HeteroScale Algorithm 1, SIMULATE of each policy and argmax, on the application's own last day.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from autoscale.decide.tuning import differing, tuned
from autoscale.headcount import EPSILON_REPLICAS
from autoscale.sim.config import SimConfig
from autoscale.sim.curate import Candidate
from autoscale.sim.logged_day import LoggedDay
from kvtransfer.topology import Role

# Name of the present settings among the policies of the simulation.
NOW = "now"
# Share of the GPU-hours that a proposal must save; less may be chance. A choice, not measured.
_WORTH_FRAC = 0.02
# Settings that the simulator does not have, or that are for a moment and not for a day.
_LEFT_OUT = (
    "policy",
    "override",
    "is_paused",
    "is_observing",
    "collector",
    "idle_to_zero_s",
    "gpu_types",
    "quota_gpus",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """The present settings and the proposed ones, each with the result of its run.

    Attributes:
        best: the proposed settings; ``None``: none is better than the present ones.
        changes: changes of ``args.autoscale`` for them; empty: there is no proposal.
        redeploy: why only a new deployment can make the changes; ``None``: ``tandem tune`` can.
    """

    now: Candidate
    best: Candidate | None
    changes: Mapping[str, Any]
    redeploy: str | None


def day_config(base: SimConfig, day: LoggedDay) -> SimConfig:
    """The simulator's configuration of a logged service; its present settings are the policy ``NOW``.

    ``base``: the engines, in one group; its limits, objectives and settings are replaced by those of the log.

    Raises:
        ValueError: the configuration has several groups, or the simulator cannot run the settings.
    """
    base.check_one_pair("a proposal")
    settings = day.config.model_dump(mode="json")
    kept = {name: value for name, value in settings.items() if name not in _LEFT_OUT}
    group = base.groups[0]
    pools = {
        str(role): group.pool(role).model_copy(
            update=dict(zip(("lowest_replicas", "highest_replicas"), bounds, strict=True))
        )
        for role, bounds in _bounds(day).items()
    }
    slo = day.config.slo
    objectives = base.slo.model_copy(
        update={
            "ttft_least_s": slo.ttft_s,
            # 1: the TTFT objective of a prompt grows with its length only if it does so in the application.
            "ttft_unloaded_factor": base.slo.ttft_unloaded_factor if slo.ttft_s_per_input_token else 1.0,
            "tpot_s": slo.tpot_s,
            "attainment_frac": slo.quantile_frac,
        }
    )
    updated = base.model_copy(
        update={
            "groups": (group.model_copy(update=pools),),
            "slo": objectives,
            "autoscale": kept,
            "policies": {NOW: {"policy": settings["policy"]}},
        }
    )
    updated.autoscale_config(NOW)  # raises ValueError for settings that the simulator cannot run
    return updated


def _bounds(day: LoggedDay) -> dict[Role, tuple[int, int]]:
    """Lowest and highest standard replicas of each role over all groups; the simulator needs one of each."""
    bounds = {}
    for role in Role:
        limits = [each for key, each in day.pools.root.items() if key.role is role]
        if not limits:
            raise ValueError(f"{day.service} has no {role} pools: the simulator needs both roles")
        lowest, highest = (
            math.floor(math.fsum(each) + EPSILON_REPLICAS)
            for each in zip(
                *((pool.capacity * pool.lowest_replicas, pool.capacity * pool.highest_replicas) for pool in limits),
                strict=True,
            )
        )
        bounds[role] = (max(1, lowest), max(1, highest))
    return bounds


def day_notes(base: SimConfig, day: LoggedDay) -> list[str]:
    """How the simulated application differs from the logged one, one sentence each."""
    group = base.groups[0]
    engines = ", ".join(dict.fromkeys(group.pool(role).profile.name for role in Role))
    notes = [f"engines are simulated by {engines}: --config names the profiles of yours"]
    if len(day.pools.root) > len(Role):
        notes.append("the application's groups are simulated as one group, of engines like those of the first one")
    for key, limits in day.pools.root.items():
        gpus = group.pool(key.role).profile.gpus
        if limits.gpus_per_replica and limits.gpus_per_replica != gpus:
            notes.append(f"a replica of {key} has {limits.gpus_per_replica:g} GPUs, its profile {gpus}")
    if day.config.slo.ttft_s_per_input_token:
        notes.append(
            f"long prompts have {base.slo.ttft_unloaded_factor:g} times their unloaded TTFT as objective, in place of "
            "slo.ttft_s_per_input_token"
        )
    changed = day.config.model_dump(mode="json")
    if hidden := [name for name in ("override", "is_paused", "is_observing", "idle_to_zero_s") if changed[name]]:
        notes.append(f"{', '.join(hidden)} of the application is left out: the policy decides all day")
    return notes


def propose(
    day: LoggedDay, config: SimConfig, now: Candidate, candidates: Iterable[Candidate], least_frac: float
) -> Proposal:
    """The best candidate, if it is better than the present settings.

    Args:
        day: the logged service.
        config: ``day_config`` of it.
        now: the present settings.
        candidates: other settings.
        least_frac: share of requests that must meet their objectives.
    """
    best = max(candidates, key=lambda one: one.score(least_frac), default=now)
    if not _is_better(best, now, least_frac):
        return Proposal(now=now, best=None, changes={}, redeploy=None)
    changes = _changes(day, config, best)
    try:
        tuned(day.config, changes, day.pools)
    except ValueError as error:
        return Proposal(now=now, best=best, changes=changes, redeploy=str(error))
    return Proposal(now=now, best=best, changes=changes, redeploy=None)


def _is_better(best: Candidate, now: Candidate, least_frac: float) -> bool:
    """Whether a candidate keeps the objectives and the present settings do not, or it is worth a change."""
    is_kept, _ = best.score(least_frac)
    was_kept, _ = now.score(least_frac)
    saved = best.result.outcome.gpu_hours < (1.0 - _WORTH_FRAC) * now.result.outcome.gpu_hours
    return is_kept and (not was_kept or saved)


def _changes(day: LoggedDay, config: SimConfig, best: Candidate) -> dict[str, Any]:
    """The changes of ``args.autoscale`` that lead from the present settings to a candidate's."""
    present = day.config.model_dump(mode="json")
    changes = differing(best.changes, present)
    if best.kind != present["policy"]["kind"]:
        # Another kind replaces the whole policy, so each field of it is a change; engine profiles are inside.
        named = config.model_copy(update={"policies": {best.kind: best.changes}})
        changes["policy"] = named.autoscale_config(best.kind).policy.model_dump(mode="json", exclude_unset=True)
    return changes
