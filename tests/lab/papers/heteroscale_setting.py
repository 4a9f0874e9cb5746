"""The setting of all of HeteroScale's rows: services, engines, a day's load, and the load at which policies act (pure).

The paper's models, engines and traces are not public. What it leaves open is chosen here once, for all rows.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from autoscale.decide.config import AutoscaleConfig
from autoscale.engines.profile import EngineProfile
from autoscale.policies import PolicyConfig
from autoscale.policies.heteroscale import HeteroScaleConfig, Signal
from autoscale.pressure.rate_search import PressurePoint
from autoscale.ratio import PdRatio
from autoscale.sim.config import SimConfig, SimGroupConfig, SimPoolConfig, SimSloConfig
from autoscale.sim.scenario import Scenario, scenario_of
from autoscale.sim.split import SplitSimulator
from autoscale.slo import SloConfig
from autoscale.traces.arrivals import CurveRateConfig, PoissonConfig
from autoscale.traces.lengths import LognormalLengthConfig, SeparateLengthsConfig
from autoscale.traces.synthesis import WorkloadConfig, synthesize
from autoscale.traces.trace import TraceRequest
from autoscale.types import PoolKey
from kvtransfer.topology import Role
from router.config import LengthConfig, RouterConfig

PROFILE = Path(__file__).parents[3] / "configs" / "profiles" / "h100_llama70b_fp8_tp4.json"

# Section 4.1: 16 nodes. A replica of ours stands for one of them.
NODES = 16
# The splits that are tried, prefill nodes of the 16.
PREFILL_NODES = (1, 5, 7, 9, 11, 15)
# Share of requests that must meet both latencies; our controller uses the same quantile. The paper names none.
ATTAINMENT_FRAC = 0.95
# Load that every threshold stands for, as a share of the highest rate of a split (our policy's advice).
LOAD_FRAC = 0.8
# Lengths are lognormal around the paper's averages.
LENGTH_SIGMA = 0.3
# Prefill computes every prompt, after any wait: the paper's decode nodes compute none.
ROUTER = RouterConfig(length=LengthConfig(local_max_tokens=0, local_cap_tokens=0), prefill_timeout_s=3600.0)

# Section 4.2.1 in words: low late at night and in the early morning, a sharp rise in the morning, a dip at midday, a
# second peak in the afternoon, then a decline that levels off. Shares of the highest by hour: the text has no figures.
DAY_FRAC = (
    *(0.50, 0.40, 0.32, 0.27, 0.25, 0.25, 0.28, 0.38, 0.65, 0.92, 1.00, 0.85),
    *(0.62, 0.70, 0.92, 0.90, 0.82, 0.75, 0.70, 0.68, 0.68, 0.68, 0.66, 0.60),
)
# Seconds of an hour of the day: starts and cooldowns have their real length, so that following is harder.
HOUR_S = 240.0
DAY_S = 24 * HOUR_S
PEAK_HOUR = 10
# Nodes that carry the peak at the load of the thresholds.
PEAK_NODES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """Average lengths and objectives (section 4.1)."""

    name: str
    input_tokens: int
    output_tokens: int
    ttft_s: float
    tpot_s: float

    @property
    def lengths(self) -> SeparateLengthsConfig:
        """Distribution of its requests' lengths."""
        median = math.exp(-(LENGTH_SIGMA**2) / 2)  # of a lognormal of mean 1
        return SeparateLengthsConfig(
            input_tokens=LognormalLengthConfig(median_tokens=self.input_tokens * median, sigma=LENGTH_SIGMA),
            output_tokens=LognormalLengthConfig(median_tokens=self.output_tokens * median, sigma=LENGTH_SIGMA),
        )

    def cluster(self, profile: EngineProfile) -> SimConfig:
        """Nodes of one kind for it; twice the paper's number, so that bounds do not hide wanted replicas."""
        pool = SimPoolConfig(profile=profile, highest_replicas=NODES)
        return SimConfig(
            groups=(SimGroupConfig(prefill=pool, decode=pool),),
            router=ROUTER,
            slo=SimSloConfig(
                ttft_least_s=self.ttft_s,
                ttft_unloaded_factor=1.0,
                tpot_s=self.tpot_s,
                attainment_frac=ATTAINMENT_FRAC,
            ),
        )


