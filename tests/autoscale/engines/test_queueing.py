"""Queueing formulas: values from textbooks, and the sums that they are defined by."""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscale.engines.queueing import (
    erlang_b,
    erlang_c,
    general_mean_wait_s,
    mean_wait_s,
    servers_for_mean_wait,
    servers_for_wait_quantile,
    wait_quantile_s,
)


def b_by_definition(servers: int, offered: Fraction) -> Fraction:
    """(a^c / c!) / sum of a^n / n!, in fractions."""
    terms = [offered**n / math.factorial(n) for n in range(servers + 1)]
    return terms[-1] / sum(terms)


def c_by_definition(servers: int, offered: Fraction) -> Fraction:
    terms = [offered**n / math.factorial(n) for n in range(servers + 1)]
    last = terms[-1] * servers / (servers - offered)
    return last / (sum(terms[:-1]) + last)


@pytest.mark.parametrize(
    ("servers", "offered", "expected"),
    [
        (0, 3.0, 1.0),
        (1, 1.0, 1 / 2),
        (2, 1.0, 1 / 5),
        (3, 2.0, 4 / 19),
        (5, 3.0, 0.11005),
        (10, 5.0, 0.01838),
        (1, 0, 0),
    ],
)
def test_erlang_b_of_the_tables(servers: int, offered: float, expected: float) -> None:
    assert erlang_b(servers, offered) == pytest.approx(expected, abs=5e-6)  # five places are printed


@pytest.mark.parametrize(
    ("servers", "offered", "expected"), [(1, 0.7, 0.7), (2, 1.0, 1 / 3), (3, 2.0, 4 / 9), (4, 0.0, 0.0)]
)
def test_erlang_c_by_hand(servers: int, offered: float, expected: float) -> None:
    assert erlang_c(servers, offered) == pytest.approx(expected)


@given(st.integers(1, 120), st.fractions(0, 1, max_denominator=1000))
def test_recursions_equal_their_definitions(servers: int, busy: Fraction) -> None:
    offered = busy * servers
    assert erlang_b(servers, float(offered)) == pytest.approx(float(b_by_definition(servers, offered)), rel=1e-11)
    if busy < 1:
        # 1e-13 for the rounding of c - a, at most 1000 times as much as that of a.
        assert erlang_c(servers, float(offered)) == pytest.approx(float(c_by_definition(servers, offered)), rel=1e-10)


def test_many_servers_neither_overflow_nor_lose_digits() -> None:
    # a^c / c! has overflowed long ago; at a = c, B is sqrt(2 / (pi c)) but for a share of 1 / sqrt(c) (Jagerman, 1974).
    assert erlang_b(100_000, 100_000.0) == pytest.approx(math.sqrt(2 / (math.pi * 100_000)), rel=0.003)
    # c = a + beta sqrt(a) (Halfin and Whitt, 1981): C is 1 / (1 + beta Phi / phi), 0.2234 at beta = 1.
    assert erlang_c(100_316, 100_000.0) == pytest.approx(0.2234, abs=0.001)


def test_the_eye_clinic() -> None:
    """Six patients an hour, three doctors, 20 minutes each: 8/9 wait, 4/27 h long (Gross and Harris, chapter 2)."""
    hourly = {"arrivals_per_s": 6 / 3600, "served_per_s": 3 / 3600}
    assert mean_wait_s(3, **hourly) == pytest.approx(4 / 27 * 3600)
    assert mean_wait_s(3, **hourly) * hourly["arrivals_per_s"] == pytest.approx(8 / 9)  # Little


def test_the_call_centre() -> None:
    """360 calls in half an hour of 4 minutes, 55 agents: 0.239 wait, 8.2 s on average, 84.6 % at most 15 s (Mitan)."""
    calls = {"arrivals_per_s": 360 / 1800, "served_per_s": 1 / 240}
    assert erlang_c(55, 48.0) == pytest.approx(0.239, abs=5e-4)
    assert mean_wait_s(55, **calls) == pytest.approx(8.2, abs=0.05)
    assert wait_quantile_s(0.8459, 55, **calls) == pytest.approx(15.0, abs=0.2)
    assert servers_for_wait_quantile(15.0, 0.8, **calls) == 55
    assert servers_for_mean_wait(8.2, **calls) == 55


def test_one_server_by_hand() -> None:
    # M/M/1 at 0.8: rho / (mu - lambda) = 4 s; P(W > t) = 0.8 exp(-0.2 t).
    one = {"arrivals_per_s": 0.8, "served_per_s": 1.0}
    assert mean_wait_s(1, **one) == pytest.approx(4.0)
    assert wait_quantile_s(0.9, 1, **one) == pytest.approx(math.log(8.0) / 0.2)
    assert wait_quantile_s(0.2, 1, **one) == 0.0  # as many as do not wait
    assert wait_quantile_s(0.0, 1, **one) == 0.0


