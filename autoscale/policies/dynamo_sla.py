"""Dynamo's SLA planner up to 1.0: both roles from profiles, corrected by the latencies that were seen.

Source: ``components/planner/src/dynamo/planner/utils/planner_core.py`` (make_adjustments,
_compute_replica_requirements) and ``perf_interpolation.py`` of ai-dynamo up to 1.0; 1.6 has no correction factors any
more. Two things differ. It interpolates by cubic curves on a grid, profiles here by lines. It knows the mean TTFT,
and a snapshot a quantile, which is larger; the mean ITL is that of the engines.
"""

import math
from typing import Literal

from pydantic import Field

from autoscale.capacity import decode_tokens_per_s
from autoscale.forecast import ForecastConfig, LastValueConfig
from autoscale.policies.dynamo_traffic import Demand, next_demand, taken_in
from autoscale.policies.independent import decided, is_due, mean, serving_replicas, standing, summed
from autoscale.policies.profiled import ProfiledConfig
from autoscale.profile import EngineProfile
from autoscale.ratio import PdRatio
from autoscale.slo import SloConfig
from autoscale.types import Decision, Shown, Snapshot
from kvtransfer.topology import Role

_SUMS = ("ttft_s", "running_requests", "tokens_per_s", "requests_per_replica")
_EPSILON = 1e-9


class DynamoSlaConfig(ProfiledConfig):
    """The profiles, how often they are asked, and by which forecast."""

    kind: Literal["dynamo_sla"] = "dynamo_sla"
    adjustment_s: float = Field(180.0, gt=0.0, description="Time between two decisions: --adjustment-interval.")
    forecast: ForecastConfig = Field(
        LastValueConfig(),
        description="--load-predictor: last_value is its constant. Its arima, which is the default, finds an order "
        "itself; arima here has a given one.",
    )
    is_corrected: bool = Field(True, description="False: --no-correction.")


def prefill_replicas(demand: Demand, profile: EngineProfile, correction: float) -> int:
    """``ceil(num_req * ISL / interval * min(1, p_corr) / throughput(ISL))``, of engines (planner_core.py).

    Args:
        demand: of the next interval.
        profile: of one prefill replica; outside its points the nearest one holds.
        correction: observed over expected TTFT (p_corr).
    """
    tokens = max(1.0, min(max(demand.input_tokens, profile.prefill.tokens[0]), profile.prefill.tokens[-1]))
    tokens_per_s = tokens / profile.prefill.seconds_for(tokens)
    return math.ceil(demand.requests_per_s * demand.input_tokens * min(1.0, correction) / tokens_per_s - _EPSILON)


def decode_replicas(demand: Demand, profile: EngineProfile, itl_s: float, correction: float) -> int:
    """``ceil(num_req * OSL / interval / best throughput(ITL / d_corr, ISL + OSL / 2))`` (planner_core.py).

    Args:
        demand: of the next interval.
        profile: of one decode replica.
        itl_s: the objective.
        correction: observed over expected ITL (d_corr).
    """
    corrected_s = itl_s / correction if correction > 0.0 else itl_s
    tokens_per_s = decode_tokens_per_s(profile, demand.context_tokens, corrected_s)
    return math.ceil(demand.requests_per_s * demand.output_tokens / tokens_per_s - _EPSILON)


class DynamoSla:
    """The policy; see ``decide``."""

    def __init__(self, config: DynamoSlaConfig, *, ratio: PdRatio, slo: SloConfig) -> None:
        self._config = config
        self._slo = slo

    def decide(self, snapshot: Snapshot) -> Decision:
        """Once an interval, for the next; without a request in one everything stays as it is."""
        config, now_s = self._config, snapshot.now_s
        memory: dict[str, tuple[float, ...]] = {"began_s": (now_s,), **snapshot.state.memory}
        memory |= taken_in(snapshot, memory) | summed(memory, _engines(snapshot))
        if not is_due(snapshot, memory, "began_s", config.adjustment_s):
            return standing(snapshot, f"it adjusts every {config.adjustment_s:g} s", memory=memory)
        seen = {name: mean(memory, name) for name in ("requests_per_s", *_SUMS)}
        demand, memory = next_demand(memory, now_s, config.adjustment_s, config.forecast)
        memory = {name: series for name, series in memory.items() if name not in _SUMS} | {"began_s": (now_s,)}
        if demand is None or not seen["requests_per_s"]:
            return decided(snapshot, None, "no request was observed in the interval", memory=memory)
        latest = Demand(
            requests_per_s=seen["requests_per_s"],
            input_tokens=memory["past_input_tokens"][-1],
            output_tokens=memory["past_output_tokens"][-1],
        )
        corrections = self._corrections(latest, seen) if config.is_corrected else (1.0, 1.0)
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

    def _corrections(self, latest: Demand, seen: dict[str, float | None]) -> tuple[float, float] | None:
        """``TTFT / TTFT(ISL)`` and ``ITL / ITL(concurrency, ISL + OSL / 2)``, observed over the profiles'."""
        ttft_s, running, tokens_per_s, concurrency = (seen[name] for name in _SUMS)
        if ttft_s is None or not running or not tokens_per_s or concurrency is None:
            return None
        prefill, decode = self._config.prefill, self._config.decode
        tokens = min(max(latest.input_tokens, prefill.prefill.tokens[0]), prefill.prefill.tokens[-1])
        most = max(1, int(decode.kv_tokens / max(1.0, latest.context_tokens)))
        batch = min(max(1, round(concurrency)), most)
        # A running request gets a token every ITL, so tokens per second are requests over it.
        itl_s = running / tokens_per_s
        return (
            ttft_s / max(_EPSILON, prefill.prefill.seconds_for(tokens)),
            itl_s / decode.decode.seconds_for(batch, latest.context_tokens),
        )


def _engines(snapshot: Snapshot) -> dict[str, float | None]:
    """TTFT, and of the decode replicas that report: requests in the batch, tokens per second, requests of each.

    num_req / num_d * duration / interval of the original is, by Little's law, how many requests each one has.
    """
    decode = serving_replicas(snapshot)[Role.DECODE]
    pairs = [(r, r.running_requests, r.decode_tokens_per_s) for r in decode]
    both = [(r, running, rate) for r, running, rate in pairs if running is not None and rate is not None]
    if not both:
        return dict.fromkeys(_SUMS) | {"ttft_s": snapshot.latency.ttft_mean_s}
    taken = math.fsum(n + (r.waiting_requests or 0.0) + (r.deferred_requests or 0.0) for r, n, _ in both)
    return {
        "ttft_s": snapshot.latency.ttft_mean_s,
        "running_requests": math.fsum(running for _, running, _ in both),
        "tokens_per_s": math.fsum(rate for *_, rate in both),
        "requests_per_replica": taken / len(both),
    }