SERVICE_A = Service(name="A", input_tokens=3000, output_tokens=350, ttft_s=1.0, tpot_s=0.040)
SERVICE_B = Service(name="B", input_tokens=7800, output_tokens=700, ttft_s=1.0, tpot_s=0.020)


def requests(service: Service, rate: CurveRateConfig, duration_s: float, seed: int) -> Sequence[TraceRequest]:
    """Poisson arrivals of a service's requests."""
    workload = WorkloadConfig(duration_s=duration_s, arrivals=PoissonConfig(rate=rate), lengths=service.lengths)
    return synthesize(workload, np.random.default_rng(seed))


def pressure(service: Service, profile: EngineProfile) -> SplitSimulator:
    """Constant rates of a service's requests on its cluster."""
    flat = CurveRateConfig(points_requests_per_s=(1.0, 1.0))
    return SplitSimulator(service.cluster(profile), requests(service, flat, 2000.0, seed=0), seed=0)


def throughput(test: SplitSimulator, prefill_nodes: Sequence[int] = PREFILL_NODES) -> list[PressurePoint]:
    """The highest rate of each split of the nodes."""
    points: list[PressurePoint] = []
    for prefill in prefill_nodes:
        before = points[-1].requests_per_s if points else 0.0
        points.append(test.find_highest_rate(prefill, NODES - prefill, before or None))
    return points


@dataclass(frozen=True, kw_only=True)
class Dialogue:
    """The dialogue service of sections 4.2 and 4.3: service A's lengths and objectives, at its best split.

    ``best``: that split at its highest rate, with what every signal shows there.
    """

    sim: SimConfig
    best: PressurePoint

    @property
    def pd_ratio(self) -> PdRatio:
        """Ratio of the best split."""
        return PdRatio.of({Role.PREFILL: self.best.prefill, Role.DECODE: self.best.decode})

    @property
    def rate(self) -> CurveRateConfig:
        """Requests per second over a day."""
        highest = PEAK_NODES / NODES * LOAD_FRAC * self.best.requests_per_s
        return CurveRateConfig(points_requests_per_s=tuple(frac * highest for frac in DAY_FRAC), period_s=DAY_S)

    def day(self, seed: int) -> Sequence[TraceRequest]:
        """Requests of one day."""
        return requests(SERVICE_A, self.rate, DAY_S, seed)

    def needed(self, at_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Nodes of both roles (fractions allowed) that the load needs at these times of the day."""
        return self.nodes(self.rate.at(at_s, DAY_S)[0])

    def nodes(self, requests_per_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Nodes of both roles that carry these rates at the load of the thresholds."""
        nodes: NDArray[np.float64] = requests_per_s / (LOAD_FRAC * self.best.requests_per_s) * NODES
        return nodes

    def counts(self, nodes: float) -> dict[Role, int]:
        """Whole nodes of each role."""
        split = {Role.PREFILL: self.best.prefill, Role.DECODE: self.best.decode}
        return {role: max(1, math.ceil(nodes * each / NODES - 1e-9)) for role, each in split.items()}

    def pools(self, counts: Mapping[Role, int]) -> dict[PoolKey, int]:
        """The same by pool."""
        return {key: counts[key.role] for key in self.sim.pools()}

    def scenario(self, trace: Sequence[TraceRequest]) -> Scenario:
        """A trace on its cluster."""
        return scenario_of(self.sim, trace)

    def shown(self, signal: Signal) -> float:
        """The value of a signal at the best split's highest rate."""
        shown = self.best.signals[signal]
        assert shown is not None
        return shown

    def target(self, signal: Signal) -> float:
        """Target of a linear signal: the same share of that value for all signals."""
        return LOAD_FRAC * self.shown(signal)

    def config(self, policy: PolicyConfig, slo: SloConfig | None = None) -> AutoscaleConfig:
        """The controller around a policy: our defaults, guard included."""
        own = SloConfig(ttft_s=SERVICE_A.ttft_s, tpot_s=SERVICE_A.tpot_s, quantile_frac=ATTAINMENT_FRAC)
        return AutoscaleConfig(policy=policy, pd_ratio=self.pd_ratio, slo=slo or own)

    def tps(self) -> AutoscaleConfig:
        """The policy that the paper chose, with its safety net."""
        return self.config(HeteroScaleConfig(signal=Signal.DECODE_TPS, target=self.target(Signal.DECODE_TPS)))
