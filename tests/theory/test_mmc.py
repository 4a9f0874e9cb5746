"""The simulator against closed forms: an engine whose steps all take the same time is an M/M/c queue of its slots.

Gaps between requests and their outputs are exponential. A step is a millionth of the mean service time, so rounding to
whole tokens, and the wait for the step under way at an arrival, are far below the tolerances.
"""

import math
import random
from collections.abc import Sequence
from heapq import heapify, heapreplace

import numpy as np
import pytest

from autoscale.engines.profile import EngineProfile
from autoscale.sim.cluster import VirtualCluster
from autoscale.traces.trace import TraceRequest
from autoscale.types import PoolKey
from kvtransfer.topology import Role
from router.config import RouterConfig

STEP_S = 1e-6
SERVED_PER_S = 1.0  # by one slot
# Batches of hundreds of requests. One batch before them is left out, since the engine begins empty.
BATCHES = 20
# Student's t of 19 degrees of freedom at 99.9 %. Batch means of waits are skewed, so of 180 runs with seeds 0 to 19,
# three are further off.
STANDARD_ERRORS = 3.88


def slots(count: int) -> EngineProfile:
    """An engine that serves at most ``count`` requests at one time, each as if it were alone."""
    return EngineProfile.model_validate(
        {
            "name": "slots",
            "model": "none",
            "kv_tokens": 10**12,
            "block_tokens": 1,
            "max_batch_tokens": 1000,
            "max_running": count,
            "prefill": {"tokens": [0, 1], "seconds": [STEP_S, STEP_S]},
            "decode": {"batch": [1, 2], "context_tokens": [1], "step_s": [[STEP_S], [STEP_S]]},
            "handoff": {"base_s": 0.0, "kv_bytes_per_token": 1, "bytes_per_s": 1e9},
            "start_s": 0.0,
            "flops_per_token": 1.0,
            "peak_flops": 1.0,
            "sources": [{"part": "all", "kind": "assumed", "text": "M/M/c"}],
        }
    )


def poisson_trace(servers: int, utilization: float, count: int, seed: int) -> list[TraceRequest]:
    rng = random.Random(seed)
    trace, at_s = [], 0.0
    for _ in range(count):
        at_s += rng.expovariate(servers * utilization * SERVED_PER_S)
        service_s = rng.expovariate(SERVED_PER_S)
        trace.append(TraceRequest(at_s=at_s, input_tokens=1, output_tokens=math.ceil(service_s / STEP_S)))
    return trace


def simulated_waits_s(trace: Sequence[TraceRequest], profile: EngineProfile) -> list[float]:
    """Seconds from arrival to admission: TTFT less the step that admits the request and gives its first token."""
    key = PoolKey("g0", Role.DECODE)
    cluster = VirtualCluster({key: profile}, RouterConfig(), random.Random(0))
    cluster.add(key, "d0")
    cluster.route(key, ("d0",))
    cluster.submit(trace)
    cluster.run()
    assert cluster.is_done
    return [record.ttft_s - STEP_S for record in cluster.records() if record.ttft_s is not None]


def exact_waits_s(trace: Sequence[TraceRequest], servers: int) -> list[float]:
    """Waits if each request gets the server that is free first (Kiefer and Wolfowitz, 1955)."""
    free_s = [0.0] * servers
    heapify(free_s)
    waits = []
    for request in trace:
        begin_s = max(request.at_s, free_s[0])
        heapreplace(free_s, begin_s + request.output_tokens * STEP_S)
        waits.append(begin_s - request.at_s)
    return waits


def erlang_c(servers: int, offered_erlangs: float) -> float:
    """Share of arrivals that wait in M/M/c.

    Source: D. Gross, J. F. Shortle, J. M. Thompson, C. M. Harris, "Fundamentals of Queueing Theory", 2008, chapter 2.
    """
    terms = [offered_erlangs**n / math.factorial(n) for n in range(servers + 1)]
    last = terms[-1] * servers / (servers - offered_erlangs)
    return last / (sum(terms[:-1]) + last)


def deviations(waits_s: Sequence[float], servers: int, utilization: float) -> tuple[float, float]:
    """Differences of the mean wait, and of the share that waits, from Erlang-C, in standard errors of batch means."""
    offered = servers * utilization
    waiting_frac = erlang_c(servers, offered)
    # A request that waited only for the step under way found a free slot.
    waited = [wait_s > 1.001 * STEP_S for wait_s in waits_s]
    expected_s = waiting_frac / ((servers - offered) * SERVED_PER_S)
    return _deviation(waits_s, expected_s), _deviation(waited, waiting_frac)


def test_erlang_c_by_hand() -> None:
    assert erlang_c(3, 2.0) == pytest.approx(4 / 9)
    # 360 calls in half an hour, 4 minutes each, 55 agents: 0.239 wait (Mitan).
    assert erlang_c(55, 48.0) == pytest.approx(0.239, abs=5e-4)


def _deviation(values: Sequence[float], expected: float) -> float:
    size = len(values) // (BATCHES + 1)
    means = np.array(values[-BATCHES * size :], dtype=float).reshape(BATCHES, size).mean(axis=1)
    return float((means.mean() - expected) / (means.std(ddof=1) / math.sqrt(BATCHES)))


# With more servers fewer requests wait, and busier servers forget their past later. Both need longer traces.
@pytest.mark.parametrize(
    ("servers", "utilization", "count"),
    [
        (1, 0.5, 10_500),
        (1, 0.7, 10_500),
        (1, 0.9, 21_000),
        (4, 0.5, 10_500),
        (4, 0.7, 10_500),
        (4, 0.9, 21_000),
        (16, 0.7, 21_000),
        (16, 0.8, 21_000),
        (16, 0.9, 21_000),
    ],
)
def test_waits_are_those_of_mmc(servers: int, utilization: float, count: int) -> None:
    trace = poisson_trace(servers, utilization, count, seed=0)
    waits_s = simulated_waits_s(trace, slots(servers))
    assert len(waits_s) == count
    # Each wait is exact but for the step under way at the arrival; 0.1 % of a step is for the rounding of long sums.
    late_s = np.array(waits_s) - exact_waits_s(trace, servers)
    assert late_s.min() >= -0.001 * STEP_S
    assert late_s.max() <= 1.001 * STEP_S
    mean, share = deviations(waits_s, servers, utilization)
    assert abs(mean) < STANDARD_ERRORS
    assert abs(share) < STANDARD_ERRORS


@pytest.mark.parametrize(
    ("servers", "slots_there", "utilization", "count"),
    [(1, 2, 0.7, 4200), (4, 5, 0.7, 4200), (4, 3, 0.7, 4200), (16, 17, 0.9, 10_500)],
)
def test_one_slot_more_or_fewer_is_noticed(servers: int, slots_there: int, utilization: float, count: int) -> None:
    trace = poisson_trace(servers, utilization, count, seed=0)
    measured = deviations(simulated_waits_s(trace, slots(slots_there)), servers, utilization)
    assert max(abs(deviation) for deviation in measured) > STANDARD_ERRORS
