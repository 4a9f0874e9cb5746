"""Waiting times of queues with several servers: Erlang's formulas, and what deterministic service changes (pure).

A queue has R servers, the replicas of an operator. Jobs, which are batches, arrive as a Poisson process. All functions
take arrays of any shapes that numpy can broadcast, so a whole table of batch sizes is one call.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


def erlang_b(servers: ArrayLike, load: ArrayLike) -> Floats:
    """Share of jobs that a system without a queue loses: Erlang's B formula.

    ``servers``: whole numbers, 1 or more. ``load``: arrival rate x service time, in Erlang, 0 or more.
    1 / B(r) = 1 + (r / a) / B(r-1), so 1 / B is the sum of the products of r/a, (r-1)/a, and so on. All terms are
    positive, so thousands of servers lose no digits. A sum that overflows belongs to a B below 1e-308, which is 0.
    Source: Harchol-Balter, Performance Modeling and Design of Computer Systems, chapter 14.
    """
    counts, loads = np.broadcast_arrays(np.asarray(servers, dtype=np.int64), np.asarray(load, dtype=np.float64))
    if counts.size and counts.min() < 1:
        raise ValueError(f"a queue has {counts.min()} servers: give 1 or more")
    if not np.all(loads >= 0.0):  # also refuses NaN
        raise ValueError(f"a load is {loads[~(loads >= 0.0)].flat[0]} Erlang: give 0 or more")
    blocked = np.empty(loads.shape)
    with np.errstate(divide="ignore", over="ignore"):
        for count in set(counts.ravel().tolist()):
            at = counts == count
            steps = np.arange(count, 0, -1)
            blocked[at] = 1.0 / (1.0 + np.cumprod(steps / loads[at][:, None], axis=1).sum(axis=1))
    return blocked


def erlang_c(servers: ArrayLike, busy_frac: ArrayLike) -> Floats:
    """Share of jobs that must wait, C(R, rho): Eq. 2 of the paper. It is 1 where rho is 1 or more.

    The printed Eq. 2 lacks brackets: its last term belongs to the denominator, beside the sum. Read as printed, the
    result can be above 1. Here C = B / (1 - rho (1 - B)), which is the same as the formula with its brackets.
    ``busy_frac``: rho, the load over the servers.
    """
    counts, busy = np.broadcast_arrays(np.asarray(servers, dtype=np.int64), np.asarray(busy_frac, dtype=np.float64))
    is_stable = busy < 1.0
    below_1 = np.where(is_stable, busy, 0.0)
    blocked = erlang_b(counts, counts * below_1)
    return np.where(is_stable, blocked / (1.0 - below_1 * (1.0 - blocked)), 1.0)


def wait_in_services(servers: ArrayLike, busy_frac: ArrayLike) -> Floats:
    """Mean wait of M/M/R as a multiple of the service time, W_v / T_v: Eq. 1. Infinite where rho is 1 or more.

    Eq. 1 is C / (R mu - lambda), which is T C / (R (1 - rho)).
    """
    counts, busy = np.broadcast_arrays(np.asarray(servers, dtype=np.int64), np.asarray(busy_frac, dtype=np.float64))
    spare = np.where(busy < 1.0, 1.0 - busy, 0.0)
    with np.errstate(divide="ignore"):
        multiples: Floats = erlang_c(counts, busy) / (counts * spare)
    return multiples


def deterministic_wait_in_services(servers: ArrayLike, busy_frac: ArrayLike) -> Floats:
    """Mean wait of M/D/R as a multiple of the service time: all services take equally long.

    One server waits exactly half of M/M/1 (Pollaczek and Khinchine). For more servers this is Cosmetatos'
    approximation: half of M/M/R times 1 + (1 - rho) (R - 1) (sqrt(4 + 5 R) - 2) / (16 rho R).
    At a low rho this factor is too large. There the wait is that for the first of R servers to end; its mean is
    T / (R + 1) against T / R in M/M/R. So R / (R + 1) of M/M/R is the upper bound.
    Source: G. Cosmetatos, Some approximate equilibrium results for the multiserver queue M/G/r, Operational Research
    Quarterly 27 (1976). Error against a simulation: tests/autoscale/operators/test_queueing.py.
    """
    counts, busy = np.broadcast_arrays(np.asarray(servers, dtype=np.float64), np.asarray(busy_frac, dtype=np.float64))
    with np.errstate(divide="ignore", invalid="ignore"):
        bracket = (1.0 - busy) * (counts - 1.0) * (np.sqrt(4.0 + 5.0 * counts) - 2.0) / (16.0 * busy * counts)
    factor = 0.5 * (1.0 + np.where(busy > 0.0, bracket, np.inf))
    factor = np.where(counts == 1.0, 0.5, np.minimum(factor, counts / (counts + 1.0)))
    return np.where(busy >= 1.0, np.inf, factor * wait_in_services(counts.astype(np.int64), busy))


# Mean wait as a multiple of the service time, by servers and busy share.
WaitRule = Callable[[ArrayLike, ArrayLike], Floats]
WAITS: Mapping[str, WaitRule] = MappingProxyType(
    {"exponential": wait_in_services, "deterministic": deterministic_wait_in_services}
)


def wait_s(servers: ArrayLike, arrivals_per_s: ArrayLike, service_s: ArrayLike, rule: WaitRule) -> Floats:
    """Mean wait W_v in seconds of batches that arrive at ``arrivals_per_s``, each served for ``service_s``.

    The arrival rate is that of batches: passes per second over the batch size (``batch_rate``).
    """
    service = np.asarray(service_s, dtype=np.float64)
    busy = np.asarray(arrivals_per_s, dtype=np.float64) * service / np.asarray(servers, dtype=np.float64)
    # No service takes no time: 0 x infinity would be NaN.
    return np.where(service > 0.0, service * rule(servers, busy), 0.0)


def batch_rate(passes_per_s: float, batch: ArrayLike) -> Floats:
    """Batches per second: lambda of an operator whose batches have ``batch`` requests (section 3, queueing)."""
    return passes_per_s / np.asarray(batch, dtype=np.float64)


def least_stable_servers(arrivals_per_s: ArrayLike, service_s: ArrayLike) -> NDArray[np.int64]:
    """The fewest servers with a busy share below 1: Algorithm 1, line 4, but one more where the quotient is whole."""
    load = np.asarray(arrivals_per_s, dtype=np.float64) * np.asarray(service_s, dtype=np.float64)
    return np.maximum(np.floor(load).astype(np.int64) + 1, 1)


def fill_s(passes_per_s: float, batch: float) -> float:
    """Mean time that a request waits until its batch of ``batch`` is full, seconds: (b - 1) / (2 lambda).

    Half of the time between the first and the last arrival of a batch. The paper leaves it out.
    """
    return (batch - 1.0) / (2.0 * passes_per_s) if batch > 1.0 else 0.0
