"""The ratios and objectives that the peer benchmark computes from its measurements (no stack is started here)."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autoscale.report import Report, RequestRecord, Slo
from tests.lab.bench.peers import STACKS, _ratios, _slo, _write, answers
from tests.serve_app.fake_endpoint import FakeEndpoint, refuse

CELLS = [cell + suffix for cell in ("short", "long", "mix") for suffix in ("", "_c8")]
FIGURES = ("ttft", "tpot", "throughput", "goodput")
# Each ratio: the cell, the figure and the peer, without and with _c8.
RATIOS = {
    "short_ttft_p50_over_ray_pd": ("short", "ttft", "ray_pd"),
    "short_ttft_p50_over_ray_pd_fastest": ("short", "ttft", "ray_pd_fastest"),
    "short_ttft_p50_over_vllm": ("short", "ttft", "vllm"),
    "long_ttft_p50_over_ray_pd": ("long", "ttft", "ray_pd"),
    "long_throughput_over_ray_pd": ("long", "throughput", "ray_pd"),
    "tpot_p50_over_vllm": ("short", "tpot", "vllm"),
    "mix_goodput_over_ray_pd": ("mix", "goodput", "ray_pd"),
    "mix_goodput_over_ray_pd_fastest": ("mix", "goodput", "ray_pd_fastest"),
}
SLOS = {"input_tokens": [16.0, 64.0, 256.0], "ttft_p50_s": [0.1, 0.3, 0.7], "tpot_p50_s": [0.01, 0.03, 0.02]}

Round = dict[str, Any]


def cell(*, ttft: float = 1.0, tpot: float = 1.0, throughput: float = 1.0, goodput: float = 1.0) -> dict[str, Any]:
    """A report with these medians and rates; no other quantile counts."""
    return Report(
        requests_ok=1,
        requests_failed=0,
        duration_s=1.0,
        ttft_s={"p50": ttft, "p90": -1.0, "p99": -1.0},
        tpot_s={"p50": tpot, "p90": -1.0, "p99": -1.0},
        output_tokens_per_s=throughput,
        requests_per_s=-1.0,
        slo_attainment_frac=-1.0,
        goodput_requests_per_s=goodput,
        errors={},
    ).as_dict()


def one_round(**stacks: dict[str, float]) -> Round:
    """A round in which every cell of a stack has these figures."""
    return {stack: {name: cell(**stacks.get(stack, {})) for name in CELLS} for stack in STACKS}


def failed() -> dict[str, Any]:
    """The report of a stack that answered nothing."""
    record = RequestRecord(
        sent_s=0.0, first_token_s=None, last_token_s=None, input_tokens=1, output_tokens=2, error="HTTP 500"
    )
    return Report.of([record], [Slo(ttft_s=1.0, tpot_s=1.0)]).as_dict()


def constant(token: str) -> None:
    raise AssertionError(f"{token} is not JSON")


def test_every_ratio_is_of_its_own_cell_figure_and_peer() -> None:
    numbers = {key: 2.0 + n for n, key in enumerate(itertools.product(STACKS, CELLS, FIGURES))}
    measured = {
        stack: {name: cell(**{figure: numbers[stack, name, figure] for figure in FIGURES}) for name in CELLS}
        for stack in STACKS
    }
    expected = {
        key + suffix: numbers["tandem", name + suffix, figure] / numbers[peer, name + suffix, figure]
        for key, (name, figure, peer) in RATIOS.items()
        for suffix in ("", "_c8")
    }
    assert _ratios([measured]) == {
        key: {"median": ratio, "min": ratio, "max": ratio} for key, ratio in expected.items()
    }


def test_median_is_of_the_ratios_of_the_rounds() -> None:
    # Ratios 1/4, 4/2 and 9/3; the ratio of the medians would be 4/3.
    rounds = [one_round(tandem={"ttft": a}, ray_pd={"ttft": b}) for a, b in ((1.0, 4.0), (9.0, 3.0), (4.0, 2.0))]
    assert _ratios(rounds)["short_ttft_p50_over_ray_pd"] == {"median": 2.0, "min": 0.25, "max": 3.0}


def test_peer_without_goodput_gives_null_if_the_ratio_is_infinite() -> None:
    none, some = one_round(ray_pd={"goodput": 0.0}), one_round(ray_pd={"goodput": 0.5})
    assert _ratios([none])["mix_goodput_over_ray_pd"] == {"median": None, "min": None, "max": None}
    assert _ratios([none, some, some])["mix_goodput_over_ray_pd"] == {"median": 2.0, "min": 2.0, "max": None}
    assert _ratios([none])["mix_goodput_over_ray_pd_fastest"]["median"] == 1.0


@pytest.mark.parametrize(("peer", "ratio"), [(0.0, 1.0), (2.0, 0.0)])
def test_goodput_0_of_ours_gives_ratio_0_and_1_if_the_peer_has_none_either(peer: float, ratio: float) -> None:
    measured = one_round(tandem={"goodput": 0.0}, ray_pd={"goodput": peer})
    assert _ratios([measured])["mix_goodput_over_ray_pd_c8"]["median"] == ratio


@pytest.mark.parametrize("stack", ["tandem", "ray_pd"])
def test_stack_that_answered_nothing_in_one_round_has_no_latency_ratio(stack: str) -> None:
    broken = one_round()
    broken[stack] = dict.fromkeys(CELLS, failed())
    ratios = _ratios([one_round(), broken, one_round()])
    assert ratios["long_ttft_p50_over_ray_pd"] == {"median": None, "min": None, "max": None}
    assert ratios["long_throughput_over_ray_pd"]["median"] == 1.0


@pytest.mark.parametrize(
    ("input_tokens", "ttft_s", "tpot_s"),
    [
        (16, 0.3, 0.02),
        (40, 0.6, 0.04),  # half way: 3 x 0.2 and 2 x 0.02
        (64, 0.9, 0.06),
        (160, 1.5, 0.05),
        (1, 0.3, 0.02),  # outside the measured lengths: the nearest one
        (4096, 2.1, 0.04),
    ],
)
def test_objective_is_3_times_ttft_and_2_times_tpot_of_the_length(
    input_tokens: int, ttft_s: float, tpot_s: float
) -> None:
    record = RequestRecord(
        sent_s=0.0, first_token_s=None, last_token_s=None, input_tokens=input_tokens, output_tokens=2
    )
    slo = _slo(record, SLOS)
    assert (slo.ttft_s, slo.tpot_s) == (pytest.approx(ttft_s), pytest.approx(tpot_s))


def test_written_report_is_strict_json_whatever_failed(tmp_path: Path) -> None:
    out = tmp_path / "new" / "report.json"
    rounds = [one_round(ray_pd={"goodput": 0.0, "throughput": 0.0})]
    rounds[0]["vllm"] = dict.fromkeys(CELLS, failed())
    _write(out, rounds, SLOS)
    report = json.loads(out.read_text(), parse_constant=constant)
    assert set(report) == {"machine", "stacks", "cells", "slos", "ratios", "rounds"}
    assert (report["slos"], report["rounds"], report["ratios"]) == (SLOS, rounds, _ratios(rounds))


def test_stack_is_up_once_a_completion_succeeds(make_endpoint: Callable[..., FakeEndpoint], dead_url: str) -> None:
    assert answers(make_endpoint().url)
    assert not answers(make_endpoint(refuse(503)).url)
    assert not answers(dead_url)
