"""The setting of all of WVA's rows: its lengths, its engines, its cluster, and its parameters (pure).

WVA sizes engines that prefill and decode; our controller sizes both roles. So the decode pool of each group has WVA's
engines, and its one prefill replica gets no requests and is in no figure. Choices that the paper leaves open are made
here once, for all rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autoscale.engines.profile import EngineProfile
from autoscale.report import Slo
from autoscale.sim.config import SimAutoscaleConfig
from autoscale.sim.fleet import VirtualPool
from autoscale.sim.scenario import Run, run_policy
from autoscale.traces.lengths import NormalLengthConfig, SeparateLengthsConfig
from autoscale.traces.trace import TraceRequest
from autoscale.types import PoolKey
from kvtransfer.topology import Role
from router.config import LengthConfig, RouterConfig
from tests.lab.papers.saturation import RefusingScenario, Saturation

# Section V-A.
LENGTHS = SeparateLengthsConfig(
    input_tokens=NormalLengthConfig(lowest_tokens=10, highest_tokens=8192, mean_tokens=4096, deviation_tokens=2048),
    output_tokens=NormalLengthConfig(lowest_tokens=10, highest_tokens=2048, mean_tokens=1024, deviation_tokens=512),
)
KV_TOKENS, BLOCK_TOKENS, MAX_RUNNING = 16_384, 16, 256
TAU_KV, TAU_QUEUE, GAMMA_KV = 0.8, 5, 0.3
HPA_QUEUE, HPA_KV = 3.0, 0.5
# Section V-B: requests of 4,096 + 1,024 tokens that this KV holds.
CONCURRENT = 3
# Section V-D: replicas at most, and what they serve of 6 requests/s, where "the workload exceeds the capacity".
HIGHEST, SERVED_PER_S = 10, 5.78

# "Tests are run for 10 minutes (600 seconds)".
TEST_S = 600.0

# Both look every 15 s: WVA's GLOBAL_OPT_INTERVAL (internal/config/loader.go), Kubernetes' --horizontal-pod-autoscaler-
# sync-period. WVA's counts are actuated by an HPA (section III-D), so fewer of them take its 300 s too.
LOOP_S, STABILIZATION_S = 15.0, 300.0
# A pod with a real engine: docs/benchmark.md of WVA v0.6.0, on H100. One with llm-d-inference-sim: assumed.
POD_START_S, SIMULATED_POD_START_S = 110.0, 5.0
# llm-d-inference-sim takes 0 s by default, and the paper does not give its settings: assumed.
SIMULATED_TOKEN_S, SIMULATED_PROMPT_TOKEN_S = 1e-3, 1e-5
# Qwen3-0.6B, 1.2 GFLOP a token, at a quarter of an H100's 989 TFLOP/s: assumed. Outputs take what is left of a request.
PROMPT_TOKEN_S = 5e-6
TOKEN_S = (CONCURRENT * HIGHEST / SERVED_PER_S - 4096 * PROMPT_TOKEN_S) / 1024

# llm-d's saturation detector (queueDepthThreshold 5, kvCacheUtilThreshold 0.8) refuses where every engine is full.
ADMISSION = Saturation(kv_usage_frac=0.8, waiting_requests=5)

# Every prompt is computed on decode, at any load.
_ROUTER = RouterConfig(length=LengthConfig(local_max_tokens=10**9, local_cap_tokens=10**9, decode_busy_frac=1e-9))
# No objective: only whether a request was served counts.
_ANY = Slo(ttft_s=float("inf"), tpot_s=float("inf"))

WVA = {
    "policy": {
        "kind": "wva",
        "saturated_kv_frac": TAU_KV,
        "saturated_waiting_requests": TAU_QUEUE,
        "spare_kv_frac": GAMMA_KV,
    },
    "guard": {"cooldown_in_s": STABILIZATION_S},
}
HPA = {
    "policy": {
        "kind": "hpa",
        "decode": {"metric": "kv_usage_frac", "target": HPA_KV},
        "decode_more": [{"metric": "waiting_requests", "target": HPA_QUEUE}],
    },
    "guard": {"cooldown_in_s": 0.0},  # it has a stabilization of its own
}


def engine(*, token_s: float, prompt_token_s: float, gpu: str) -> EngineProfile:
    """An engine whose times do not depend on its load, and whose KV is the limit."""
    return EngineProfile.model_validate(
        {
            "name": f"wva {gpu}",
            "model": "Qwen/Qwen3-0.6B",
            "gpu": gpu,
            "gpus": 1,
            "kv_tokens": KV_TOKENS + 1,  # never quite full, so that the router's rule finds room for any prompt
            "block_tokens": BLOCK_TOKENS,
            "max_batch_tokens": 8192,
            "max_running": MAX_RUNNING,
            "prefill": {"tokens": [0, 8192], "seconds": [0.0, 8192 * prompt_token_s]},
            "decode": {"batch": [1, MAX_RUNNING], "context_tokens": [KV_TOKENS], "step_s": [[token_s], [token_s]]},
            "handoff": {"base_s": 0.0, "kv_bytes_per_token": 1.0, "bytes_per_s": 1e12},
            "start_s": POD_START_S,
            "flops_per_token": 1.2e9,
            "peak_flops": 989e12,
            "sources": [{"part": "all", "kind": "assumed", "text": "tests/lab/papers/wva_setting.py"}],
        }
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Engines of one kind: what one costs, how long it starts, and how many there may be."""

    name: str
    profile: EngineProfile
    cost: float
    start_s: float
    highest: int

    @property
    def key(self) -> PoolKey:
        """The pool of its engines."""
        return PoolKey(self.name, Role.DECODE)

    @property
    def pools(self) -> dict[PoolKey, VirtualPool]:
        """The pool of its engines, and the unused prefill pool."""
        most = {Role.PREFILL: 1, Role.DECODE: self.highest}
        return {
            PoolKey(self.name, role): VirtualPool(
                lowest_replicas=1,
                highest_replicas=most[role],
                start_s=self.start_s,
                gpus_per_replica=role is Role.DECODE,
                cost=self.cost if role is Role.DECODE else 0.0,
            )
            for role in Role
        }


