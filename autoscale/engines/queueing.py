"""Waiting times for one of c servers: Erlang-B, Erlang-C, M/M/c, and G/G/c by its variation (pure).

Sources: D. Gross, J. F. Shortle, J. M. Thompson, C. M. Harris, "Fundamentals of Queueing Theory", 4th ed., 2008,
chapter 2, for M/M/c and Erlang's loss formula; other formulas name their own source.
"""

import math
from collections.abc import Callable, Iterator
from itertools import islice


def erlang_b(servers: int, offered_erlangs: float) -> float:
    """Share of arrivals that find all servers busy, without a queue: ``B(c, a)``.

    ``B(0) = 1, B(c) = a B(c-1) / (c + a B(c-1))``: without powers and factorials, so it is as exact for 10,000 servers
    as for one.

    Args:
        servers: c.
        offered_erlangs: mean number of busy servers, if one is always free (a = lambda / mu).

    Raises:
        ValueError: servers below 0, or a load that is negative or not finite.

    Source: A. K. Erlang, "Solution of some problems in the theory of probabilities", 1917.
    """
    _check("servers", servers, servers >= 0, "0 or more")
    _check_offered(offered_erlangs)
    return next(islice(_blocked(offered_erlangs), servers, None))


def erlang_c(servers: int, offered_erlangs: float) -> float:
    """Share of arrivals that wait in M/M/c, first come first served: ``C = c B / (c - a (1 - B))``.

    Args:
        servers: c.
        offered_erlangs: a, below c.

    Raises:
        ValueError: servers below 1, a load that is negative or not finite, or one that the servers cannot carry.

    Source: as ``erlang_b``.
    """
    _check_carried(servers, offered_erlangs)
    return _waiting(servers, offered_erlangs, erlang_b(servers, offered_erlangs))


def mean_wait_s(servers: int, *, arrivals_per_s: float, served_per_s: float) -> float:
    """Mean time before service in M/M/c, over all requests: ``C / (c mu - lambda)``.

    Args:
        servers: c.
        arrivals_per_s: lambda.
        served_per_s: requests per second of one server (mu).

    Raises:
        ValueError: as ``erlang_c``, or nothing is served.
    """
    offered = _offered(arrivals_per_s, served_per_s)
    return erlang_c(servers, offered) / ((servers - offered) * served_per_s)


def wait_quantile_s(quantile_frac: float, servers: int, *, arrivals_per_s: float, served_per_s: float) -> float:
    """The time that a share of the requests of M/M/c waits at most, from ``P(W > t) = C exp(-(c mu - lambda) t)``.

    Args:
        quantile_frac: that share, 0.95 for the 95th percentile; below 1, as no wait is the longest possible.
        servers: c.
        arrivals_per_s: lambda.
        served_per_s: requests per second of one server (mu).

    Raises:
        ValueError: as ``mean_wait_s``, or a share outside 0 to 1.
    """
    _check("quantile_frac", quantile_frac, 0.0 <= quantile_frac < 1.0, "0 or more and below 1")
    offered = _offered(arrivals_per_s, served_per_s)
    waiting = erlang_c(servers, offered)
    if waiting <= 1.0 - quantile_frac:
        return 0.0
    return math.log(waiting / (1.0 - quantile_frac)) / ((servers - offered) * served_per_s)


def servers_for_mean_wait(wait_s: float, *, arrivals_per_s: float, served_per_s: float) -> int:
    """The fewest servers of M/M/c whose mean wait is no longer.

    Args:
        wait_s: objective, above 0: at 0 no number would do.
        arrivals_per_s: lambda.
        served_per_s: requests per second of one server (mu).

    Raises:
        ValueError: an argument is out of its bounds.
    """
    _check("wait_s", wait_s, 0.0 < wait_s < math.inf, "above 0 and finite")
    offered = _offered(arrivals_per_s, served_per_s)
    return _fewest(offered, lambda waiting, spare: waiting <= wait_s * spare * served_per_s)