@given(st.integers(1, 200), st.floats(0.05, 0.99), st.floats(0.01, 100.0), st.floats(0.5, 0.999))
def test_a_quantile_is_where_its_tail_is_left_and_more_servers_shorten_it(
    servers: int, busy: float, served: float, quantile: float
) -> None:
    load = {"arrivals_per_s": busy * servers * served, "served_per_s": served}
    wait_s = wait_quantile_s(quantile, servers, **load)
    tail = erlang_c(servers, busy * servers) * math.exp(-(1.0 - busy) * servers * served * wait_s)
    assert tail <= (1.0 - quantile) * (1 + 1e-9)
    assert wait_s == 0.0 or tail == pytest.approx(1.0 - quantile)
    assert wait_quantile_s(quantile, servers + 1, **load) <= wait_s
    assert mean_wait_s(servers + 1, **load) < mean_wait_s(servers, **load)


@given(st.floats(0.0, 60.0), st.floats(0.01, 100.0), st.floats(0.0, 5.0), st.floats(0.0, 0.999))
def test_the_fewest_servers_are_enough_and_one_fewer_is_not(
    offered: float, served: float, services: float, quantile: float
) -> None:
    load = {"arrivals_per_s": offered * served, "served_per_s": served}
    wait_s = services / served
    found = servers_for_wait_quantile(wait_s, quantile, **load)
    assert wait_quantile_s(quantile, found, **load) <= wait_s * (1 + 1e-9)
    if found > 1 and offered * served / served < found - 1:
        assert wait_quantile_s(quantile, found - 1, **load) > wait_s * (1 - 1e-9)
    mean_s = max(wait_s, 1e-3 / served)
    found = servers_for_mean_wait(mean_s, **load)
    assert mean_wait_s(found, **load) <= mean_s * (1 + 1e-9)
    if found > 1 and offered * served / served < found - 1:
        assert mean_wait_s(found - 1, **load) > mean_s * (1 - 1e-9)


def test_nobody_needs_at_least_one_server() -> None:
    assert servers_for_mean_wait(1.0, arrivals_per_s=0.0, served_per_s=1.0) == 1
    assert servers_for_wait_quantile(0.0, 0.0, arrivals_per_s=3.0, served_per_s=1.0) == 4  # stable, no more is asked


@pytest.mark.parametrize(
    ("servers", "arrivals", "scv", "expected"),
    [
        (1, 0.8, (1.0, 1.0), 4.0),  # M/M/1
        (1, 0.8, (1.0, 0.0), 2.0),  # M/D/1 waits half as long (Pollaczek-Khinchine)
        (1, 0.8, (1.0, 4.0), 10.0),  # M/G/1: (1 + 4) / 2 times as long
        (1, 0.8, (0.5, 0.5), 2.0),  # Kingman: 0.8 / 0.2 x (0.5 + 0.5) / 2
        (1, 0.8, (0.0, 0.0), 0.0),
        (3, 2.0, (0.5, 1.5), 4 / 9),  # Allen-Cunneen: C is 4/9, c mu - lambda is 1, the variation that of M/M/3
        (3, 2.0, (1.0, 0.0), 2 / 9),
    ],
)
def test_variation_by_hand(servers: int, arrivals: float, scv: tuple[float, float], expected: float) -> None:
    found = general_mean_wait_s(
        servers, arrivals_per_s=arrivals, served_per_s=1.0, arrivals_scv=scv[0], service_scv=scv[1]
    )
    assert found == pytest.approx(expected)


LOAD = {"arrivals_per_s": 2.0, "served_per_s": 1.0}


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: erlang_b(-1, 1.0), r"servers is -1: give 0 or more"),
        (lambda: erlang_b(1, -1.0), r"offered_erlangs is -1: give 0 or more and finite"),
        (lambda: erlang_b(1, math.nan), r"offered_erlangs is nan"),
        (lambda: erlang_c(0, 0.0), r"servers is 0: give 1 or more"),
        (lambda: erlang_c(2, 2.0), r"2 servers are offered 2 erlangs.*give at least 3"),
        (lambda: erlang_c(2, 7.5), r"give at least 8"),
        (lambda: mean_wait_s(2, **LOAD), r"would grow without end"),
        (lambda: mean_wait_s(2, arrivals_per_s=-1.0, served_per_s=1.0), r"arrivals_per_s is -1"),
        (lambda: mean_wait_s(2, arrivals_per_s=1.0, served_per_s=0.0), r"served_per_s is 0: give above 0"),
        (lambda: wait_quantile_s(1.0, 3, **LOAD), r"quantile_frac is 1: give 0 or more and below 1"),
        (lambda: wait_quantile_s(0.5, 1, **LOAD), r"give at least 3"),
        (lambda: servers_for_mean_wait(0.0, **LOAD), r"wait_s is 0: give above 0"),
        (lambda: servers_for_wait_quantile(-1.0, 0.9, **LOAD), r"wait_s is -1"),
        (lambda: servers_for_wait_quantile(1.0, 1.0, **LOAD), r"quantile_frac is 1"),
        (lambda: general_mean_wait_s(3, arrivals_scv=-0.1, service_scv=1.0, **LOAD), r"arrivals_scv is -0\.1"),
        (lambda: general_mean_wait_s(3, arrivals_scv=1.0, service_scv=math.inf, **LOAD), r"service_scv is inf"),
        (lambda: general_mean_wait_s(2, arrivals_scv=1.0, service_scv=1.0, **LOAD), r"give at least 3"),
    ],
)
def test_what_cannot_be_is_refused(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()
