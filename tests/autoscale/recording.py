"""The log of a virtual day."""

import random
from pathlib import Path
from typing import Any

from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.controller import Controller
from autoscale.decide.decision_log import config_line, decision_line, is_news
from autoscale.engines.profile import EngineProfile
from autoscale.sim.cluster import VirtualCluster
from autoscale.sim.fleet import VirtualPool
from autoscale.sim.serve import VirtualServe as SimulatedServe
from autoscale.traces.trace import TraceRequest
from autoscale.types import Latency, Plan, PoolKey, Snapshot, Traffic
from kvtransfer.topology import Role
from router.config import RouterConfig
from tests.autoscale.virtual_serve import VirtualServe


class Recorder(Controller):
    """A controller that keeps the log of what it was shown."""

    def __init__(self, config: AutoscaleConfig, start_s: float) -> None:
        super().__init__(config)
        self.lines = [config_line("m", config, start_s, "start")]
        self._last: Plan | None = None

    def tick(self, snapshot: Snapshot) -> Plan:
        """The plan for this snapshot; the log keeps it if it is news."""
        plan = super().tick(snapshot)
        if is_news(plan, self._last):
            self.lines.append(decision_line("m", snapshot, plan))
        self._last = plan
        return plan


def recorded(config: AutoscaleConfig) -> list[str]:
    """A log of a rise, a peak with a dead decode replica, and a fall with late requests."""
    recorder = Recorder(config, 1000.0)
    cluster = VirtualServe(recorder, {Role.PREFILL: 8.0, Role.DECODE: 20.0})
    for tick in range(120):
        if tick == 70:
            cluster.lose(Role.DECODE)
        load = [250.0, 550.0, 880.0, 300.0][tick // 30]
        fields: dict[str, Any] = {
            "latency": Latency(ttft_s=2.0 if 95 < tick < 100 else 0.5, tpot_s=0.02),
            "traffic": Traffic(requests_per_s=load / 60.0, input_tokens_mean=1000.0, output_tokens_mean=60.0),
        }
        cluster.tick(load, **fields)
    return recorder.lines


PROFILE = Path(__file__).parents[2] / "configs" / "profiles" / "h100_llama70b_fp8_tp2.json"


def simulated(config: AutoscaleConfig) -> list[str]:
    """A log of a rise, a peak and a fall of requests to engine models."""
    rng = random.Random(0)
    trace, at_s = [], 0.0
    while at_s < 240.0:
        at_s += rng.expovariate((4.0, 16.0, 24.0, 6.0)[min(3, int(at_s // 60.0))])
        trace.append(TraceRequest(at_s=at_s, input_tokens=rng.randint(200, 3000), output_tokens=rng.randint(20, 300)))
    recorder = Recorder(config, 0.0)
    profile = EngineProfile.load(PROFILE)
    keys = [PoolKey("g0", role) for role in Role]
    cluster = VirtualCluster(dict.fromkeys(keys, profile), RouterConfig(), rng)
    cluster.submit(trace)
    pool = VirtualPool(lowest_replicas=1, highest_replicas=12, start_s=10.0, gpus_per_replica=2)
    SimulatedServe(cluster, recorder, dict.fromkeys(keys, pool)).start(dict.fromkeys(keys, 2))
    cluster.run(300.0)
    return recorder.lines
