"""DOPD's testbed: engines by Table I, fixed numbers of requests in flight, and BurstGPT's bursts (pure)."""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

import numpy as np

from autoscale.engines.optimal_ratio import DecodeMemoryConfig
from autoscale.engines.profile import EngineProfile
from autoscale.report import RequestRecord, Slo
from autoscale.sim.cluster import VirtualCluster
from autoscale.sim.replica import VirtualReplica
from autoscale.slo import SloConfig
from autoscale.traces.arrivals import MmppConfig, MmppStateConfig, SineRateConfig
from autoscale.traces.lengths import LognormalLengthConfig, SeparateLengthsConfig
from autoscale.traces.synthesis import WorkloadConfig, synthesize
from autoscale.traces.trace import TraceRequest
from autoscale.types import PoolKey
from kvtransfer.topology import Role
from router.config import LengthConfig, RouterConfig

KEYS = {role: PoolKey("g0", role) for role in Role}
# The paper names no objective: these are our defaults, 1 s and 0.05 s.
SLO = Slo(ttft_s=SloConfig().ttft_s, tpot_s=SloConfig().tpot_s)
# Fig. 7 has P90 TPOTs up to 0.097 s, so the paper's may be as lax; the TTFT is MLPerf Inference's, Llama-2-70B, server.
LAX_SLO = Slo(ttft_s=2.0, tpot_s=0.1)
# An H100 has 80 GB and 3.35 TB/s (data sheet of the SXM board). The weights, 70.6e9 parameters in FP8. M' is the tenth
# of the memory that vLLM leaves by default; alpha is what Table I's steps show.
MEMORY_TP2 = DecodeMemoryConfig(
    gpu_bytes=80e9, other_bytes=8e9, model_bytes=70.6e9, gpus=2, bytes_per_s=3.35e12, read_frac=0.5
)
# Section VII: "<= 30s for a P-instance (and about 1.5x longer for a D-instance)".
START_S = {Role.PREFILL: 30.0, Role.DECODE: 45.0}
GPUS = {Role.PREFILL: 1, Role.DECODE: 2}
# Section 4.3: only short prompts are computed on decode, for answers of any length; the bound for bursts is not given.
ROUTER = RouterConfig(
    length=LengthConfig(local_cap_tokens=512, local_tokens_per_output_token=512.0, decode_room_frac=0.5)
)

# Table I, with the KV that MEMORY_TP2 leaves.
_PROFILE = Path(__file__).parents[3] / "configs" / "profiles" / "h100_llama70b_fp8_tp2_table_1.json"


def engine(role: Role) -> EngineProfile:
    """Table I: Llama-3.3-70B FP8, prefill on one H100; a decode replica holds what Eq. 11 leaves on two."""
    decode = EngineProfile.load(_PROFILE)
    if role is Role.DECODE:
        return decode
    prefill = {
        "name": "h100_llama70b_fp8_tp1_table_1",
        "gpus": GPUS[role],
        "max_running": 1,  # section IV-B: a prefill yields one request at a time
        "start_s": START_S[role],
        "peak_flops": decode.peak_flops / decode.gpus,
    }
    return decode.model_copy(update=prefill)


@dataclass(frozen=True, slots=True, kw_only=True)
class Steady:
    """A window of time with a fixed number of requests in flight: requests ``sent`` in it, and those that ended per s.

    ``prefill_busy_frac``: share of the time in which prefill replicas computed.
    """

    sent: Sequence[RequestRecord]
    requests_per_s: float
    prefill_busy_frac: float

    def violations_frac(self, slo: Slo) -> float:
        """The share of requests outside an objective."""
        return 1.0 - sum(slo.is_met(record) for record in self.sent) / len(self.sent)

    def goodput_requests_per_s(self, slo: Slo) -> float:
        """Requests per second that met an objective."""
        return len(self.sent) * (1.0 - self.violations_frac(slo)) / _WINDOW_S

    @property
    def tpot_p90_s(self) -> float:
        """90th percentile of TPOT."""
        return float(np.quantile([record.tpot_s for record in self.sent if record.tpot_s is not None], 0.9))


# In seconds: end of the rise of requests in flight, begin and length of the window, and the end, 140 s after it.
_RAMP_S, _FROM_S, _WINDOW_S, _END_S = 30.0, 60.0, 120.0, 320.0
# Longest time from the end of a request to the next one, in seconds.
_LOOK_S = 0.01


