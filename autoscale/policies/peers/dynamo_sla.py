"""Dynamo's SLA planner up to 1.0, which sizes each role by its profile and by observed latencies.

It sizes for a forecast of the traffic, which Dynamo's later planner (``dynamo.py``) uses too. The forecast is made from
the means of past *intervals*, the times between two decisions. A *correction* is an observed latency divided by the one
of the profile.

Source: ``components/planner/src/dynamo/planner/utils/planner_core.py`` (observe_metrics, predict_load,
make_adjustments, _compute_replica_requirements) and ``perf_interpolation.py`` of ai-dynamo up to 1.0. Version 1.6 has
the same forecasts (``BuiltinLoadPredict``), and no corrections. Two things differ here: Dynamo interpolates by
cubic curves on a grid, our profiles by straight lines; and the ITL here is the mean over the engines.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from autoscale.engines.capacity import decode_tokens_per_s
from autoscale.engines.profile import EngineProfile
from autoscale.forecast.series import ForecastConfig, LastValueConfig
from autoscale.policies.peers.independent import (
    EPSILON,
    Memory,
    decided,
    is_due,
    mean,
    serving_replicas,
    standing,
    summed,
)
from autoscale.policies.policy import Policy, ProfiledConfig
from autoscale.ratio import whole
from autoscale.types import Decision, Shown, Snapshot
from kvtransfer.topology import Role

# The next three are names of series in the policy's memory.
# Sums of the engines' values in the running interval; each series is (sum, count).
_ENGINE_SUMS = ("ttft_s", "running_requests", "tokens_per_s", "requests_per_replica")
# Sums of the traffic's values in the running interval; each series is (sum, count).
_TRAFFIC_SUMS = ("requests_per_s", "prompt_tokens_per_s", "output_tokens")
# Past intervals: the time at which each of them ended, and its means.
_HISTORY = ("past_at_s", "past_requests_per_s", "past_input_tokens", "past_output_tokens")

# Number of past intervals in the memory: load_prediction_window_size of Dynamo up to 1.0.
_MOST_INTERVALS = 50


class DynamoSlaConfig(ProfiledConfig):
    """The profiles, the interval between decisions, the forecast, and whether latencies correct it."""

    kind: Literal["dynamo_sla"] = "dynamo_sla"
    adjustment_s: float = Field(180.0, gt=0.0, description="Time between two decisions: --adjustment-interval.")
    forecast: ForecastConfig = LastValueConfig()
    """--load-predictor. last_value is what Dynamo calls constant. Dynamo's default, arima, finds its order itself; here
    arima has a given order."""
    is_corrected: bool = Field(True, description="Observed latencies correct counts; false: --no-correction.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficDemand:
    """Traffic of an interval."""

    requests_per_s: float  # num_req / interval
    input_tokens: float  # mean prompt length (ISL)
    output_tokens: float  # mean answer length (OSL)

    @property
    def context_tokens(self) -> float:
        """Mean tokens of a request's KV while it is decoded: ``ISL + OSL / 2``."""
        return self.input_tokens + self.output_tokens / 2


def with_traffic(snapshot: Snapshot, memory: Memory) -> dict[str, tuple[float, ...]]:
    """The sums of ``_TRAFFIC_SUMS`` with this tick added.

    The rate and the prompt tokens are added only if the requests of all decode replicas were observed.
    """
    traffic = snapshot.traffic
    rate = traffic.requests_per_s if traffic.is_whole else None
    prompts = None if rate is None else rate * (traffic.input_tokens_mean or 0.0)
    values = (rate, prompts, traffic.output_tokens_mean)
    return summed(memory, dict(zip(_TRAFFIC_SUMS, values, strict=True)))


