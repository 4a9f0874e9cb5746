"""Tandem's own: what will arrive one start ahead, sized for both roles from the profile; latency as a safety net."""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from autoscale.capacity import decode_tokens_per_s, prefill_engines
from autoscale.policies.profiled import ProfiledConfig
from autoscale.ratio import PdRatio
from autoscale.slo import SloConfig
from autoscale.types import Decision, Snapshot
from kvtransfer.topology import Role


class DefaultConfig(ProfiledConfig):
    """How far to look ahead, and how full replicas may be."""

    kind: Literal["default"] = "default"
    prefill_busy_frac: float = Field(0.6, gt=0.0, le=1.0)
    decode_busy_frac: float = Field(0.85, gt=0.0, le=1.0)
    history_s: float = Field(180.0, gt=0.0)
    spread_sigmas: float = Field(1.0, ge=0.0)
    stay_s: float = Field(60.0, ge=0.0)
    horizon_frac: float = 0.5
    weight_s: float = 60.0


class Default:
    """The policy; see ``decide``."""

    def __init__(self, config: DefaultConfig, *, ratio: PdRatio, slo: SloConfig) -> None:
        self._config = config
        self._slo = slo

    def decide(self, snapshot: Snapshot) -> Decision:
        """Replicas for what will arrive one start ahead."""
        config, traffic = self._config, snapshot.traffic
        rate, inputs, outputs = traffic.requests_per_s, traffic.input_tokens_mean, traffic.output_tokens_mean
        if rate is None:
            return Decision(wanted=None, reason="no arrivals were observed")
        inputs, outputs = inputs or 1.0, outputs or 1.0
        prefill = prefill_engines(config.prefill, rate, inputs)
        decode = rate * outputs / decode_tokens_per_s(config.decode, inputs + outputs / 2, self._slo.tpot_s)
        memory = snapshot.state.memory
        oldest = snapshot.now_s - config.history_s
        times = [*memory.get("at_s", ()), snapshot.now_s]
        keep = sum(1 for at in times if at < oldest)
        series: dict[str, tuple[float, ...]] = {
            "at_s": tuple(times[keep:]),
            "prefill": (*memory.get("prefill", ()), prefill)[keep:],
            "decode": (*memory.get("decode", ()), decode)[keep:],
        }
        busy = {Role.PREFILL: config.prefill_busy_frac, Role.DECODE: config.decode_busy_frac}
        wanted = {}
        for role in Role:
            start_s = config.start_s(role)
            now = max(0.05, _ahead(series["at_s"], series[str(role)], start_s, config) / busy[role])
            name = f"wanted_{role}"
            series[name] = (*memory.get(name, ()), now)[keep:]
            recent = [
                n for at, n in zip(series["at_s"], series[name], strict=True) if at >= snapshot.now_s - config.stay_s
            ]
            wanted[role] = max(recent)
        ratio = PdRatio.of(wanted)
        return Decision(wanted=wanted, ratio=ratio, memory=series, reason=f"{rate:.3g} requests/s")


def _ahead(times: Sequence[float], values: Sequence[float], horizon_s: float, config: DefaultConfig) -> float:
    recent = values[-1]
    if len(values) < 4:
        return recent
    t, v = np.array(times) - times[-1], np.array(values)
    w = np.exp(t / config.weight_s)
    tm, vm = np.average(t, weights=w), np.average(v, weights=w)
    slope = np.average((t - tm) * (v - vm), weights=w) / max(1e-9, np.average((t - tm) ** 2, weights=w))
    line = vm + slope * (t - tm)
    sigma = math.sqrt(np.average((v - line) ** 2, weights=w))
    slope = max(0.0, slope)
    return float(max(vm + slope * (horizon_s * config.horizon_frac - tm), 0.0) + config.spread_sigmas * sigma)
