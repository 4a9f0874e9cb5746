"""What a drill says of the answers that it compares, and how it lays an application out."""

import math
from pathlib import Path
from typing import Any

import pytest

from serve_app.drill import compare, on_two_parts
from serve_app.drill_faults import FAULTS, DrillError
from serve_app.drill_load import Answer
from serve_app.validate import load_serve_yaml

CONFIG = Path(__file__).parents[2] / "configs" / "drill_tiny.yaml"


def answer(*ids: int, ended: bool = True, **fields: Any) -> Answer:
    return Answer(token_ids=list(ids), is_ended=ended, ttft_s=0.1, **fields)


@pytest.mark.parametrize(
    ("got", "verdict"),
    [
        (answer(1, 2, 3), None),
        (answer(1, 2), "truncated"),
        (answer(), "truncated"),
        (answer(1, 2, 2, 3), "duplicated"),
        (answer(1, 2, 4), "wrong_tokens"),
        (answer(2, 3), "wrong_tokens"),
        (answer(1, 2, 3, ended=False), "lost"),
        (answer(1, 2, ended=False, is_cut=True), "lost"),
    ],
)
def test_every_token_of_every_answer_counts(got: Answer, verdict: str | None) -> None:
    row = compare("kill-decode", [answer(1, 2, 3)] * 2, [answer(1, 2, 3), got])
    told = ("lost", "duplicated", "truncated", "wrong_tokens", "cut_at_front")
    assert {name: row[name] for name in told} == {name: int(name == verdict) for name in told}
    assert row["requests"] == 2


def test_a_stream_is_cut_at_the_front_only_where_the_front_was_broken() -> None:
    cut = answer(1, ended=False, is_cut=True, error="ClientPayloadError")
    assert compare("kill-ingress", [answer(1, 2)], [cut])["cut_at_front"] == 1
    assert compare("kill-decode", [answer(1, 2)], [cut])["lost"] == 1
    error = answer(1, ended=False, error="the decode replica was lost")
    assert compare("kill-ingress", [answer(1, 2)], [error])["lost"] == 1


def test_added_latency_is_between_the_runs_and_retries_add_up() -> None:
    before = [Answer(is_ended=True, ttft_s=0.1, gap_s=0.01)] * 100
    after = [Answer(is_ended=True, ttft_s=0.1, gap_s=0.01)] * 98
    after += [Answer(is_ended=True, ttft_s=2.1, gap_s=1.01, retries=2)] * 2
    row = compare("kill-ingress", before, after)
    assert math.isclose(row["added_ttft_p99_s"], 2.0)
    assert math.isclose(row["added_gap_p99_s"], 1.0)
    assert row["retried"] == 4


def test_errors_that_differ_by_a_request_id_are_of_one_kind() -> None:
    ids = ("24e504a6-3ca1-4d15-900f-2908f56025de", "7ca7a9a0-148e-4f5b-ae0c-34eeda24fabe")
    failed = [answer(ended=False, error=f"HTTP 500 (Request ID: {one})") for one in ids]
    assert compare("kill-decode", [answer(1)] * 2, failed)["errors"] == {"HTTP 500 (Request ID: ...)": 2}


def test_an_undisturbed_run_that_fails_is_told() -> None:
    assert compare("kill-decode", [answer(ended=False)], [answer()])["failed_undisturbed"] == 1


def test_the_endpoint_and_the_engines_are_on_different_nodes() -> None:
    document = load_serve_yaml(CONFIG)
    document["applications"][0]["args"]["ingress"]["api_keys_file"] = "/keys"  # the drill's client has none
    args = on_two_parts(document)["applications"][0]["args"]
    assert args["ingress"]["node_labels"] == {"tandem.io/part": "front"}
    assert "api_keys_file" not in args["ingress"]
    for role in ("prefill", "decode"):
        assert args["groups"][0][role]["placement"]["node_labels"] == {"tandem.io/part": "engines"}
        assert args["groups"][0][role]["replicas"] == 2
    assert "node_labels" not in document["applications"][0]["args"]["ingress"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_finds_nothing_to_break_says_so(fault: str) -> None:
    with pytest.raises(DrillError, match="no "):
        FAULTS[fault]([])