def servers_for_wait_quantile(
    wait_s: float, quantile_frac: float, *, arrivals_per_s: float, served_per_s: float
) -> int:
    """The fewest servers of M/M/c at which at least a share of the requests waits no longer.

    Args:
        wait_s: objective; at 0 that share does not wait at all.
        quantile_frac: that share, 0.95 for a 95th percentile; below 1.
        arrivals_per_s: lambda.
        served_per_s: requests per second of one server (mu).

    Raises:
        ValueError: an argument is out of its bounds.
    """
    _check("wait_s", wait_s, 0.0 <= wait_s < math.inf, "0 or more and finite")
    _check("quantile_frac", quantile_frac, 0.0 <= quantile_frac < 1.0, "0 or more and below 1")
    offered = _offered(arrivals_per_s, served_per_s)
    return _fewest(
        offered,
        lambda waiting, spare: waiting * math.exp(-spare * served_per_s * wait_s) <= 1.0 - quantile_frac,
    )


def general_mean_wait_s(
    servers: int, *, arrivals_per_s: float, served_per_s: float, arrivals_scv: float, service_scv: float
) -> float:
    """Mean time before service in G/G/c, about: that of M/M/c, times ``(c_a^2 + c_s^2) / 2``.

    Exact for M/M/c and for M/G/1 (Pollaczek-Khinchine); the better, the busier the servers. It knows nothing of
    arrivals that depend on those before them: bursts that last make it far too low.

    Args:
        servers: c.
        arrivals_per_s: lambda.
        served_per_s: requests per second of one server (mu).
        arrivals_scv: variance of the time between arrivals over its squared mean (c_a^2): 1 for Poisson.
        service_scv: the same of service times (c_s^2): 1 for exponential, 0 for equal ones.

    Raises:
        ValueError: as ``mean_wait_s``, or a variation that is negative or not finite.

    Source: J. F. C. Kingman, "The single server queue in heavy traffic", 1961, for one server; A. O. Allen,
        "Probability, Statistics, and Queueing Theory", 2nd ed., 1990, for several (Allen-Cunneen).
    """
    for name, scv in (("arrivals_scv", arrivals_scv), ("service_scv", service_scv)):
        _check(name, scv, 0.0 <= scv < math.inf, "0 or more and finite")
    exponential_s = mean_wait_s(servers, arrivals_per_s=arrivals_per_s, served_per_s=served_per_s)
    return exponential_s * (arrivals_scv + service_scv) / 2


def _blocked(offered_erlangs: float) -> Iterator[float]:
    """``B(0), B(1), ...``."""
    blocked, servers = 1.0, 0
    while True:
        yield blocked
        servers += 1
        blocked = offered_erlangs * blocked / (servers + offered_erlangs * blocked)


def _waiting(servers: int, offered_erlangs: float, blocked: float) -> float:
    return servers * blocked / (servers - offered_erlangs + offered_erlangs * blocked)


def _fewest(offered_erlangs: float, is_enough: Callable[[float, float], bool]) -> int:
    """``is_enough`` is given the share that waits and the servers that are idle on average; more only help."""
    for servers, blocked in enumerate(_blocked(offered_erlangs)):
        if servers > offered_erlangs:
            waiting = _waiting(servers, offered_erlangs, blocked)
            if is_enough(waiting, servers - offered_erlangs):
                return servers
    raise AssertionError("there is no last number of servers")


def _offered(arrivals_per_s: float, served_per_s: float) -> float:
    _check("arrivals_per_s", arrivals_per_s, 0.0 <= arrivals_per_s < math.inf, "0 or more and finite")
    _check("served_per_s", served_per_s, 0.0 < served_per_s < math.inf, "above 0 and finite")
    return arrivals_per_s / served_per_s


def _check_offered(offered_erlangs: float) -> None:
    _check("offered_erlangs", offered_erlangs, 0.0 <= offered_erlangs < math.inf, "0 or more and finite")


def _check_carried(servers: int, offered_erlangs: float) -> None:
    _check("servers", servers, servers >= 1, "1 or more")
    _check_offered(offered_erlangs)
    if offered_erlangs >= servers:
        raise ValueError(
            f"{servers} servers are offered {offered_erlangs:.6g} erlangs, and their queue would grow without end: "
            f"give at least {math.floor(offered_erlangs) + 1}"
        )


def _check(name: str, value: float, is_good: bool, expected: str) -> None:
    if not is_good:
        raise ValueError(f"{name} is {value:g}: give {expected}")
