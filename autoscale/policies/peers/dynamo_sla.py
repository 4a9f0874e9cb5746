"""Dynamo's SLA planner up to 1.0: both roles by profiles, corrected by observed latencies; and Dynamo's forecasts.

Source: ``components/planner/src/dynamo/planner/utils/planner_core.py`` (observe_metrics, predict_load,
make_adjustments, _compute_replica_requirements) and ``perf_interpolation.py`` of ai-dynamo up to 1.0. Version 1.6 has
the same forecasts (``BuiltinLoadPredict``), and no correction factors. One thing differs: Dynamo interpolates by cubic
curves on a grid, the profiles here by lines. The mean ITL is that of the engines.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from autoscale.engines.capacity import decode_tokens_per_s
from autoscale.engines.profile import EngineProfile
from autoscale.forecast import ForecastConfig, LastValueConfig
from autoscale.policies.peers.independent import (
    EPSILON,
    Memory,
    ceiled,
    decided,
    is_due,
    mean,
    serving_replicas,
    standing,
    summed,
)
from autoscale.policies.policy import Policy, ProfiledConfig
from autoscale.types import Decision, Shown, Snapshot
from kvtransfer.topology import Role

# The series of engines that are averaged over an interval.
_SUMS = ("ttft_s", "running_requests", "tokens_per_s", "requests_per_replica")

# Remembered intervals: load_prediction_window_size of Dynamo up to 1.0.
_MOST_INTERVALS = 50
# The series of traffic that are averaged over an interval.
_TRAFFIC = ("requests_per_s", "prompt_tokens_per_s", "output_tokens")
# The means of past intervals.
_HISTORY = ("past_at_s", "past_requests_per_s", "past_input_tokens", "past_output_tokens")


class DynamoSlaConfig(ProfiledConfig):
    """The profiles, the interval, the forecast and the correction."""

    kind: Literal["dynamo_sla"] = "dynamo_sla"
    adjustment_s: float = Field(180.0, gt=0.0, description="Time between two decisions: --adjustment-interval.")
    forecast: ForecastConfig = LastValueConfig()
    """--load-predictor: last_value is its constant. Dynamo's default, arima, finds its order itself; arima here has a
    given order."""
    is_corrected: bool = Field(True, description="Correct by observed latencies; false: --no-correction.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Requests per second of an interval (num_req / interval), and their mean lengths (ISL, OSL)."""

    requests_per_s: float
    input_tokens: float
    output_tokens: float

    @property
    def context_tokens(self) -> float:
        """Mean KV of a request while it is decoded: ISL + OSL / 2."""
        return self.input_tokens + self.output_tokens / 2


def with_traffic(snapshot: Snapshot, memory: Memory) -> dict[str, tuple[float, ...]]:
    """The interval's sums with this tick's traffic, unless it is partial."""
    traffic = snapshot.traffic
    rate = traffic.requests_per_s if traffic.is_whole else None
    prompts = None if rate is None else rate * (traffic.input_tokens_mean or 0.0)
    values = (rate, prompts, traffic.output_tokens_mean)
    return summed(memory, dict(zip(_TRAFFIC, values, strict=True)))


def next_demand(
    memory: Mapping[str, tuple[float, ...]], now_s: float, interval_s: float, forecast: ForecastConfig
) -> tuple[Demand | None, dict[str, tuple[float, ...]]]:
    """The forecast for the interval that begins now, ``None`` without observations; and the memory for it.

    ``memory``: the sums of the interval that has ended, and the means of those before; each is forecast by itself.
    """
    series_by_name = {name: series for name, series in memory.items() if name not in _TRAFFIC}
    rate, prompts, outputs = (mean(memory, name) for name in _TRAFFIC)
    last_input, last_output = (memory[name][-1] if memory.get(name) else None for name in _HISTORY[2:])
    # An idle interval has no lengths of its own: it takes those of the last one.
    inputs = prompts / rate if rate and prompts is not None else last_input
    outputs = last_output if outputs is None else outputs
    if rate is None or inputs is None or outputs is None:
        return None, series_by_name
    point = (now_s, rate, inputs, outputs)
    past = [[*memory.get(name, ()), value][-_MOST_INTERVALS:] for name, value in zip(_HISTORY, point, strict=True)]
    times = past[0]
    if len(times) > 1 and times[-1] <= times[-2]:  # the clock was set back
        past = [[value] for value in point]
    series_by_name |= {name: tuple(series) for name, series in zip(_HISTORY, past, strict=True)}
    times, *series_of = past
    ahead = [forecast.forecast(times, series, interval_s).value for series in series_of]
    return Demand(requests_per_s=ahead[0], input_tokens=ahead[1], output_tokens=ahead[2]), series_by_name


def prefill_replicas(demand: Demand, profile: EngineProfile, correction: float) -> int:
    """``ceil(num_req * ISL / interval * min(1, p_corr) / throughput(ISL))`` (planner_core.py).

    Beyond the profile's points the nearest point counts. ``correction``: observed over expected TTFT (p_corr).
    """
    tokens = max(1.0, min(max(demand.input_tokens, profile.prefill.tokens[0]), profile.prefill.tokens[-1]))
    tokens_per_s = tokens / profile.prefill.seconds_for(tokens)
    return ceiled(demand.requests_per_s * demand.input_tokens * min(1.0, correction) / tokens_per_s)


