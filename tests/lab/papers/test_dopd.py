"""DOPD's claims: those that need no long run, and laws of the experiments behind the others."""

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from autoscale.report import Slo
from kvtransfer.topology import Role
from tests.lab.papers import dopd
from tests.lab.papers.dopd_testbed import (
    HIGH_REQUESTS_PER_S,
    KEYS,
    LOW_REQUESTS_PER_S,
    MEMORY_TP2,
    SLO,
    START_S,
    Steady,
    closed_loop,
    day,
    engine,
    jumps,
)

P, D = Role.PREFILL, Role.DECODE
ENGINES = {role: engine(role) for role in Role}


def test_both_ratios_come_out_of_table_1() -> None:
    claims = list(islice(dopd.claims(), 2))
    assert [claim.ours for claim in claims] == ["4.56 (-0.4%)", "3.18 (-0.0%)"]
    assert all(claim.is_reproduced for claim in claims)
    # Table I ends at 1,700 tokens, and only the second claim needs more.
    assert ["beyond Table I" in claim.assumption for claim in claims] == [False, True]


def test_a_ratio_that_is_off_is_not_reproduced() -> None:
    assert not dopd.ratio_claim(1000, 150, 4.2).is_reproduced


def test_an_engine_has_the_times_of_table_1_and_the_kv_of_equation_11() -> None:
    for profile in ENGINES.values():
        assert profile.prefill.seconds_for(1200) == 0.193
        assert profile.decode.seconds_for(200, 700) == 0.047
        assert 0 <= MEMORY_TP2.room_bytes - profile.kv_tokens * 327_680 < 16 * 327_680
    assert [ENGINES[role].gpus for role in Role] == [1, 2]
    assert [START_S[role] for role in Role] == [30.0, 45.0]


def test_too_few_prefill_replicas_serve_one_prompt_after_the_other() -> None:
    steady = closed_loop(ENGINES, {P: 2, D: 1}, [(1000, 150)], 96)
    # Two replicas, 0.1658 s for a prompt (Table I, between 700 and 1,200 tokens).
    assert steady.requests_per_s == pytest.approx(2 / 0.1658, rel=0.01)
    assert steady.prefill_busy_frac == pytest.approx(1.0, abs=0.01)
    assert steady.violations_frac(SLO) == 1.0
    assert steady.goodput_requests_per_s(SLO) == 0.0


def test_the_given_number_of_requests_is_in_flight() -> None:
    steady = closed_loop(ENGINES, {P: 4, D: 1}, [(1000, 150)], 40)
    stays_s = float(np.mean([(r.last_token_s or 0.0) - r.sent_s for r in steady.sent]))
    assert steady.requests_per_s * stays_s == pytest.approx(40, rel=0.02)  # Little's law
    assert steady.violations_frac(SLO) == 0.0
    assert steady.goodput_requests_per_s(SLO) == pytest.approx(steady.requests_per_s, rel=0.02)
    assert steady == closed_loop(ENGINES, {P: 4, D: 1}, [(1000, 150)], 40)


def test_aggregated_engines_need_no_prefill_replicas() -> None:
    steady = closed_loop({D: ENGINES[D]}, {D: 1}, [(1000, 150)], 16)
    assert all(record.prefilled_s is None for record in steady.sent)
    assert steady.prefill_busy_frac == 0.0


@pytest.mark.parametrize(
    ("rates", "busy", "is_reproduced"),
    [
        ((6.0, 12.0, 18.0, 24.0, 27.0, 27.1), (1.0, 1.0, 1.0, 1.0, 0.9, 0.8), True),
        ((6.0, 12.0, 18.0, 20.0, 26.0, 27.1), (1.0, 1.0, 1.0, 1.0, 0.9, 0.8), False),  # bends before
        ((6.0, 12.0, 18.0, 24.0, 24.1, 27.1), (1.0, 1.0, 1.0, 1.0, 0.9, 0.8), False),  # rises again
        ((6.0, 12.0, 18.0, 24.0, 25.0, 25.0), (1.0, 1.0, 1.0, 1.0, 0.9, 0.8), False),  # 4.17 is 9 % below
        ((6.0, 12.0, 18.0, 24.0, 27.0, 27.1), (1.0, 1.0, 1.0, 1.0, 1.0, 0.8), False),  # the fifth is not idle
    ],
)
def test_a_knee_is_where_rates_bend_and_prefill_idles(
    rates: tuple[float, ...], busy: tuple[float, ...], is_reproduced: bool
) -> None:
    served = [Steady(sent=(), requests_per_s=r, prefill_busy_frac=b) for r, b in zip(rates, busy, strict=True)]
    assert dopd.knee_claim(1000, 150, 4.58, served).is_reproduced is is_reproduced