def simulated_variant(gpu: str, *, cost: float, highest: int) -> Variant:
    """Engines of llm-d-inference-sim."""
    return Variant(
        name=gpu.lower(),
        profile=engine(token_s=SIMULATED_TOKEN_S, prompt_token_s=SIMULATED_PROMPT_TOKEN_S, gpu=gpu),
        cost=cost,
        start_s=SIMULATED_POD_START_S,
        highest=highest,
    )


def physical_variant() -> Variant:
    """The engines of section V-D."""
    profile = engine(token_s=TOKEN_S, prompt_token_s=PROMPT_TOKEN_S, gpu="H100")
    return Variant(name="h100", profile=profile, cost=2.5, start_s=POD_START_S, highest=HIGHEST)


def stairs(stages: Sequence[tuple[float, float]], seed: int) -> list[TraceRequest]:
    """Arrivals at even distances, as guidellm's constant rate: of each stage its seconds and requests per second."""
    times_s: list[float] = []
    begin_s = 0.0
    for duration_s, requests_per_s in stages:
        times_s += [begin_s + (n + 0.5) / requests_per_s for n in range(round(duration_s * requests_per_s))]
        begin_s += duration_s
    lengths = LENGTHS.sample(len(times_s), np.random.default_rng(seed))
    return [
        TraceRequest(at_s=at_s, input_tokens=prompt, output_tokens=output)
        for at_s, (prompt, output) in zip(times_s, lengths, strict=True)
    ]


def run(
    policy: Mapping[str, object],
    trace: Sequence[TraceRequest],
    variants: Sequence[Variant],
    *,
    refuse_at: Saturation | None = None,
    seed: int = 0,
) -> Run:
    """A trace under a policy, from one engine of each variant on."""
    pools = {key: pool for variant in variants for key, pool in variant.pools.items()}
    scenario = RefusingScenario(
        trace=trace,
        slos=[_ANY] * len(trace),
        profiles={key: variant.profile for variant in variants for key in variant.pools},
        pools=pools,
        router=_ROUTER,
        seed=seed,
        warm_up_s=0.0,
        refuse_at=refuse_at,
    )
    return run_policy(scenario, settings(policy), dict.fromkeys(pools, 1))


def settings(policy: Mapping[str, object]) -> SimAutoscaleConfig:
    """A policy without what our guard, gate and latency net would add to it."""
    guard = {
        **{"cooldown_out_s": 0.0, "hysteresis_out_frac": 0.0, "hysteresis_in_frac": 0.0},
        **{"damping_in_frac": 1.0, "step_out_replicas": 64, "step_in_replicas": 64},
        "band_replicas": 16.0,  # the unused prefill replica belongs to no ratio
    }
    changes = policy["guard"]
    assert isinstance(changes, dict)
    return SimAutoscaleConfig.model_validate(
        {
            "policy": policy["policy"],
            "guard": {**guard, **changes},
            "gate": {"is_enabled": False, "observation_s": 0.0},
            "slo": {"ttft_s": 250.0, "tpot_s": 8.0},
            "interval_s": LOOP_S,
            "window_s": 2 * LOOP_S,
            "stale_s": 2 * LOOP_S,
        }
    )
