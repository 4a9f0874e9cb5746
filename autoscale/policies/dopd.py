"""DOPD: forecasts of what arrives and how long it is, sized at the optimal P/D ratio (Algorithm 2)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import Field

from autoscale.forecast import ArimaConfig, CorrectionConfig, ForecastConfig
from autoscale.headcount import desired_replicas, running_replicas
from autoscale.optimal_ratio import DecodeMemoryConfig, optimal_ratio
from autoscale.policies.profiled import ProfiledConfig
from autoscale.ratio import PdRatio
from autoscale.slo import SloConfig
from autoscale.types import Decision, ReplicaStats, Shown, Snapshot, Traffic
from kvtransfer.topology import Role

# In the policy's memory; another policy's must not be taken for it.
_PREFIX = "dopd_"
_SERIES = ("requests_per_s", "input_tokens", "output_tokens")
# Of an interval that has shown nothing yet.
_NO_SUMS = (0.0,) * 6


class DopdConfig(ProfiledConfig):
    """How often it forecasts, how full it plans decode, and what is an overload that does not wait.

    The paper gives no numbers for the thresholds; it extends Dynamo, whose load planner has these.
    """

    kind: Literal["dopd"] = "dopd"
    interval_s: float = Field(100.0, gt=0.0, description="Time between two adjustments (T; 'hundreds of seconds').")
    forecast: ForecastConfig = ArimaConfig()
    correction: CorrectionConfig = CorrectionConfig()
    history_points: int = Field(50, ge=1, le=1000, description="Intervals that are remembered; Dynamo's window.")
    concurrency_frac: float = Field(
        0.9, gt=0.0, le=1.0, description="Share of decode's highest concurrency that is planned for (section IV-B)."
    )
    queue_requests: float = Field(
        5.0,
        gt=0.0,
        description="More requests than this waiting for each prefill replica are an overload (SIZE_QUEUE).",
    )
    kv_cap_frac: float = Field(
        0.9, gt=0.0, le=1.0, description="More KV than this in use on decode is an overload (KV_CAP)."
    )
    decode_memory: DecodeMemoryConfig | None = Field(
        None, description="For the paper's bounds of decode's concurrency; without it, the profile's."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Past:
    """What the policy has learnt: series of numbers between two ticks.

    ``interval``: since when it runs, how many ticks have shown arrivals, their rates added up, and for both lengths the
    rates of those that showed one, and these times the length. ``points``: when an interval ended, and its means.
    ``forecasts``: the last ones of the three series, not corrected; ``factors``: theirs. ``plan``: wanted replicas of
    prefill and decode.
    """

    interval: tuple[float, ...]
    points: tuple[tuple[float, ...], ...] = ()
    forecasts: tuple[float, ...] = ()
    factors: tuple[float, ...] = (1.0,) * len(_SERIES)
    plan: tuple[float, ...] = ()

    @classmethod
    def of(cls, memory: Mapping[str, tuple[float, ...]], now_s: float) -> "_Past":
        """From a snapshot; what lies in the future, by a clock that was set, is forgotten."""
        fresh = cls(interval=(now_s, *_NO_SUMS))
        interval = memory.get(f"{_PREFIX}interval", fresh.interval)
        columns = [memory.get(f"{_PREFIX}{name}", ()) for name in ("at_s", *_SERIES)]
        return cls(
            interval=interval if interval[0] <= now_s else fresh.interval,
            points=tuple(point for point in zip(*columns, strict=True) if point[0] < now_s),
            forecasts=memory.get(f"{_PREFIX}forecasts", ()),
            factors=memory.get(f"{_PREFIX}factors", fresh.factors),
            plan=memory.get(f"{_PREFIX}plan", ()),
        )

    def memory(self) -> dict[str, tuple[float, ...]]:
        """As it goes into a decision."""
        columns = zip(*self.points, strict=True) if self.points else [()] * (1 + len(_SERIES))
        series = dict(zip(("at_s", *_SERIES), columns, strict=True))
        state = {"interval": self.interval, "forecasts": self.forecasts, "factors": self.factors, "plan": self.plan}
        return {f"{_PREFIX}{name}": values for name, values in (series | state).items()}

    def shown(self, traffic: Traffic) -> "_Past":
        """With what one more tick has shown."""
        rate = traffic.requests_per_s
        if rate is None or not traffic.is_whole:
            return self
        since_s, *sums = self.interval
        added = [1.0, rate]
        for length in (traffic.input_tokens_mean, traffic.output_tokens_mean):
            added += [0.0, 0.0] if length is None else [rate, rate * length]
        return replace(self, interval=(since_s, *(a + b for a, b in zip(sums, added, strict=True))))

    def means(self) -> tuple[float, ...] | None:
        """Of the interval; a length that nobody showed is as before, and ``None`` if there was none."""
        _, ticks, rates, *lengths = self.interval
        before = self.points[-1][2:] if self.points else (None, None)
        means = [lengths[2 * i + 1] / lengths[2 * i] if lengths[2 * i] > 0.0 else before[i] for i in range(2)]
        if not ticks or means[0] is None or means[1] is None:
            return None
        return rates / ticks, means[0], means[1]


class Dopd:
    """The policy; see ``decide``."""

    def __init__(self, config: DopdConfig, *, ratio: PdRatio, slo: SloConfig) -> None:
        if config.decode_memory is not None:
            config.decode_memory.readable_bytes(slo.tpot_s)  # refuses what could never be decided
        self._config = config
        self._slo = slo

    def decide(self, snapshot: Snapshot) -> Decision:
        """What one interval ahead needs, decided at the end of each; at once, what an overload needs.

        After an overload all stay until the interval ends, whatever was granted.
        """
        now = desired_replicas(snapshot.state.desired)
        past = _Past.of(snapshot.state.memory, snapshot.now_s).shown(snapshot.traffic)
        left_s = past.interval[0] + self._config.interval_s - snapshot.now_s
        if snapshot.traffic.requests_per_s is None:
            reason = "no arrivals were observed"
        elif left_s > 0.0:
            reason = f"the next adjustment is in {left_s:.0f} s"
        elif (means := past.means()) is None:
            reason = "nothing has shown yet what arrives and how long it is"
        else:
            past, reason = self._adjusted(past, means, snapshot.now_s)
        wanted = dict(zip(Role, past.plan, strict=True)) if past.plan else {role: float(now[role]) for role in Role}
        if (urgent := self._overload(snapshot, past, wanted)) is not None:
            return urgent
        if not snapshot.traffic.is_whole:  # there may be more, so it takes nobody away
            wanted = {role: max(wanted[role], float(now[role])) for role in Role}
        is_known = bool(past.plan) and snapshot.traffic.requests_per_s is not None
        return Decision(
            wanted=wanted if is_known else None, reason=reason, ratio=PdRatio.of(wanted), memory=past.memory()
        )

    def _adjusted(self, past: _Past, means: tuple[float, ...], now_s: float) -> tuple[_Past, str]:
        """After an interval has ended with these means: a plan for the next one, and its reason (lines 24-35)."""
        config = self._config
        factors = past.factors
        if past.forecasts:
            met = zip(past.factors, past.forecasts, means, strict=True)
            factors = tuple(config.correction.updated(*each) for each in met)
        points = (*past.points, (now_s, *means))[-config.history_points :]
        times_s, *series = zip(*points, strict=True)
        found = [config.forecast.forecast(times_s, values, config.interval_s) for values in series]
        forecasts = tuple(each.value for each in found)
        rate, inputs, outputs = (value / factor for value, factor in zip(forecasts, factors, strict=True))
        inputs, outputs = max(1.0, inputs), max(1.0, outputs)
        best = optimal_ratio(
            config.prefill, config.decode, inputs, outputs, tpot_s=self._slo.tpot_s, memory=config.decode_memory
        )
        # Lines 32 and 33, with the requests in flight of full batches (Little) for r_next, and Eq. 14 for R_opt.
        in_flight = rate * outputs * best.decode_step_s
        decode = in_flight / (config.concurrency_frac * best.decode_concurrency)
        prefill = best.prefill_per_decode * decode
        notes = [f"{name}: {each.fallback}" for name, each in zip(_SERIES, found, strict=True) if each.fallback]
        if best.is_extrapolated:
            notes.append("beyond what the profiles cover")
        text = f"{rate:.3g} requests/s of {inputs:.0f} + {outputs:.0f} tokens ahead, {in_flight:.3g} in flight"
        past = _Past(
            interval=(now_s, *_NO_SUMS), points=points, forecasts=forecasts, factors=factors, plan=(prefill, decode)
        )
        return past, "; ".join((f"{text}, optimal P/D ratio {best.prefill_per_decode:.3g}", *notes))

    def _overload(self, snapshot: Snapshot, past: _Past, planned: Mapping[Role, float]) -> Decision | None:
        """More than the thresholds on all replicas that should serve (lines 18-23).

        Line 22 passes n_d where n_p belongs, and the other way round. Lines 20 and 21 alone would also take replicas of
        a role that is not overloaded. The most that one adjustment may add is the guard's, so there is one at a time:
        the loop looks at the load again after adjustPD has ended, and a queue that grows while replicas start would
        else ask for as many again at every tick.
        """
        now, loads, highest = desired_replicas(snapshot.state.desired), dict.fromkeys(Role, 0.0), dict.fromkeys(Role, 0)
        for pool in snapshot.pools:
            loads[pool.key.role] += math.fsum(_load(replica, pool.key.role) for replica in pool.replicas)
            highest[pool.key.role] += pool.highest_replicas
        caps = {Role.PREFILL: self._config.queue_requests, Role.DECODE: self._config.kv_cap_frac}
        asked = {role: math.ceil(loads[role] / caps[role]) for role in Role}
        there = running_replicas(snapshot, without={*snapshot.state.withdrawn, *snapshot.state.victims})
        asked = {role: asked[role] if there[role] >= now[role] else min(asked[role], now[role]) for role in Role}
        if all(asked[role] <= now[role] for role in Role):
            return None
        wanted = {role: float(max(asked[role], now[role], planned[role])) for role in Role}
        # A queue says how many replicas, not at which ratio: where they may not be had, the other role must not follow.
        ratio = PdRatio.of({role: min(wanted[role], float(max(highest[role], now[role]))) for role in Role})
        names = {Role.PREFILL: "prefill_queue_requests", Role.DECODE: "decode_kv_replicas"}
        shown = tuple(Shown(name=names[role], value=loads[role], target=caps[role] * now[role]) for role in Role)
        return Decision(
            wanted=wanted,
            reason="overload: " + ", ".join(f"{each.name} {each.value:.4g} for {each.target:.4g}" for each in shown),
            ratio=ratio,
            is_step=True,
            is_urgent=True,
            shown=shown,
            memory=replace(past, plan=()).memory(),
        )


def _load(replica: ReplicaStats, role: Role) -> float:
    """Requests that wait for prefill, or the share of decode's KV in use; what is not observed is no overload."""
    seen = replica.waiting_requests if role is Role.PREFILL else replica.kv_usage_frac
    return seen or 0.0
