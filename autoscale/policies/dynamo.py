"""Dynamo's planner as it is now: forecast demand over what an engine serves, and single steps by what engines show.

Source: ai-dynamo 1.6.1, ``planner/core/throughput_scaling.py`` (_throughput_disagg), ``load_scaling.py``
(_advance_load_disagg) and ``state_machine.py`` (what may move while replicas start). Budget and least counts are the
guard's here.
"""

import math
from collections.abc import Mapping
from typing import Literal

from pydantic import Field, model_validator

from autoscale.forecast import ForecastConfig, LastValueConfig
from autoscale.headcount import desired_replicas
from autoscale.policies.dynamo_capacity import decode_capacity, prefill_capacity
from autoscale.policies.dynamo_reaction import (
    DECODE_THRESHOLDS,
    PREFILL_THRESHOLDS,
    DecodeLoad,
    decode_engines_by_itl,
    engines_by_threshold,
    prefill_engines_by_ttft,
)
from autoscale.policies.dynamo_traffic import Demand, next_demand, taken_in
from autoscale.policies.independent import Memory, decided, is_due, serving_replicas, standing
from autoscale.policies.profiled import ProfiledConfig
from autoscale.ratio import PdRatio
from autoscale.slo import SloConfig
from autoscale.types import Decision, Shown, Snapshot
from kvtransfer.topology import Role

_EPSILON = 1e-9


class DynamoConfig(ProfiledConfig):
    """Which of its two loops run, how often, and how far one goes; the defaults are ``SLAPlannerDefaults``."""

    kind: Literal["dynamo"] = "dynamo"
    target: Literal["sla", "throughput", "latency"] = Field(
        "sla", description="optimization_target: all but sla are thresholds of the reactive loop alone."
    )
    is_predictive: bool = Field(True, description="enable_throughput_scaling; with both, the least that the other has.")
    is_reactive: bool = Field(False, description="enable_load_scaling.")
    adjustment_s: float = Field(180.0, gt=0.0, description="throughput_adjustment_interval_seconds.")
    reaction_s: float = Field(5.0, gt=0.0, description="load_adjustment_interval_seconds.")
    step_replicas: int = Field(8, ge=1, description="max_throughput_scaling_replicas, of each role, either way.")
    slack_frac: float = Field(0.8, gt=0.0, le=1.0, description="load_scaling_down_sensitivity.")
    cached_frac: float = Field(0.0, ge=0.0, le=0.95, description="Share of a prompt found in a cache: its KV hit rate.")
    longest_tokens: int | None = Field(
        None, ge=1, description="Of a request: what thresholds of prefill are shares of."
    )
    forecast: ForecastConfig = Field(
        LastValueConfig(), description="load_predictor: last_value is its constant; its arima finds the order itself."
    )

    @model_validator(mode="after")
    def _check_loops(self) -> "DynamoConfig":
        if self.target != "sla" and self.longest_tokens is None:
            raise ValueError(f"target {self.target} needs longest_tokens: give the model's longest context, tokens")
        if self.target == "sla" and not self.is_predictive and not self.is_reactive:
            raise ValueError("neither is_predictive nor is_reactive is set: set one, or nothing is ever decided")
        return self


