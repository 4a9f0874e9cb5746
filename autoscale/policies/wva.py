"""WVA: saturation with headroom, each role by itself (the paper, sections III and V)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from autoscale.ratio import PdRatio
from autoscale.slo import SloConfig
from autoscale.types import Decision, Shown, Snapshot
from kvtransfer.topology import Role

# What floating point adds to a load and a capacity is no replica.
_EPSILON = 1e-9
# What one replica shows, in the order of the metrics: KV usage, 0..1, and requests that wait.
Load = tuple[float, float]
_METRICS = ("kv_usage", "queue")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Of one metric: from where a replica is saturated (tau), and the spare that it keeps below that (gamma)."""

    saturated: float
    spare: float


class WvaConfig(BaseModel):
    """When a replica is saturated, and how much below that it should stay.

    The defaults are those of the paper's section V-A; it gives none for the queue's spare, which is that of its code.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    kind: Literal["wva"] = "wva"
    saturated_kv_frac: float = Field(0.8, gt=0.0, le=1.0, description="KV usage of a saturated replica (tau_kv).")
    saturated_waiting_requests: float = Field(5.0, gt=0.0, description="Queue of a saturated replica (tau_q).")
    spare_kv_frac: float = Field(0.3, ge=0.0, description="A lower mean spare of KV scales out (gamma_kv).")
    spare_waiting_requests: float = Field(3.0, ge=0.0, description="A lower mean spare of queue scales out (gamma_q).")
    prefill_aggression_frac: float = Field(
        1.0, gt=0.0, description="Share of both spares that prefill keeps: above 1 it scales out sooner and further."
    )
    decode_aggression_frac: float = Field(1.0, gt=0.0, description="Share of both spares that decode keeps.")
    unsaturated_replicas: int = Field(
        2, ge=2, description="With fewer that are not saturated none leaves (MinNonSaturatedReplicasForScaleDown)."
    )

    @model_validator(mode="after")
    def _check_spares(self) -> "WvaConfig":
        for limit in (limit for role in Role for limit in self.limits(role)):
            if limit.spare >= limit.saturated:
                raise ValueError(
                    f"a spare of {limit.spare:g}, aggression included, leaves nothing to use below a saturation of "
                    f"{limit.saturated:g}: lower the spare or the aggression"
                )
        return self

    def limits(self, role: Role) -> tuple[Limit, Limit]:
        """Those of a role, in the order of the metrics."""
        share = self.prefill_aggression_frac if role is Role.PREFILL else self.decode_aggression_frac
        return (
            Limit(saturated=self.saturated_kv_frac, spare=self.spare_kv_frac * share),
            Limit(saturated=self.saturated_waiting_requests, spare=self.spare_waiting_requests * share),
        )


def replicas_for_load(load: float, limit: Limit) -> int:
    """``n = ceil((Load_current + delta_safety) / tau)`` with delta_safety = n gamma, for a role's whole load (Eq. 4).

    The safety buffer is that of the replicas there will be, so n = Load / (tau - gamma), and Eq. 3 is quiet at once.
    """
    return math.ceil(load / (limit.saturated - limit.spare) - _EPSILON)


def freed_replicas(unsaturated: Sequence[Load], limits: Sequence[Limit], fewest: int) -> int:
    """How many whole replicas can be emptied, the least loaded first, into the others that are not saturated.

    Each of those takes as much, and none may become saturated by it, whatever the mean would allow (section III-C2).
    With less than ``fewest`` of them, at least 2, none leaves.
    """
    staying, freed = list(unsaturated), 0
    while len(staying) >= fewest:
        staying.sort(key=lambda load: max(of / limit.saturated for of, limit in zip(load, limits, strict=True)))
        (kv, queue), *others = staying
        staying = [(of_kv + kv / len(others), of_queue + queue / len(others)) for of_kv, of_queue in others]
        if any(_is_saturated(load, limits) for load in staying) or not _has_headroom(staying, limits):
            break
        freed += 1
    return freed


class Wva:
    """The policy; see ``decide``."""

    def __init__(self, config: WvaConfig, *, ratio: PdRatio, slo: SloConfig) -> None:
        self._config = config

    def decide(self, snapshot: Snapshot) -> Decision:
        """Each role by its own saturation, whatever the ratio then is.

        These are a role's totals: which variant grows is the placement's, which adds where replicas are cheapest.
        """
        wanted, shown, notes = dict.fromkeys(Role, 0.0), [], []
        for role in (role for role in Role if any(pool.key.role is role for pool in snapshot.pools)):
            loads, limits = _loads(snapshot, role), self._config.limits(role)
            if not loads:
                return Decision(wanted=None, reason=f"not every {role} replica reports its KV usage and its queue")
            now = sum(count for key, count in snapshot.state.desired.items() if key.role is role)
            wanted[role] = float(self._replicas(loads, limits, now))
            notes.append(f"{sum(_is_saturated(load, limits) for load in loads)} of {len(loads)} {role}")
            for name, limit, of in zip(_METRICS, limits, zip(*loads, strict=True), strict=True):
                target = limit.saturated - limit.spare
                shown.append(Shown(name=f"{role}_{name}", value=math.fsum(of) / len(of), target=target))
        reason = f"{' and '.join(notes)} replicas are saturated"
        return Decision(wanted=wanted, reason=reason, ratio=PdRatio.of(wanted), is_step=True, shown=tuple(shown))

    def _replicas(self, loads: Sequence[Load], limits: Sequence[Limit], now: int) -> int:
        unsaturated = [load for load in loads if not _is_saturated(load, limits)]
        if not unsaturated or not _has_headroom(unsaturated, limits):  # Eq. 3; over no replica its mean is no number
            metrics = zip(zip(*loads, strict=True), limits, strict=True)
            # Where a low total hides a few that are full, one more is needed all the same.
            return max(*(replicas_for_load(math.fsum(of), limit) for of, limit in metrics), len(loads) + 1, now)
        if len(loads) < now:  # those asked for that do not serve yet are the answer to a load that is still here
            return now
        return min(now, len(loads) - freed_replicas(unsaturated, limits, self._config.unsaturated_replicas))


def _loads(snapshot: Snapshot, role: Role) -> list[Load] | None:
    """Of each replica of a role that serves; ``None`` where one does not show it."""
    admitted, loads = frozenset(snapshot.state.admitted), list[Load]()
    for replica in (r for pool in snapshot.pools if pool.key.role is role for r in pool.replicas):
        if admitted and replica.replica_id not in admitted:  # out of routing, it is empty or soon will be
            continue
        if replica.kv_usage_frac is None or replica.waiting_requests is None:
            return None
        loads.append((replica.kv_usage_frac, replica.waiting_requests))
    return loads


def _is_saturated(load: Load, limits: Sequence[Limit]) -> bool:
    """Eq. 2."""
    return any(of >= limit.saturated for of, limit in zip(load, limits, strict=True))


def _has_headroom(loads: Sequence[Load], limits: Sequence[Limit]) -> bool:
    """Whether the mean spare is at least gamma in every metric (Eq. 3 is false)."""
    metrics = zip(zip(*loads, strict=True), limits, strict=True)
    return all(limit.saturated - math.fsum(of) / len(loads) >= limit.spare - _EPSILON for of, limit in metrics)
