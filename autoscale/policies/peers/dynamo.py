"""Dynamo's planner 1.6.1: counts by forecast demand over an engine's capacity, and steps of one by engines' state.

It has two loops. The *predictive* loop (Dynamo: throughput scaling) divides the forecast demand by the capacity of one
engine. The *reactive* loop (load scaling) adds or removes one engine of a role by the queues and the KV of its engines.
If both run, the counts of the predictive loop are the *floor* of the reactive one. An engine is a replica here.

Source: ai-dynamo 1.6.1, ``planner/core``: ``throughput_scaling.py`` (_throughput_disagg), ``load_scaling.py``
(_advance_load_disagg), ``state_machine.py`` (what may move while replicas start), ``perf_model/engine_query.py``
(_find_prefill_capacity, _find_decode_capacity, get_queued_prefill_time) and ``perf_model/ais_adapter.py``. Two things
differ here: times come from the profile, and not from a tuned model of forward passes; and the guard applies budget and
bounds.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, model_validator

from autoscale.engines.profile import EngineProfile
from autoscale.forecast.series import ForecastConfig, LastValueConfig
from autoscale.headcount import desired_replicas
from autoscale.policies.peers.dynamo_sla import TrafficDemand, next_demand, with_traffic
from autoscale.policies.peers.independent import Memory, decided, is_due, serving_replicas, standing
from autoscale.policies.policy import Policy, ProfiledConfig
from autoscale.ratio import whole
from autoscale.types import Decision, ReplicaStats, Shown, Snapshot
from kvtransfer.topology import Role

# Largest number of batches that are tried: MAX_CAPACITY_SEARCH_CANDIDATES.
_MOST_BATCHES = 128


class DynamoConfig(ProfiledConfig):
    """Which of the two loops run, their intervals and limits. The defaults are those of ``SLAPlannerDefaults``."""

    kind: Literal["dynamo"] = "dynamo"
    target: Literal["sla", "throughput", "latency"] = "sla"
    """optimization_target. For throughput and latency only the reactive loop runs, and it uses thresholds."""
    is_predictive: bool = True
    """enable_throughput_scaling: the predictive loop runs. If both loops run, its counts are the floor of the reactive
    loop."""
    is_reactive: bool = Field(False, description="enable_load_scaling: the reactive loop runs.")
    adjustment_s: float = Field(180.0, gt=0.0, description="throughput_adjustment_interval_seconds: predictive.")
    reaction_s: float = Field(5.0, gt=0.0, description="load_adjustment_interval_seconds: reactive.")
    step_replicas: int = Field(8, ge=1, description="max_throughput_scaling_replicas: per role, up or down.")
    slack_frac: float = Field(0.8, gt=0.0, le=1.0, description="load_scaling_down_sensitivity, a share of the SLO.")
    cached_frac: float = Field(0.0, ge=0.0, le=0.95)
    """KV hit rate: share of a prompt that prefix caches hold."""
    longest_tokens: int | None = Field(None, ge=1)
    """Longest context of a request, tokens. The thresholds of prefill are shares of it; target sla does not need it."""
    forecast: ForecastConfig = LastValueConfig()
    """load_predictor. last_value is what Dynamo calls constant; Dynamo's arima chooses its order itself."""

    @model_validator(mode="after")
    def _check_loops(self) -> "DynamoConfig":
        if self.target != "sla" and self.longest_tokens is None:
            raise ValueError(f"target {self.target} needs longest_tokens: give the model's longest context, tokens")
        if self.target == "sla" and not self.is_predictive and not self.is_reactive:
            raise ValueError("neither is_predictive nor is_reactive is set: set one, or nothing is ever decided")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLoad:
    """Load of one decode engine."""

    requests: float  # requests in its batch, and those that wait for it
    kv_tokens: float  # KV of all these requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """If one engine is above ``up``, an engine is added. If all are below ``down``, one is removed."""

    up: float
    down: float
    is_up_inclusive: bool  # whether the value ``up`` itself counts as above
    is_down_inclusive: bool  # whether the value ``down`` itself counts as below

    def is_above(self, value: float) -> bool:
        """Whether an engine with this value is above ``up``."""
        return value >= self.up if self.is_up_inclusive else value > self.up

    def is_below(self, value: float) -> bool:
        """Whether an engine with this value is below ``down``."""
        return value <= self.down if self.is_down_inclusive else value < self.down


