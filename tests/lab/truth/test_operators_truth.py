"""The comparison with engines counts what it says, and its committed figures hold."""

from statistics import fmean

import pytest

from autoscale.operators.step_times import SYNC_HOST
from tests.lab.truth.operator_steps import fitted_host, held_out_errors
from tests.lab.truth.operators_truth import (
    CLOSED_CASES,
    OPEN_CASES,
    RUNS,
    Case,
    Request,
    closed_loop,
    closed_rows,
    load_requests,
    measured_figures,
    open_loop,
    profile_of,
    replayed,
)

LLAMA = "llama-3.1-70b"


def request(arrival_s: float, first_s: float, last_s: float, output_tokens: int = 11) -> Request:
    return Request(
        timestamp_s=arrival_s,
        input_tokens=100,
        output_tokens=output_tokens,
        first_token_s=first_s,
        last_token_s=last_s,
    )


def test_figures_are_a_mean_and_a_median() -> None:
    found = measured_figures([request(0.0, 1.0, 2.0), request(1.0, 4.0, 7.0), request(2.0, 12.0, 17.0)])
    assert found.tpot_mean_s == pytest.approx((0.1 + 0.3 + 0.5) / 3)  # rounding
    assert found.ttft_p50_s == 3.0


def test_a_lone_request_takes_a_prompt_and_its_steps() -> None:
    profile = profile_of(OPEN_CASES[0], {"max_batch_tokens": 2048, "max_running": 4, "longest_tokens": 2048})
    (alone,) = replayed(profile, [request(5.0, 0.0, 0.0)])
    assert alone.first_token_s - 5.0 == pytest.approx(profile.prefill.seconds_for(100))
    steps_s = sum(profile.decode.seconds_for(1, 100 + done) for done in range(10))
    assert alone.last_token_s - alone.first_token_s == pytest.approx(steps_s)


def test_all_measured_rows_are_used() -> None:
    assert [len(load_requests(RUNS / f"rtx-pro-6000_{case.model}_requests.csv.gz")) for case in OPEN_CASES] == [
        300,
        300,
    ]
    rows = {(case.model, case.gpu, case.parallel): len(closed_rows(case)) for case in CLOSED_CASES}
    assert sum(rows.values()) == 135


@pytest.mark.parametrize("case", OPEN_CASES, ids=lambda case: case.model)
def test_open_loop_runs_are_within_their_targets(case: Case) -> None:
    found = open_loop(case)
    assert abs(found["tpot_error_frac"]) <= 0.05
    assert abs(found["ttft_p50_error_frac"]) <= 0.10


@pytest.mark.parametrize("kv_dtype", ["fp8", "bf16"])
def test_the_30_points_of_the_h100_are_within_their_target(kv_dtype: str) -> None:
    cases = [case for case in CLOSED_CASES if (case.model, case.gpu, case.kv_dtype) == (LLAMA, "H100", kv_dtype)]
    found = [closed_loop(case) for case in cases]
    assert [each["points"] for each in found] == [15, 15]
    assert fmean(each["tpot_mape_frac"] for each in found) <= 0.08


@pytest.mark.parametrize("case", CLOSED_CASES[4:], ids=lambda case: f"{case.gpu}-{case.model}-{case.parallel}")
def test_held_out_gpus_and_models_are_near(case: Case) -> None:
    # The target of the H100, on GPUs and a model on which no constant was chosen.
    assert closed_loop(case)["tpot_mape_frac"] <= 0.08


def test_the_host_of_a_synchronous_engine_is_what_its_steps_leave() -> None:
    found = fitted_host()
    assert found.step_s == pytest.approx(SYNC_HOST.step_s, rel=0.05)
    assert found.request_s == pytest.approx(SYNC_HOST.request_s, rel=0.15)


def test_steps_of_a_small_model_on_which_nothing_was_chosen_are_near() -> None:
    assert fmean(abs(error) for _, _, error in held_out_errors()) <= 0.12
