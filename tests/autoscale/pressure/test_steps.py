"""Laws of one step of a pressure test."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscale.pressure.steps import Step, Tally, Verdict, is_surely_bad, least_requests, longest_s, verdict
from autoscale.report import RequestRecord
from autoscale.slo import SloConfig
from autoscale.traces.trace import TraceRequest
from tests.autoscale.pressure.factories import result


@given(st.integers(0, 400), st.integers(0, 400))
def test_more_missed_requests_never_make_a_step_better(one: int, other: int) -> None:
    order = [Verdict.GOOD, Verdict.UNCLEAR, Verdict.BAD]
    few, many = sorted((one, other))
    step = Step(prefill=1, decode=1, requests_per_s=1.0)
    ranks = [order.index(verdict([result(step, missed=missed)], 0.95, 10)) for missed in (few, many)]
    assert ranks == sorted(ranks)


def test_a_step_with_too_many_errors_is_bad_even_if_enough_requests_meet_their_objectives() -> None:
    step = Step(prefill=1, decode=1, requests_per_s=1.0)
    assert verdict([result(step, requests=4000, missed=11, failed=11)], 0.95, 10) is Verdict.BAD
    assert verdict([result(step, requests=4000, missed=10, failed=10)], 0.95, 10) is Verdict.GOOD


@pytest.mark.parametrize("quantile_frac", [0.5, 0.9, 0.95, 0.99])
def test_the_fewest_requests_without_a_miss_are_clearly_good(quantile_frac: float) -> None:
    step = Step(prefill=1, decode=1, requests_per_s=1.0)
    requests = least_requests(quantile_frac)
    assert verdict([result(step, requests=requests)], quantile_frac, 0) is Verdict.GOOD
    if requests > 1:
        assert verdict([result(step, requests=requests - 1)], quantile_frac, 0) is not Verdict.GOOD


@given(st.integers(20, 1000), st.data())
def test_a_step_that_is_cut_short_as_surely_bad_is_never_judged_otherwise(requests: int, data: st.DataObject) -> None:
    missed = data.draw(st.integers(0, requests))
    if is_surely_bad(requests, missed, 0.95):
        later = data.draw(st.integers(missed, requests))
        step = Step(prefill=1, decode=1, requests_per_s=1.0)
        assert verdict([result(step, requests=requests, missed=later)], 0.95, requests) is Verdict.BAD


SLO = SloConfig(ttft_s=1.0, ttft_s_per_input_token=0.001, tpot_s=0.1)


def record(request: TraceRequest, ttft_s: float | None, tpot_s: float = 0.1, error: str | None = None) -> RequestRecord:
    first_s = None if ttft_s is None else request.at_s + ttft_s
    last_s = None if first_s is None else first_s + tpot_s * (request.output_tokens - 1)
    return RequestRecord(
        sent_s=request.at_s,
        first_token_s=first_s,
        last_token_s=last_s,
        input_tokens=request.input_tokens,
        output_tokens=request.output_tokens,
        error=error,
    )


def test_a_tally_counts_only_requests_after_the_first_seconds_each_by_its_own_objective() -> None:
    early, short, long = (
        TraceRequest(at_s=at_s, input_tokens=tokens, output_tokens=11)
        for at_s, tokens in ((1.0, 10), (11.0, 10), (12.0, 3000))
    )
    tally = Tally([early, short, long], SLO, 10.0)
    assert (tally.requests, tally.end_s) == (2, pytest.approx(12.0 + 3.0 + 1.0))
    tally.add(early, record(early, None, error="HTTP 500"))
    assert (tally.missed(10.0), tally.failed, tally.succeeded) == (0, 1, 0)
    tally.add(short, record(short, 1.5))
    assert tally.missed(12.0) == 1
    tally.add(long, record(long, 2.9))
    assert tally.missed(math.inf) == 1


def test_a_request_without_an_answer_has_missed_once_it_cannot_meet_its_objectives_any_more() -> None:
    request = TraceRequest(at_s=20.0, input_tokens=10, output_tokens=11)
    tally = Tally([request], SLO, 10.0)
    limit_s = 20.0 + longest_s(SLO, 10, 11)
    assert (tally.missed(limit_s - 0.1), tally.missed(limit_s + 0.1)) == (0, 1)