class Dynamo:
    """The policy; see ``decide``."""

    def __init__(self, config: DynamoConfig, *, ratio: PdRatio, slo: SloConfig) -> None:
        self._config = config
        self._slo = slo
        self._is_predictive = config.is_predictive and config.target == "sla"
        self._is_reactive = config.is_reactive or config.target != "sla"

    def decide(self, snapshot: Snapshot) -> Decision:
        """The predictive loop's counts; those of the reactive one, where it runs, and not fewer than the former."""
        config, now = self._config, (snapshot.now_s,)
        memory: dict[str, tuple[float, ...]] = {"began_s": now, **snapshot.state.memory}
        ready = {role: len(replicas) for role, replicas in serving_replicas(snapshot).items()}
        predicted: dict[Role, int] | None = None
        if self._is_predictive:
            memory |= taken_in(snapshot, memory)
            is_over = is_due(snapshot, memory, "began_s", config.adjustment_s)
            if not is_over and not self._is_reactive:
                return standing(snapshot, f"it adjusts every {config.adjustment_s:g} s", memory=memory)
            if is_over:
                demand, memory = next_demand(memory, snapshot.now_s, config.adjustment_s, config.forecast)
                memory["began_s"] = now
                predicted = None if demand is None else self._predicted(demand, ready)
                # Where one role cannot be sized, neither moves.
                memory["floor"] = tuple(float((predicted or ready)[role]) for role in Role)
        if not self._is_reactive:
            if predicted is None:
                return decided(snapshot, None, "no demand was observed, or a request does not fit", memory=memory)
            return _moved(snapshot, predicted, ready, "demand over what an engine serves", memory=memory)
        if "reacted_s" in memory and not is_due(snapshot, memory, "reacted_s", config.reaction_s):
            return standing(snapshot, f"it reacts every {config.reaction_s:g} s", memory=memory)
        memory["reacted_s"] = now
        asked = self._reacted(snapshot, memory)
        if asked is None:
            return decided(snapshot, None, "not every replica reports its queue and its KV", memory=memory)
        return _moved(snapshot, asked, ready, "what engines show", memory=memory)

    def _predicted(self, demand: Demand, ready: Mapping[Role, int]) -> dict[Role, int] | None:
        """``ceil(demand / capacity)`` of each role, at most a step from the replicas that serve."""
        config, slo = self._config, self._slo
        inputs, outputs = demand.input_tokens, demand.output_tokens
        prefill = prefill_capacity(config.prefill, inputs * (1.0 - config.cached_frac), slo.ttft_s)
        decode = decode_capacity(config.decode, inputs, outputs, slo.tpot_s)
        if decode is None:
            return None
        capacities, step = {Role.PREFILL: prefill, Role.DECODE: decode}, config.step_replicas
        counts = {role: math.ceil(demand.requests_per_s / capacities[role] - _EPSILON) for role in Role}
        return {role: min(max(counts[role], ready[role] - step, 0), ready[role] + step) for role in Role}

    def _reacted(self, snapshot: Snapshot, memory: dict[str, tuple[float, ...]]) -> dict[Role, int | None] | None:
        """What each role's engines ask for; ``None`` where one of them does not report."""
        config, serving = self._config, serving_replicas(snapshot)
        if (inputs := snapshot.traffic.input_tokens_mean) is not None:
            memory["input_tokens"] = (inputs,)
        (inputs,) = memory.get("input_tokens", (0.0,))
        queued = [r.queued_prefill_tokens for r in serving[Role.PREFILL]]
        queues = [tokens for tokens in queued if tokens is not None]
        kv = config.decode.kv_tokens
        loads = [
            DecodeLoad(
                requests=r.running_requests,
                waiting_requests=r.waiting_requests + (r.deferred_requests or 0.0),
                kv_tokens=r.kv_usage_frac * kv,
                waiting_kv_tokens=r.waiting_requests * inputs,  # who waits for its KV has room for it already
            )
            for r in serving[Role.DECODE]
            if r.running_requests is not None and r.waiting_requests is not None and r.kv_usage_frac is not None
        ]
        if not queues or not loads or len(queues) < len(queued) or len(loads) < len(serving[Role.DECODE]):
            return None
        present = desired_replicas(snapshot.state.desired)
        starting = {Role.PREFILL: len(queues) < present[Role.PREFILL], Role.DECODE: len(loads) < present[Role.DECODE]}
        if config.target != "sla":
            shares = [tokens / (config.longest_tokens or 1) for tokens in queues]
            used = [(load.kv_tokens + load.waiting_kv_tokens) / kv for load in loads]
            p_limits, d_limits = PREFILL_THRESHOLDS[config.target], DECODE_THRESHOLDS[config.target]
            return {
                Role.PREFILL: engines_by_threshold(shares, p_limits, are_starting=starting[Role.PREFILL]),
                Role.DECODE: engines_by_threshold(used, d_limits, are_starting=starting[Role.DECODE]),
            }
        computed = 1.0 - config.cached_frac
        running = math.fsum(load.requests for load in loads)
        context = math.fsum(load.kv_tokens for load in loads) / running if running else inputs
        return {
            Role.PREFILL: prefill_engines_by_ttft(
                [tokens * computed for tokens in queues],
                config.prefill,
                input_tokens=inputs * computed,
                ttft_s=self._slo.ttft_s,
                slack_frac=config.slack_frac,
                are_starting=starting[Role.PREFILL],
            ),
            Role.DECODE: decode_engines_by_itl(
                loads,
                config.decode,
                context_tokens=context,
                itl_s=self._slo.tpot_s,
                slack_frac=config.slack_frac,
                are_starting=starting[Role.DECODE],
            ),
        }


def _moved(
    snapshot: Snapshot, asked: Mapping[Role, int | None], ready: Mapping[Role, int], reason: str, *, memory: Memory
) -> Decision:
    """The counts, not below the floor; while replicas of either role start, only what gives some up.

    Source: ``_startup_reduction`` and ``_startup_disagg_decision`` of ``state_machine.py``.
    """
    present = desired_replicas(snapshot.state.desired)
    are_starting = any(ready[role] < present[role] for role in Role)
    wanted = {}
    for role, least in zip(Role, memory.get("floor", (0.0, 0.0)), strict=True):
        count = asked[role]
        floored = max(least, float(present[role] if count is None else count))
        is_allowed = not are_starting or (count is not None and floored <= min(ready[role], present[role]))
        wanted[role] = floored if is_allowed else float(present[role])
    shown = tuple(Shown(name=f"{role}_replicas", value=ready[role], target=wanted[role]) for role in Role)
    return decided(snapshot, wanted, reason, memory=memory, shown=shown)