# Thresholds of an engine's queued prompt tokens, as a share of the longest context, for each optimization target.
PREFILL_THRESHOLDS = {
    "throughput": Thresholds(up=1.0, down=0.1, is_up_inclusive=True, is_down_inclusive=False),
    "latency": Thresholds(up=0.1, down=0.0, is_up_inclusive=True, is_down_inclusive=True),
}
# Thresholds of the KV that an engine's requests need, as a share of its KV, for each optimization target.
DECODE_THRESHOLDS = {
    "throughput": Thresholds(up=1.0, down=0.6, is_up_inclusive=False, is_down_inclusive=False),
    "latency": Thresholds(up=0.4, down=0.1, is_up_inclusive=False, is_down_inclusive=False),
}


def prefill_s(profile: EngineProfile, tokens: float) -> float:
    """Seconds for ``tokens`` prompt tokens, in steps of at most ``max_batch_tokens`` (get_queued_prefill_time)."""
    full, rest = divmod(math.ceil(tokens), profile.max_batch_tokens)
    seconds = full * profile.prefill.seconds_for(profile.max_batch_tokens)
    return seconds + (profile.prefill.seconds_for(rest) if rest else 0.0)


def prefill_capacity(profile: EngineProfile, input_tokens: float, ttft_s: float) -> float:
    """Requests per second of one engine: the highest ``batch / TTFT`` of all batches that meet the objective.

    If no batch meets it: the highest of all batches. A batch is the number of prompts in one prefill step, at least 1.
    ``input_tokens``: mean number of a prompt's tokens that prefill computes.
    """
    tokens = max(1, math.ceil(input_tokens))
    batches = _batches(max(1, min(profile.max_running, profile.max_batch_tokens // tokens)))
    passes = ((batch, prefill_s(profile, batch * tokens)) for batch in batches)
    return _best(((batch / seconds, seconds) for batch, seconds in passes), ttft_s)


def decode_capacity(profile: EngineProfile, input_tokens: float, output_tokens: float, itl_s: float) -> float | None:
    """Requests per second of one engine: the highest ``batch / (OSL * ITL)`` of all batches that meet the objective.

    If no batch meets it: the highest of all batches. ``itl_s``: objective of the inter-token latency. ``None``: one
    request of these mean lengths does not fit the KV.
    """
    outputs = max(1, math.ceil(output_tokens))
    context = max(1, math.ceil(input_tokens) + outputs // 2)
    batches = _batches(min(profile.max_running, profile.kv_tokens // context))
    if not batches:
        return None
    steps = ((batch, profile.decode.seconds_for(batch, context)) for batch in batches)
    return _best(((batch / (outputs * seconds), seconds) for batch, seconds in steps), itl_s)


def _batches(most: int) -> list[int]:
    """All batch sizes up to ``most``, or _MOST_BATCHES evenly spaced ones if there are more."""
    count = min(most, _MOST_BATCHES)
    return [1 + index * (most - 1) // max(1, count - 1) for index in range(count)]


def _best(rates: Iterable[tuple[float, float]], limit_s: float) -> float:
    """The highest rate whose time is within the limit; if no time is, the highest rate. ``rates``: (rate, time)."""
    pairs = list(rates)
    within_limit = [rate for rate, seconds in pairs if seconds <= limit_s]
    return max(within_limit or [rate for rate, _ in pairs])


# The next three functions return the wanted number of engines of a role, or None for no change. If they return the
# number of serving engines, engines that still start are cancelled.
def engines_by_threshold(values: Sequence[float], limits: Thresholds) -> int | None:
    """One more if any engine is above ``up``; one fewer if all are below ``down`` and would then stay below ``up``.

    ``values``: one value of each serving engine, in the unit of ``limits``.

    Source: the targets "throughput" and "latency" of ``load_scaling.py``.
    """
    count = len(values)
    if any(limits.is_above(value) for value in values):
        return count + 1
    if not all(limits.is_below(value) for value in values):
        return None
    # With one engine fewer, each value would grow by this factor. If one reached ``up``, the engine would come back.
    would_return = count > 1 and max(values) * count / (count - 1) >= limits.up
    return count if would_return else count - 1


def prefill_engines_by_ttft(
    queued_tokens: Sequence[float], input_tokens: float, ttft_s: float, config: DynamoConfig
) -> int | None:
    """One more if every engine would miss the TTFT; one fewer if the other engines could take over one engine's queue.

    ``queued_tokens``: prompt tokens that wait at each engine. ``input_tokens``: length of the next prompt. With one
    engine fewer, a queue may take ``slack_frac`` of the objective less the next prompt's own prefill time.
    """
    count, profile = len(queued_tokens), config.prefill
    if all(prefill_s(profile, queued + input_tokens) > ttft_s for queued in queued_tokens):
        return count + 1
    growth = count / (count - 1) if count > 1 else 1.0  # of each queue, with one engine fewer
    own_s = prefill_s(profile, input_tokens)
    slack_s = (ttft_s - own_s) * config.slack_frac
    fits = all(prefill_s(profile, queued * growth + input_tokens) - own_s < slack_s for queued in queued_tokens)
    return count - 1 if fits else None


def decode_engines_by_itl(
    loads: Sequence[DecodeLoad], context_tokens: float, itl_s: float, config: DynamoConfig
) -> int | None:
    """One more if every engine would miss the ITL; one fewer if the other engines could take over one engine's load.

    ``context_tokens``: KV of the next request. After a scale-in, a step may take ``slack_frac`` of the objective.
    """
    count, profile = len(loads), config.decode

    def itl_with(load: DecodeLoad, growth: float) -> float:
        """Time of a step after the load has grown by this factor and the next request has come, seconds."""
        requests = load.requests * growth + 1.0
        mean_context_tokens = (load.kv_tokens * growth + context_tokens) / requests
        return profile.decode.seconds_for(math.ceil(requests), mean_context_tokens)

    if all(itl_with(load, 1.0) > itl_s for load in loads):
        return count + 1
    growth = count / (count - 1) if count > 1 else 1.0  # of each load, with one engine fewer
    fits = all(
        int(load.kv_tokens * growth) < profile.kv_tokens and itl_with(load, growth) < itl_s * config.slack_frac
        for load in loads
    )
    return count - 1 if fits else None


class Dynamo(Policy[DynamoConfig]):
    """Replicas of each role from the forecast demand, from the engines' queues and KV, or from both."""

    def decide(self, snapshot: Snapshot) -> Decision:
        """The counts of the reactive loop, at least the floor; if only the predictive loop runs, its counts."""
        config, now = self._config, (snapshot.now_s,)
        is_reactive = config.is_reactive or config.target != "sla"
        memory: dict[str, tuple[float, ...]] = {"began_s": now, **snapshot.state.memory}
        ready = {role: len(replicas) for role, replicas in serving_replicas(snapshot).items()}
        predicted: dict[Role, int] | None = None
        if config.is_predictive and config.target == "sla":
            memory |= with_traffic(snapshot, memory)
            is_predicted_now = is_due(snapshot, memory, "began_s", config.adjustment_s)
            if not is_predicted_now and not is_reactive:
                return standing(snapshot, f"it adjusts every {config.adjustment_s:g} s", memory=memory)
            if is_predicted_now:
                demand, memory = next_demand(memory, snapshot.now_s, config.adjustment_s, config.forecast)
                memory["began_s"] = now
                predicted = None if demand is None else self._predicted(demand, ready)
                # If one role cannot be sized, the floor is the engines of both roles that serve now.
                memory["floor"] = tuple(float((predicted or ready)[role]) for role in Role)
        if not is_reactive:
            if predicted is None:
                return decided(snapshot, None, "no demand was observed, or a request does not fit", memory=memory)
            return _at_floor(snapshot, predicted, ready, "demand over what an engine serves", memory=memory)
        if "reacted_s" in memory and not is_due(snapshot, memory, "reacted_s", config.reaction_s):
            return standing(snapshot, f"it reacts every {config.reaction_s:g} s", memory=memory)
        memory["reacted_s"] = now
        reacted = self._reacted(snapshot, memory)
        if reacted is None:
            return decided(snapshot, None, "not every replica reports its queue and its KV", memory=memory)
        return _at_floor(snapshot, reacted, ready, "what engines show", memory=memory)

    def _predicted(self, demand: TrafficDemand, ready: Mapping[Role, int]) -> dict[Role, int] | None:
        """``ceil(demand / capacity)`` of each role, at most ``step_replicas`` more or fewer than serve (``ready``).

        ``None``: a request does not fit the KV of decode.
        """
        config, slo = self._config, self._slo
        inputs, outputs = demand.input_tokens, demand.output_tokens
        prefill = prefill_capacity(config.prefill, inputs * (1.0 - config.cached_frac), slo.ttft_s)
        decode = decode_capacity(config.decode, inputs, outputs, slo.tpot_s)
        if decode is None:
            return None
        capacities, step = {Role.PREFILL: prefill, Role.DECODE: decode}, config.step_replicas
        counts = {role: whole(demand.requests_per_s / capacities[role]) for role in Role}
        return {role: min(max(counts[role], ready[role] - step, 0), ready[role] + step) for role in Role}

    def _reacted(self, snapshot: Snapshot, memory: dict[str, tuple[float, ...]]) -> dict[Role, int | None] | None:
        """Wanted engines of each role by its engines' state; the value ``None`` of a role: no change.

        The result ``None``: an engine does not report. Stores the mean prompt length in ``memory``, for ticks in which
        no prompt is observed.
        """
        config, serving = self._config, serving_replicas(snapshot)
        if (inputs := snapshot.traffic.input_tokens_mean) is not None:
            memory["input_tokens"] = (inputs,)
        (inputs,) = memory.get("input_tokens", (0.0,))
        queues = [tokens for r in serving[Role.PREFILL] if (tokens := r.queued_prefill_tokens) is not None]
        kv, decoders = config.decode.kv_tokens, serving[Role.DECODE]
        loads = [load for r in decoders if (load := _decode_load(r, kv, inputs)) is not None]
        if not queues or not loads or len(queues) < len(serving[Role.PREFILL]) or len(loads) < len(decoders):
            return None
        if config.target != "sla":
            shares = [tokens / (config.longest_tokens or 1) for tokens in queues]
            prefill = engines_by_threshold(shares, PREFILL_THRESHOLDS[config.target])
            decode = engines_by_threshold([load.kv_tokens / kv for load in loads], DECODE_THRESHOLDS[config.target])
        else:
            computed_frac = 1.0 - config.cached_frac
            computed_queues = [tokens * computed_frac for tokens in queues]
            prefill = prefill_engines_by_ttft(computed_queues, inputs * computed_frac, self._slo.ttft_s, config)
            running = math.fsum(r.running_requests or 0.0 for r in decoders)
            used_tokens = math.fsum((r.kv_usage_frac or 0.0) * kv for r in decoders)
            context_tokens = used_tokens / running if running else inputs
            decode = decode_engines_by_itl(loads, context_tokens, self._slo.tpot_s, config)
        counts, present = {Role.PREFILL: prefill, Role.DECODE: decode}, desired_replicas(snapshot.state.desired)
        # 0: the only serving engine would leave. It may do so only while other engines start; else the count stays.
        are_starting = {role: present[role] > len(serving[role]) for role in Role}
        return {role: None if count == 0 and not are_starting[role] else count for role, count in counts.items()}


def _decode_load(replica: ReplicaStats, capacity_tokens: int, input_tokens: float) -> DecodeLoad | None:
    """The load of a decode engine; ``None``: it does not report. ``input_tokens``: mean prompt of waiting requests."""
    running, waiting, kv_frac = replica.running_requests, replica.waiting_requests, replica.kv_usage_frac
    if running is None or waiting is None or kv_frac is None:
        return None
    # Deferred requests wait for KV from prefill. ``kv_frac`` contains their KV already.
    requests = running + (waiting + (replica.deferred_requests or 0.0))
    return DecodeLoad(requests=requests, kv_tokens=kv_frac * capacity_tokens + waiting * input_tokens)


def _at_floor(
    snapshot: Snapshot, counts: Mapping[Role, int | None], ready: Mapping[Role, int], reason: str, *, memory: Memory
) -> Decision:
    """The counts, at least the floor. While replicas start, a count changes only if that cancels or removes replicas.

    ``counts``: ``None`` for a role that does not change. ``ready``: number of serving replicas.

    Source: ``_startup_reduction`` and ``_startup_disagg_decision`` of ``state_machine.py``.
    """
    present = desired_replicas(snapshot.state.desired)
    are_starting = any(ready[role] < present[role] for role in Role)
    wanted = {}
    for role, floor in zip(Role, memory.get("floor", (0.0, 0.0)), strict=True):
        count = counts[role]
        floored = max(floor, float(present[role] if count is None else count))
        is_reduction = count is not None and floored <= min(ready[role], present[role])
        wanted[role] = floored if is_reduction or not are_starting else float(present[role])
    shown = tuple(Shown(name=f"{role}_replicas", value=ready[role], target=wanted[role]) for role in Role)
    return decided(snapshot, wanted, reason, memory=memory, shown=shown)
