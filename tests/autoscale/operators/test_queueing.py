"""Erlang's formulas, against factorials and simulations."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscale.operators.queueing import (
    WAITS,
    batch_rate,
    deterministic_wait_in_services,
    erlang_b,
    erlang_c,
    fill_s,
    least_stable_servers,
    wait_in_services,
    wait_s,
)
from tests.autoscale.operators.network_sim import chain_latency_s, deterministic, exponential

EXPONENTIAL = WAITS["exponential"]


def test_erlang_c_by_hand() -> None:
    """Two servers at a load of 1 Erlang: a^2/2!/(1 - 1/2) = 1, the sum is 1 + 1, so C = 1 / (2 + 1).

    Three servers at 2 Erlang: 8/6 / (1/3) = 4, the sum is 1 + 2 + 2, so C = 4/9, and W = T (4/9) / (3 x 1/3).
    """
    assert erlang_c(2, 0.5) == pytest.approx(1 / 3, rel=1e-14)
    assert erlang_c(3, 2 / 3) == pytest.approx(4 / 9, rel=1e-14)
    assert wait_in_services(3, 2 / 3) == pytest.approx(4 / 9, rel=1e-14)
    assert wait_s(3, 20.0, 0.1, EXPONENTIAL) == pytest.approx(0.1 * 4 / 9, rel=1e-14)


def test_the_printed_fraction_is_no_probability() -> None:
    """Eq. 2 without its brackets is 1/2 + 1 for the first example: a share above 1."""
    wanted = 1 / 2 / (1 - 0.5)
    printed = wanted / (1 + 1) + wanted
    assert printed == 1.5
    assert erlang_c(2, 0.5) == pytest.approx(wanted / (1 + 1 + wanted), rel=1e-14)


def _by_factorials(servers: int, busy: float) -> float:
    load = servers * busy
    last = load**servers / math.factorial(servers) / (1 - busy)
    return last / (sum(load**k / math.factorial(k) for k in range(servers)) + last)


@given(servers=st.integers(1, 40), busy=st.floats(0.0, 0.999))
def test_recurrence_is_the_formula(servers: int, busy: float) -> None:
    assert erlang_c(servers, busy) == pytest.approx(_by_factorials(servers, busy), rel=1e-9, abs=1e-300)


@given(servers=st.integers(1, 200), busy=st.floats(0.01, 0.98), rule=st.sampled_from(sorted(WAITS)))
def test_waits_rise_with_load_and_fall_with_servers(servers: int, busy: float, rule: str) -> None:
    wait = WAITS[rule]
    assert 0.0 <= wait(servers, busy) <= wait(servers, busy + 0.01)
    assert wait(servers + 1, busy) <= wait(servers, busy) * (1 + 1e-12)


@given(busy=st.floats(0.0, 0.99))
def test_one_server_waits_as_known(busy: float) -> None:
    assert wait_in_services(1, busy) == pytest.approx(busy / (1 - busy), rel=1e-12)
    assert deterministic_wait_in_services(1, busy) == pytest.approx(busy / (1 - busy) / 2, rel=1e-12)


def test_thousands_of_servers_are_finite_and_a_table_is_one_call() -> None:
    waits = wait_in_services(np.array([5000, 5000, 1])[:, None], np.array([0.5, 0.99, 0.999]))
    assert waits.shape == (3, 3)
    assert np.isfinite(waits).all()
    # Halfin and Whitt, with beta = (1 - rho) sqrt(R) = 0.7071: C = 1 / (1 + beta Phi(beta) / phi(beta)) = 0.3663.
    assert erlang_c(5000, 0.99) == pytest.approx(
        0.3663, rel=0.02
    )  # a limit for many servers; error of order 1 / sqrt(R)


def test_unstable_queues_wait_for_ever_and_bad_input_is_refused() -> None:
    for rule in WAITS.values():
        assert rule(3, 1.0) == math.inf
        assert rule(3, 7.0) == math.inf
    assert wait_s(2, 10.0, 0.0, EXPONENTIAL) == 0.0
    assert wait_s(2, 0.0, 0.3, EXPONENTIAL) == 0.0
    with pytest.raises(ValueError, match="0 servers"):
        erlang_b(0, 1.0)
    with pytest.raises(ValueError, match="nan Erlang"):
        erlang_b(1, math.nan)


def test_arrivals_are_those_of_batches() -> None:
    assert batch_rate(12.0, np.array([1, 4])).tolist() == [12.0, 3.0]
    assert least_stable_servers(12.0, np.array([0.1, 0.25, 0.0])).tolist() == [2, 4, 1]  # 12 x 0.25 = 3 needs a fourth
    assert fill_s(10.0, 5) == pytest.approx(0.2)  # four arrivals of 0.1 s each, half of them on average
    assert fill_s(0.0, 1) == 0.0


@pytest.mark.parametrize(("servers", "busy"), [(1, 0.7), (3, 0.8), (8, 0.9)])
def test_formulas_are_those_of_the_simulated_queue(servers: int, busy: float) -> None:
    """Means of 200,000 jobs. Tolerance: five standard errors of repeated runs, and 5 % of Cosmetatos' error."""
    for service, rule in ((exponential, "exponential"), (deterministic, "deterministic")):
        latency_s = chain_latency_s(
            rate_per_s=servers * busy, means_s=[1.0], servers=[servers], service=service, jobs=200_000, seed=3
        )
        assert latency_s - 1.0 == pytest.approx(float(WAITS[rule](servers, busy)), rel=0.08)


def test_exponential_waits_are_twice_too_long_for_kernels() -> None:
    """Kernels of one size take the same time each. Then M/M/R says twice the wait that a simulation has.

    In a chain it is even less: what leaves a queue with fixed services comes more evenly than a Poisson process.
    """
    chain = {"rate_per_s": 12.0, "means_s": [0.1, 0.04], "servers": [2, 1], "jobs": 100_000, "seed": 5}
    exact = chain_latency_s(service=exponential, **chain)  # type: ignore[arg-type]
    fixed = chain_latency_s(service=deterministic, **chain)  # type: ignore[arg-type]
    waits = {name: float(wait_s(2, 12.0, 0.1, rule) + wait_s(1, 12.0, 0.04, rule)) for name, rule in WAITS.items()}
    assert exact - 0.14 == pytest.approx(waits["exponential"], rel=0.05)  # Jackson: exact but for the sample
    assert waits["deterministic"] == pytest.approx(waits["exponential"] / 2, rel=0.06)
    assert fixed - 0.14 < waits["deterministic"]
    assert fixed - 0.14 > 0.7 * waits["deterministic"]


def test_fixed_services_at_a_low_load_wait_for_the_first_of_them_to_end() -> None:
    """All R servers are busy: the first fixed service ends after T / (R + 1) on average, against T / R in M/M/R."""
    for servers in (1, 3, 10):
        share = deterministic_wait_in_services(servers, 0.01) / wait_in_services(servers, 0.01)
        assert share == pytest.approx(0.5 if servers == 1 else servers / (servers + 1), rel=1e-9)
