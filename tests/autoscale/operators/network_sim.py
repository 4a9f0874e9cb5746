"""Discrete-event simulations of the queues that the planner computes with formulas."""

import heapq
import random
from collections.abc import Callable, Sequence

Service = Callable[[random.Random, float], float]


def exponential(rng: random.Random, mean_s: float) -> float:
    """A service time of M/M/R."""
    return rng.expovariate(1.0 / mean_s)


def deterministic(rng: random.Random, mean_s: float) -> float:
    """A service time of M/D/R."""
    return mean_s


def chain_latency_s(
    *, rate_per_s: float, means_s: Sequence[float], servers: Sequence[int], service: Service, jobs: int, seed: int
) -> float:
    """Mean time of a job through a chain of queues, first come first served; the first tenth is left out."""
    rng = random.Random(seed)
    arrivals, now_s = [], 0.0
    for _ in range(jobs):
        now_s += rng.expovariate(rate_per_s)
        arrivals.append(now_s)
    current = list(enumerate(arrivals))
    ends = [0.0] * jobs
    for mean_s, count in zip(means_s, servers, strict=True):
        free = [0.0] * count
        for job, at_s in current:
            end_s = max(at_s, heapq.heappop(free)) + service(rng, mean_s)
            heapq.heappush(free, end_s)
            ends[job] = end_s
        current = sorted(((job, ends[job]) for job, _ in current), key=lambda one: one[1])
    skipped = jobs // 10
    return sum(ends[job] - arrivals[job] for job in range(skipped, jobs)) / (jobs - skipped)


def shared_latency_s(
    *,
    rate_per_s: float,
    means_s: Sequence[float],
    hosts: Sequence[Sequence[int]],
    service: Service,
    jobs: int,
    seed: int,
) -> float:
    """Mean time of a job through operators whose replicas share GPUs: each GPU divides its time evenly over its jobs.

    ``hosts``: by operator, the GPUs that have a replica. A job goes to the GPU with the fewest jobs among them, and
    stays where it is if that is one of them. The first tenth of the jobs is left out.
    """
    rng = random.Random(seed)
    works: list[dict[int, float]] = [{} for _ in range(1 + max(map(max, hosts)))]  # by GPU: seconds left of each job
    step: dict[int, int] = {}
    begun_s: list[float] = []
    total_s, counted, now_s, next_s = 0.0, 0, 0.0, 0.0

    def send(job: int, current: int) -> None:
        gpu = min(hosts[step[job]], key=lambda one: (len(works[one]), one != current, rng.random()))
        works[gpu][job] = service(rng, means_s[step[job]])

    while counted < jobs:
        left_s, gpu = min(
            ((min(each.values()) * len(each), at) for at, each in enumerate(works) if each), default=(1e9, 0)
        )
        passed_s = min(left_s, next_s - now_s)
        for each in works:
            for job in each:
                each[job] -= passed_s / len(each)
        now_s += passed_s
        if passed_s < left_s:
            step[len(begun_s)] = 0
            begun_s.append(now_s)
            send(len(begun_s) - 1, -1)
            next_s = now_s + rng.expovariate(rate_per_s)
            continue
        job = min(works[gpu], key=lambda one: works[gpu][one])
        del works[gpu][job]
        step[job] += 1
        if step[job] < len(means_s):
            send(job, gpu)
        elif job >= jobs // 10:
            total_s += now_s - begun_s[job]
            counted += 1
    return total_s / counted
