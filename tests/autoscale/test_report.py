"""Laws of the report."""

import pytest

from autoscale.report import Report, RequestRecord, Slo


def record(
    sent_s: float, first_s: float | None, last_s: float | None, tokens: int = 5, error: str | None = None
) -> RequestRecord:
    return RequestRecord(
        sent_s=sent_s, first_token_s=first_s, last_token_s=last_s, input_tokens=10, output_tokens=tokens, error=error
    )


def test_hand_computed_run() -> None:
    records = [record(0.0, 0.1, 0.5), record(1.0, 1.3, 2.1), record(2.0, None, None, error="HTTP 500")]
    report = Report.of(records, [Slo(ttft_s=0.2, tpot_s=0.15)] * 3)
    assert (report.requests_ok, report.requests_failed) == (2, 1)
    assert report.duration_s == pytest.approx(2.1)
    # TTFTs 0.1 and 0.3, TPOTs 0.4 / 4 and 0.8 / 4.
    assert report.ttft_s["p50"] == pytest.approx(0.2)
    assert report.tpot_s["p50"] == pytest.approx(0.15)
    assert report.output_tokens_per_s == pytest.approx(10 / 2.1)
    assert report.slo_attainment_frac == pytest.approx(1 / 3)
    assert report.goodput_requests_per_s == pytest.approx(1 / 2.1)
    assert report.errors == {"HTTP 500": 1}


def test_a_single_token_has_no_tpot_and_only_ttft_counts() -> None:
    single = record(0.0, 0.1, 0.1, tokens=1)
    assert single.tpot_s is None
    assert Slo(ttft_s=0.2, tpot_s=0.0001).is_met(single)


def test_a_failed_request_never_meets_its_objective() -> None:
    assert not Slo(ttft_s=9.0, tpot_s=9.0).is_met(record(0.0, 0.1, 0.2, error="cut off"))


@pytest.mark.parametrize(("records", "slos"), [([], None), ([record(0.0, 0.1, 0.2)], [])])
def test_unusable_input_is_refused(records: list[RequestRecord], slos: list[Slo] | None) -> None:
    with pytest.raises(ValueError, match=r"request|objectives"):
        Report.of(records, slos)


def test_a_run_without_success_has_no_quantiles() -> None:
    report = Report.of([record(0.0, None, None, error="ClientError")])
    assert report.ttft_s == {}
    assert report.goodput_requests_per_s is None