def next_demand(
    memory: Mapping[str, tuple[float, ...]], now_s: float, interval_s: float, forecast: ForecastConfig
) -> tuple[TrafficDemand | None, dict[str, tuple[float, ...]]]:
    """The forecast for the interval that begins now, and the memory with which this interval begins.

    The forecast is ``None`` if no traffic was observed yet. ``memory``: has the sums of the interval that ends now.
    """
    other_series = {name: series for name, series in memory.items() if name not in _TRAFFIC_SUMS}
    means = _past_means(memory, now_s)
    if means is None:
        return None, other_series
    times, *series = means
    rate, inputs, outputs = (forecast.forecast(times, values, interval_s).value for values in series)
    demand = TrafficDemand(requests_per_s=rate, input_tokens=inputs, output_tokens=outputs)
    return demand, other_series | dict(zip(_HISTORY, means, strict=True))


def _past_means(memory: Mapping[str, tuple[float, ...]], now_s: float) -> list[tuple[float, ...]] | None:
    """The series of ``_HISTORY`` with the interval that ends now; ``None``: no traffic was observed yet.

    An interval without requests takes the lengths of the interval before it.
    """
    rate, prompt_tokens_per_s, outputs = (mean(memory, name) for name in _TRAFFIC_SUMS)
    last_input, last_output = (memory[name][-1] if memory.get(name) else None for name in _HISTORY[2:])
    inputs = prompt_tokens_per_s / rate if rate and prompt_tokens_per_s is not None else last_input
    outputs = last_output if outputs is None else outputs
    if rate is None or inputs is None or outputs is None:
        return None
    latest = (now_s, rate, inputs, outputs)
    past_at_s = memory.get(_HISTORY[0], ())
    if past_at_s and now_s <= past_at_s[-1]:  # the clock was set back: the series begin anew
        return [(value,) for value in latest]
    series = zip(_HISTORY, latest, strict=True)
    return [(*memory.get(name, ()), value)[-_MOST_INTERVALS:] for name, value in series]


def prefill_replicas(demand: TrafficDemand, profile: EngineProfile, correction: float) -> int:
    """Prefill replicas: ``ceil(num_req * ISL / interval * min(1, p_corr) / throughput(ISL))`` (planner_core.py).

    ``correction``: observed over expected TTFT (p_corr).
    """
    tokens = max(1.0, _profiled_tokens(profile, demand.input_tokens))
    tokens_per_s = tokens / profile.prefill.seconds_for(tokens)
    return whole(demand.requests_per_s * demand.input_tokens * min(1.0, correction) / tokens_per_s)


def _profiled_tokens(profile: EngineProfile, input_tokens: float) -> float:
    """The prompt length nearest to ``input_tokens`` that the points of the prefill profile cover."""
    return min(max(input_tokens, profile.prefill.tokens[0]), profile.prefill.tokens[-1])


def decode_replicas(demand: TrafficDemand, profile: EngineProfile, itl_s: float, correction: float) -> int:
    """Decode replicas: ``ceil(num_req * OSL / interval / best throughput(ITL / d_corr, ISL + OSL / 2))``.

    ``itl_s``: objective of the ITL. ``correction``: observed over expected ITL (d_corr).

    Source: planner_core.py.
    """
    corrected_itl_s = itl_s / correction if correction > 0.0 else itl_s
    tokens_per_s = decode_tokens_per_s(profile, demand.context_tokens, corrected_itl_s)
    return whole(demand.requests_per_s * demand.output_tokens / tokens_per_s)


