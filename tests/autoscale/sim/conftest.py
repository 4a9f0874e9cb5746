"""Scenarios of the simulator's tests."""

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from autoscale.engines.profile import EngineProfile
from autoscale.report import Slo
from autoscale.sim.config import SimConfig
from autoscale.sim.fleet import VirtualPool
from autoscale.sim.scenario import Scenario, unloaded_ttft_s
from autoscale.traces.trace import TraceRequest
from autoscale.types import PoolKey
from kvtransfer.topology import Role
from router.config import RouterConfig

CONFIGS = Path(__file__).parents[3] / "configs"
PROFILE = EngineProfile.load(CONFIGS / "profiles" / "h100_llama70b_fp8_tp2.json")
LLAMA = SimConfig.load(CONFIGS / "sim" / "h100_llama70b.yaml")
KEYS = {role: PoolKey("g0", role) for role in Role}


def make_scenario(
    arrivals: Iterable[tuple[float, int, int]], *, start_s: float = 5.0, highest: int = 8, **changes: Any
) -> Scenario:
    """Arrivals as (seconds, input tokens, output tokens) on H100 engines, without a warm-up."""
    trace = [TraceRequest(at_s=at, input_tokens=inputs, output_tokens=outputs) for at, inputs, outputs in arrivals]
    profiles = dict.fromkeys(Role, PROFILE)
    pool = VirtualPool(lowest_replicas=1, highest_replicas=highest, start_s=start_s, gpus_per_replica=2, cost=4.0)
    slos = [
        Slo(ttft_s=max(1.0, 3 * unloaded_ttft_s(r.input_tokens, profiles, RouterConfig())), tpot_s=0.05) for r in trace
    ]
    settings: dict[str, Any] = {"router": RouterConfig(), "warm_up_s": 0.0, **changes}
    return Scenario(
        trace=trace,
        slos=slos,
        profiles={KEYS[role]: PROFILE for role in Role},
        pools=dict.fromkeys(KEYS.values(), pool),
        **settings,
    )


def lengths(inputs: tuple[int, int], outputs: tuple[int, int]) -> list[TraceRequest]:
    """200 requests with random lengths from both ranges, ends included."""
    rng = random.Random(0)
    return [
        TraceRequest(at_s=float(n), input_tokens=rng.randint(*inputs), output_tokens=rng.randint(*outputs))
        for n in range(200)
    ]