def test_prefill_replicas_beyond_the_ratio_serve_no_more() -> None:
    low, high = (dopd.best("", {P: n, D: 1}, (3000, 300), levels=(160,)) for n in (1, 5))
    assert high.requests_per_s / low.requests_per_s == pytest.approx(3.18, rel=0.08)
    assert high.prefill_busy_frac < 0.7


def test_the_best_goodput_is_at_less_than_the_best_throughput() -> None:
    lengths = (1000, 150)
    most = dopd.best("", {P: 2, D: 1}, lengths, levels=(32, 96))
    inside = dopd.best("", {P: 2, D: 1}, lengths, slo=SLO, levels=(32, 96))
    assert most.requests_per_s > inside.requests_per_s
    assert inside.goodput_requests_per_s(SLO) > most.goodput_requests_per_s(SLO)
    assert inside.violations_frac(Slo(ttft_s=1e-3, tpot_s=1.0)) == 1.0


def test_azure_gives_five_rows_that_fit_the_table() -> None:
    lines: list[str] = []
    claims = list(dopd.azure_claims(lines.append, levels=(72, 112)))
    assert len(claims) == 5
    assert [claim.source for claim in claims] == ["DOPD Fig. 7"] * 5
    assert lines
    for claim in claims:
        assert len(claim.what) <= 50
        assert max(len(claim.claimed), len(claim.ours)) <= 60
        assert len(claim.assumption) <= 160
    # Prompts on a decoding engine slow its tokens down; in a pool of their own they do not.
    assert claims[-1].ours.endswith("%)")
    assert "(-" in claims[-1].ours


def test_the_day_has_its_stated_rates_gaps_and_lengths() -> None:
    trace = day(0)
    at_s = np.array([request.at_s for request in trace])
    first, peak = (np.sum((at_s >= s) & (at_s < s + 300.0)) / 300.0 for s in (0.0, 1650.0))
    # Means of the sine over a twelfth of its period, around its lowest and its highest point.
    assert first == pytest.approx(4.45, rel=0.1)
    assert peak == pytest.approx(23.9, rel=0.05)
    gaps_s = np.diff(at_s[(at_s >= 1650.0) & (at_s < 1950.0)])
    assert np.std(gaps_s) / np.mean(gaps_s) == pytest.approx(2**0.5, rel=0.05)
    assert np.mean([request.input_tokens for request in trace]) == pytest.approx(755, rel=0.02)
    assert np.mean([request.output_tokens for request in trace]) == pytest.approx(200, rel=0.02)
    assert trace == day(0)
    assert trace != day(1)
    assert all(a.at_s == b.at_s for a, b in zip(day(0, 100.0), trace, strict=False))


def test_jumps_are_as_uneven_as_the_days_gaps() -> None:
    gaps_s = np.diff([request.at_s for request in jumps(0, 20_000.0)])
    assert np.std(gaps_s) / np.mean(gaps_s) == pytest.approx(2**0.5, rel=0.1)  # the trace has 65 states
    assert 1.0 / np.mean(gaps_s) == pytest.approx((LOW_REQUESTS_PER_S + HIGH_REQUESTS_PER_S) / 2, rel=0.1)


def test_a_row_of_bursts_is_decided_by_its_runs() -> None:
    # The first 750 s of the day, from 4 to 12 requests/s: planners that look every 180 s come too late.
    claim = dopd.bursts_claim("a morning", lambda seed: day(seed, 750.0), "", lambda line: None, seeds=(0,))
    shares = [float(part.split()[1]) for part in claim.ours.split(", ")]
    assert claim.is_reproduced == (shares[0] > shares[1] > shares[2] and shares[0] - shares[1] >= 10.0)
    assert shares[0] > 95.0
    assert shares[0] - max(shares[1:]) >= 10.0


def test_policies_start_with_one_of_each_and_never_hold_more_than_eight_gpus() -> None:
    trace = [replace(request, at_s=request.at_s / 4) for request in day(0, 600.0)]
    run = dopd.scaled("dopd", trace)
    lives = run.fleet.lives
    assert sorted(str(life.key.role) for life in lives if life.requested_s == 0.0) == ["decode", "prefill"]
    edges = sorted({life.requested_s for life in lives})
    for at_s in edges:
        here = [life for life in lives if life.requested_s <= at_s and (life.gone_s is None or life.gone_s > at_s)]
        assert sum(run.scenario.pools[life.key].gpus_per_replica for life in here) <= 8
    assert {life.key for life in lives} == set(KEYS.values())
    assert len(lives) > 2