class DynamoSla(Policy[DynamoSlaConfig]):
    """Replicas of each role for the forecast requests and lengths, by its profile and the observed TTFT and ITL."""

    def decide(self, snapshot: Snapshot) -> Decision:
        """Once in each interval, the replicas for the next one. After an interval without requests the counts stay."""
        config, now_s = self._config, snapshot.now_s
        memory: dict[str, tuple[float, ...]] = {"began_s": (now_s,), **snapshot.state.memory}
        memory |= with_traffic(snapshot, memory) | summed(memory, _engine_values(snapshot))
        if not is_due(snapshot, memory, "began_s", config.adjustment_s):
            return standing(snapshot, f"it adjusts every {config.adjustment_s:g} s", memory=memory)
        # Read the means first: a new interval begins, and the sums of the old one are dropped.
        means = {name: mean(memory, name) for name in ("requests_per_s", *_ENGINE_SUMS)}
        demand, memory = next_demand(memory, now_s, config.adjustment_s, config.forecast)
        memory = {name: series for name, series in memory.items() if name not in _ENGINE_SUMS} | {"began_s": (now_s,)}
        if demand is None or not means["requests_per_s"]:
            return decided(snapshot, None, "no request was observed in the interval", memory=memory)
        latest = TrafficDemand(
            requests_per_s=means["requests_per_s"],
            input_tokens=memory["past_input_tokens"][-1],
            output_tokens=memory["past_output_tokens"][-1],
        )
        corrections = self._corrections(latest, means) if config.is_corrected else (1.0, 1.0)
        if corrections is None:
            return decided(snapshot, None, "no TTFT or ITL was observed in the interval", memory=memory)
        return self._sized(snapshot, demand, *corrections, memory)

    def _sized(
        self, snapshot: Snapshot, demand: TrafficDemand, ttft_correction: float, itl_correction: float, memory: Memory
    ) -> Decision:
        """The decision for a forecast demand; the corrections are its signals."""
        config = self._config
        wanted = {
            Role.PREFILL: float(prefill_replicas(demand, config.prefill, ttft_correction)),
            Role.DECODE: float(decode_replicas(demand, config.decode, self._slo.tpot_s, itl_correction)),
        }
        reason = (
            f"{demand.requests_per_s:.3g} requests/s of {demand.input_tokens:.4g} and {demand.output_tokens:.4g} tokens"
        )
        shown = (
            Shown(name="ttft_correction", value=ttft_correction, target=1.0),
            Shown(name="itl_correction", value=itl_correction, target=1.0),
        )
        return decided(snapshot, wanted, reason, memory=memory, shown=shown)

    def _corrections(self, latest: TrafficDemand, means: Mapping[str, float | None]) -> tuple[float, float] | None:
        """Observed over profiled latencies: ``TTFT / TTFT(ISL)`` and ``ITL / ITL(concurrency, ISL + OSL / 2)``.

        ``latest``: traffic of the interval that has ended. ``means``: engine values of that interval. ``None``: a value
        was not observed.
        """
        ttft_s, running, tokens_per_s, concurrency = (means[name] for name in _ENGINE_SUMS)
        if ttft_s is None or not running or not tokens_per_s or concurrency is None:
            return None
        prefill, decode = self._config.prefill, self._config.decode
        tokens = _profiled_tokens(prefill, latest.input_tokens)
        largest_batch = max(1, int(decode.kv_tokens / max(1.0, latest.context_tokens)))
        batch = min(max(1, round(concurrency)), largest_batch)
        # A running request gets one token per ITL, so tokens per second are running requests over the ITL.
        itl_s = running / tokens_per_s
        return (
            ttft_s / max(EPSILON, prefill.prefill.seconds_for(tokens)),
            itl_s / decode.decode.seconds_for(batch, latest.context_tokens),
        )


def _engine_values(snapshot: Snapshot) -> dict[str, float | None]:
    """This tick's values for ``_ENGINE_SUMS``; ``None``: not observed.

    Except for the TTFT, the values are those of the decode replicas that report. ``requests_per_replica`` counts all
    requests that a replica has accepted, waiting ones too. Dynamo computes the same number as
    ``num_req / num_d * duration / interval`` (Little's law).
    """
    reports = [
        (running, rate, running + (replica.waiting_requests or 0.0) + (replica.deferred_requests or 0.0))
        for replica in serving_replicas(snapshot)[Role.DECODE]
        if (running := replica.running_requests) is not None and (rate := replica.decode_tokens_per_s) is not None
    ]
    if not reports:
        return dict.fromkeys(_ENGINE_SUMS) | {"ttft_s": snapshot.latency.ttft_mean_s}
    requests = math.fsum(accepted for _, _, accepted in reports)
    return {
        "ttft_s": snapshot.latency.ttft_mean_s,
        "running_requests": math.fsum(running for running, _, _ in reports),
        "tokens_per_s": math.fsum(rate for _, rate, _ in reports),
        "requests_per_replica": requests / len(reports),
    }
