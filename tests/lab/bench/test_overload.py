"""The requests of the overload benchmark, and the figures of their answers (no application is started here)."""

import pytest
import typer
from typer.testing import CliRunner

from autoscale.report import RequestRecord, Slo
from serve_app.checks.yaml_checks import parse_app_config
from tests.lab.bench.overload import ENGINES, _is_saturated, arrivals, document, figures, main

SLO = Slo(ttft_s=1.0, tpot_s=0.05)
CORES = {"proxy": 0.1, "ingress": 0.2, "client": 0.3}


def record(sent_s: float, *, ttft_s: float = 0.5, error: str | None = None, answered_s: float = 0.01) -> RequestRecord:
    first_s = None if error else sent_s + ttft_s
    return RequestRecord(
        sent_s=sent_s,
        first_token_s=first_s,
        last_token_s=first_s,
        input_tokens=10,
        output_tokens=1,
        error=error,
        answered_s=sent_s + answered_s,
    )


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("is_on", [False, True])
def test_both_applications_are_the_same_but_for_their_objectives(name: str, is_on: bool) -> None:
    config = parse_app_config(document(ENGINES[name], is_on=is_on)["applications"][0]["args"])
    assert not config.is_autoscaled
    assert config.ingress.replicas == 2
    assert config.ingress.admission.ttft_s == (ENGINES[name].slo.ttft_s if is_on else None)
    assert config.ingress.admission.tpot_s == (ENGINES[name].slo.tpot_s if is_on else None)


@pytest.mark.parametrize("name", ENGINES)
def test_requests_arrive_at_the_given_rate_and_fit_the_engine(name: str) -> None:
    sent = arrivals(ENGINES[name], 10.0, seed=1)
    assert len(sent) == pytest.approx(600, abs=75)  # three standard deviations
    assert max(one.input_tokens + one.output_tokens for one in sent) <= ENGINES[name].most_tokens
    assert sent == arrivals(ENGINES[name], 10.0, seed=1)


def test_goodput_is_of_the_measured_time_and_refusals_are_no_failures() -> None:
    row = figures(
        SLO,
        2.0,
        [
            record(19.0),  # the warm-up
            *(record(20.0 + number) for number in range(8)),
            record(30.0, ttft_s=1.5),
            record(31.0, error="HTTP 429", answered_s=0.01),
            record(32.0, error="HTTP 429", answered_s=0.2),
            record(33.0, error="HTTP 500"),
            record(60.0),  # sent too late
        ],
        CORES,
    )
    assert (row["requests"], row["sent_per_s"]) == (12, 12 / 40.0)
    assert row["goodput_requests_per_s"] == 8 / 40.0
    assert (row["refused"], row["refused_within_50_ms"]) == (2, 1)
    assert row["failed"] == {"HTTP 500": 1}
    assert row["ingress_cores"] == 0.2


@pytest.mark.parametrize(
    ("rates", "is_saturated"),
    [
        ([(2.0, 1.9)], False),
        ([(2.0, 1.7)], True),  # more than a tenth is missed
        ([(2.0, 1.9), (2.6, 2.5)], False),
        ([(2.0, 1.9), (2.6, 2.3)], True),
        ([(2.6, 2.5), (2.7, 2.55)], True),  # hardly more goodput
    ],
)
def test_a_rate_is_beyond_saturation_if_a_tenth_misses_or_goodput_hardly_rises(
    rates: list[tuple[float, float]], is_saturated: bool
) -> None:
    rows = [{"requests": rate * 40.0, "goodput_requests_per_s": goodput} for rate, goodput in rates]
    assert _is_saturated(rows) is is_saturated


def test_unknown_engines_are_wrong_usage() -> None:
    command = typer.Typer()
    command.command()(main)
    assert CliRunner().invoke(command, ["--only", "bogus"]).exit_code == 2