def closed_loop(
    profiles: Mapping[Role, EngineProfile],
    counts: Mapping[Role, int],
    lengths: Iterable[tuple[int, int]],
    concurrency: int,
) -> Steady:
    """Fixed counts with a fixed number of requests in flight, as section VI-B drives its deployments.

    Args:
        profiles: the engine of each role in ``counts``.
        counts: replicas; without prefill, prompts are computed where they decode.
        lengths: input and output tokens, again and again.
        concurrency: requests in flight.
    """
    cluster = VirtualCluster({KEYS[role]: profiles[role] for role in counts}, ROUTER, random.Random(0))
    replicas: dict[Role, list[VirtualReplica]] = {role: [] for role in Role}
    for role, count in counts.items():
        replicas[role] = [cluster.add(KEYS[role], f"{role}-{index}") for index in range(count)]
        cluster.route(KEYS[role], [replica.replica_id for replica in replicas[role]])
    coming = cycle(lengths)
    busy_s: list[float] = []

    def fill() -> None:
        wanted = round(concurrency * min(1.0, cluster.now_s / _RAMP_S))
        missing = wanted - sum(replica.ongoing_requests for replica in replicas[Role.DECODE])
        if missing > 0:
            pairs = islice(coming, missing)
            cluster.submit([TraceRequest(at_s=cluster.now_s, input_tokens=i, output_tokens=o) for i, o in pairs])
        cluster.at(cluster.now_s + _LOOK_S, fill)

    def look() -> None:
        busy_s.append(sum(replica.engine.counters.busy_s for replica in replicas[Role.PREFILL]))

    until_s = _FROM_S + _WINDOW_S
    cluster.at(0.0, fill)
    cluster.at(_FROM_S, look)
    cluster.at(until_s, look)
    cluster.run(_END_S)
    cluster.give_up()
    records = cluster.records()
    ended = sum(r.last_token_s is not None and _FROM_S <= r.last_token_s < until_s for r in records)
    return Steady(
        sent=[record for record in records if _FROM_S <= record.sent_s < until_s],
        requests_per_s=ended / _WINDOW_S,
        prefill_busy_frac=(busy_s[1] - busy_s[0]) / _WINDOW_S / max(1, len(replicas[Role.PREFILL])),
    )


# Mean lengths of ShareGPT in DistServe (Fig. 7): 755 and 200 tokens.
_SHAREGPT = SeparateLengthsConfig(
    input_tokens=LognormalLengthConfig(median_tokens=530.0, sigma=1.0, lowest_tokens=4, highest_tokens=4096),
    output_tokens=LognormalLengthConfig(median_tokens=135.0, sigma=0.9, lowest_tokens=4, highest_tokens=2048),
)
# Gamma shape of the gaps between requests: BurstGPT's default (HPMLL/BurstGPT, example/src/burstgpt/config.py).
GAMMA_SHAPE = 0.5
# One prefill and one decode replica serve 7.5 requests/s of these, and eight GPUs 30 (4P2D).
LOW_REQUESTS_PER_S, HIGH_REQUESTS_PER_S = 4.0, 24.0
# A day of BurstGPT, 24 times as fast.
DAY_S = 3600.0
# Two states of equal length have gaps as uneven as that gamma's (a coefficient of variation of sqrt(2)) if their rates
# are as 2 + sqrt(3) to 1: CV^2 = 2 E[rate] E[1 / rate] - 1. They last for hundreds of seconds, as DOPD's T does.
_JUMP = 2.0 + 3.0**0.5
JUMPS_S, _STATE_S = 2400.0, 300.0


def day(seed: int, duration_s: float = DAY_S) -> tuple[TraceRequest, ...]:
    """The first part of a day from night to night by a sine, with gaps by BurstGPT's gamma distribution."""
    mean = (LOW_REQUESTS_PER_S + HIGH_REQUESTS_PER_S) / 2
    sine = SineRateConfig(
        mean_requests_per_s=mean, amplitude_frac=HIGH_REQUESTS_PER_S / mean - 1.0, period_s=DAY_S, peak_s=DAY_S / 2
    )
    rng = np.random.default_rng(seed)
    # A renewal process by its own time, in which a request comes every second on average, laid along the sine.
    own = np.cumsum(rng.gamma(GAMMA_SHAPE, 1.0 / GAMMA_SHAPE, round(2 * HIGH_REQUESTS_PER_S * duration_s)))
    grid_s = np.linspace(0.0, duration_s, round(duration_s) + 1)
    rates = sine.at(grid_s, DAY_S)[0]
    passed = np.concatenate([[0.0], np.cumsum((rates[1:] + rates[:-1]) / 2)])
    at_s = np.interp(own[own < passed[-1]], passed, grid_s)
    pairs = _SHAREGPT.sample(len(at_s), rng)
    return tuple(
        TraceRequest(at_s=at, input_tokens=inputs, output_tokens=outputs)
        for at, (inputs, outputs) in zip(at_s.tolist(), pairs, strict=True)
    )


def jumps(seed: int, duration_s: float = JUMPS_S) -> tuple[TraceRequest, ...]:
    """A rate that jumps between two states, as section IV-A models bursts (MMPP), as uneven as the day's gaps."""
    states = [MmppStateConfig(rate_factor=2 * f / (1 + _JUMP), mean_sojourn_s=_STATE_S) for f in (1.0, _JUMP)]
    mean = (LOW_REQUESTS_PER_S + HIGH_REQUESTS_PER_S) / 2
    arrivals = MmppConfig.model_validate(
        {"rate": {"kind": "constant", "requests_per_s": mean}, "states": [state.model_dump() for state in states]}
    )
    config = WorkloadConfig(duration_s=duration_s, arrivals=arrivals, lengths=_SHAREGPT)
    return synthesize(config, np.random.default_rng(seed))