def decode_replicas(demand: Demand, profile: EngineProfile, itl_s: float, correction: float) -> int:
    """``ceil(num_req * OSL / interval / best throughput(ITL / d_corr, ISL + OSL / 2))`` (planner_core.py).

    ``correction``: observed over expected ITL (d_corr).
    """
    corrected_s = itl_s / correction if correction > 0.0 else itl_s
    tokens_per_s = decode_tokens_per_s(profile, demand.context_tokens, corrected_s)
    return ceiled(demand.requests_per_s * demand.output_tokens / tokens_per_s)


class DynamoSla(Policy[DynamoSlaConfig]):
    """Replicas of each role from forecast requests and lengths, by profiles and observed TTFT and ITL."""

    def decide(self, snapshot: Snapshot) -> Decision:
        """Once an interval, replicas for the next one; after an interval without requests the counts stay."""
        config, now_s = self._config, snapshot.now_s
        memory: dict[str, tuple[float, ...]] = {"began_s": (now_s,), **snapshot.state.memory}
        memory |= with_traffic(snapshot, memory) | summed(memory, _engines(snapshot))
        if not is_due(snapshot, memory, "began_s", config.adjustment_s):
            return standing(snapshot, f"it adjusts every {config.adjustment_s:g} s", memory=memory)
        means = {name: mean(memory, name) for name in ("requests_per_s", *_SUMS)}
        demand, memory = next_demand(memory, now_s, config.adjustment_s, config.forecast)
        memory = {name: series for name, series in memory.items() if name not in _SUMS} | {"began_s": (now_s,)}
        if demand is None or not means["requests_per_s"]:
            return decided(snapshot, None, "no request was observed in the interval", memory=memory)
        latest = Demand(
            requests_per_s=means["requests_per_s"],
            input_tokens=memory["past_input_tokens"][-1],
            output_tokens=memory["past_output_tokens"][-1],
        )
        corrections = self._corrections(latest, means) if config.is_corrected else (1.0, 1.0)
        if corrections is None:
            return decided(snapshot, None, "no TTFT or ITL was observed in the interval", memory=memory)
        wanted = {
            Role.PREFILL: float(prefill_replicas(demand, config.prefill, corrections[0])),
            Role.DECODE: float(decode_replicas(demand, config.decode, self._slo.tpot_s, corrections[1])),
        }
        reason = (
            f"{demand.requests_per_s:.3g} requests/s of {demand.input_tokens:.4g} and {demand.output_tokens:.4g} tokens"
        )
        shown = (
            Shown(name="ttft_correction", value=corrections[0], target=1.0),
            Shown(name="itl_correction", value=corrections[1], target=1.0),
        )
        return decided(snapshot, wanted, reason, memory=memory, shown=shown)

    def _corrections(self, latest: Demand, means: dict[str, float | None]) -> tuple[float, float] | None:
        """``TTFT / TTFT(ISL)`` and ``ITL / ITL(concurrency, ISL + OSL / 2)``: observed over the profiles' values."""
        ttft_s, running, tokens_per_s, concurrency = (means[name] for name in _SUMS)
        if ttft_s is None or not running or not tokens_per_s or concurrency is None:
            return None
        prefill, decode = self._config.prefill, self._config.decode
        tokens = min(max(latest.input_tokens, prefill.prefill.tokens[0]), prefill.prefill.tokens[-1])
        most = max(1, int(decode.kv_tokens / max(1.0, latest.context_tokens)))
        batch = min(max(1, round(concurrency)), most)
        # A running request gets a token every ITL, so tokens per second are requests over the ITL.
        itl_s = running / tokens_per_s
        return (
            ttft_s / max(EPSILON, prefill.prefill.seconds_for(tokens)),
            itl_s / decode.decode.seconds_for(batch, latest.context_tokens),
        )


def _engines(snapshot: Snapshot) -> dict[str, float | None]:
    """Mean TTFT; and over decode replicas: running requests, tokens per second, mean requests of one.

    By Little's law the last one is num_req / num_d * duration / interval of the original.
    """
    decode = serving_replicas(snapshot)[Role.DECODE]
    pairs = [(r, r.running_requests, r.decode_tokens_per_s) for r in decode]
    reporting = [(r, running, rate) for r, running, rate in pairs if running is not None and rate is not None]
    if not reporting:
        return dict.fromkeys(_SUMS) | {"ttft_s": snapshot.latency.ttft_mean_s}
    requests = math.fsum(n + (r.waiting_requests or 0.0) + (r.deferred_requests or 0.0) for r, n, _ in reporting)
    return {
        "ttft_s": snapshot.latency.ttft_mean_s,
        "running_requests": math.fsum(running for _, running, _ in reporting),
        "tokens_per_s": math.fsum(rate for *_, rate in reporting),
        "requests_per_replica": requests / len(reporting),
    }
