"""The row that a drill makes from the answers of two runs, and the nodes on which it puts an application."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from serve_app.checks.yaml_checks import load_serve_yaml
from tests.lab.drill.apis import Answer
from tests.lab.drill.drill import compare, failures, on_two_parts
from tests.lab.drill.faults import FAULTS, DrillError
from tests.lab.drill.verdict import VERDICTS

CONFIG = Path(__file__).parent / "tiny.yaml"


def answer(*ids: int, ended: bool = True, **fields: Any) -> Answer:
    return Answer(token_ids=list(ids), is_ended=ended, ttft_s=0.1, **fields)


def compared(fault: str, before: list[Answer], after: list[Answer]) -> dict[str, Any]:
    return compare(fault, before, after, broke_s=(10.0, 10.1), output_tokens=len(before[0].token_ids))


def test_every_token_of_every_answer_counts() -> None:
    row = compared("kill-decode", [answer(1, 2, 3)] * 3, [answer(1, 2, 3), answer(1, 2, 4), answer(1, 2)])
    assert {name: row[name] for name in VERDICTS} == {
        name: int(name in ("wrong_tokens", "truncated")) for name in VERDICTS
    }
    assert row["requests"] == 3


def test_a_stream_is_cut_at_the_front_only_if_the_front_was_broken() -> None:
    cut = answer(1, ended=False, is_cut=True, error="ClientPayloadError", span_s=(9.0, 11.0))
    assert compared("kill-ingress", [answer(1, 2)], [cut])["cut_at_front"] == 1
    assert compared("kill-decode", [answer(1, 2)], [cut])["lost"] == 1
    error = answer(1, ended=False, error="the decode replica was lost", span_s=(9.0, 11.0))
    assert compared("kill-ingress", [answer(1, 2)], [error])["lost"] == 1


def test_added_latency_is_between_the_runs_and_retries_add_up() -> None:
    before = [Answer(is_ended=True, ttft_s=0.1, gap_s=0.01)] * 100
    after = [Answer(is_ended=True, ttft_s=0.1, gap_s=0.01)] * 98
    after += [Answer(is_ended=True, ttft_s=2.1, gap_s=1.01, retries=2)] * 2
    row = compared("kill-ingress", before, after)
    assert math.isclose(row["added_ttft_p99_s"], 2.0)
    assert math.isclose(row["added_gap_p99_s"], 1.0)
    assert row["retried"] == 4


def test_answers_that_never_came_have_no_latency() -> None:
    row = compared("kill-decode", [answer(1)], [Answer(error="HTTP 500")])
    assert row["added_ttft_p99_s"] is None
    assert json.loads(json.dumps(row, allow_nan=False))["lost"] == 1


def test_text_of_any_length_may_be_right_but_an_empty_one_is_not() -> None:
    row = compare("kill-decode", [Answer(text="a b", is_ended=True)], [Answer(text="a", is_ended=True)], (10.0, 10.1))
    assert (row["truncated"], row["failed_undisturbed"]) == (1, 0)
    assert row["errors"] == {"1 characters of 3": 1}
    row = compare("kill-decode", [Answer(text="", is_ended=True)], [Answer(text="", is_ended=True)], (10.0, 10.1))
    assert row["failed_undisturbed"] == 1


def test_requests_in_flight_at_the_fault_are_counted() -> None:
    spans = [(1.0, 9.9), (9.0, 10.0), (10.0, 20.0), (10.1, 20.0)]
    row = compared("kill-decode", [answer(1)] * 4, [answer(1, span_s=span) for span in spans])
    assert row["in_flight_at_fault"] == 2


def test_errors_that_differ_by_a_request_id_are_of_one_kind() -> None:
    ids = ("24e504a6-3ca1-4d15-900f-2908f56025de", "7ca7a9a0-148e-4f5b-ae0c-34eeda24fabe")
    failed = [answer(ended=False, error=f"HTTP 500 (Request ID: {one})") for one in ids]
    assert compared("kill-decode", [answer(1)] * 2, failed)["errors"] == {"HTTP 500 (Request ID: ...)": 2}


@pytest.mark.parametrize("undisturbed", [answer(1, 2, 3, ended=False), answer(1, 2), answer()])
def test_an_answer_is_not_judged_by_an_undisturbed_one_that_failed(undisturbed: Answer) -> None:
    row = compare("kill-decode", [undisturbed], [answer(1, 2, 3)], broke_s=(10.0, 10.1), output_tokens=3)
    assert row["failed_undisturbed"] == 1
    assert not any(row[name] for name in VERDICTS)


# Counters of a drill whose fault met requests; without one of them the drill shows nothing.
SHOWN = {
    "kill-controller": {},
    "expire-lease": {"kv_late": 2},
    "break-nixl": {"link_failures": 4, "link_repairs": 1},
    "hang-decode": {"resumed": 1},
    "hang-prefill": {"prefill_failures": 1},
    "kill-ingress": {"retried": 1},
    "node-loss": {"retried": 1},
}


def fine(fault: str) -> dict[str, Any]:
    row = compared(fault, [answer(1)], [answer(1, span_s=(9.0, 11.0))])
    counted = dict.fromkeys(("kv_late", "prefill_failures", "link_failures", "link_repairs"), 0)
    return {**row, "recovered_s": 0.1, "held": {}, **counted, **SHOWN[fault]}


@pytest.mark.parametrize("fault", SHOWN)
@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"lost": 1}, "lost: 1 of 1"),
        ({"failed_undisturbed": 1}, "failed undisturbed"),
        ({"recovered_s": None}, "not whole again"),
        ({"held": {"kv_usage_frac": 0.1}}, "still held"),
        ({"in_flight_at_fault": 0}, "no request was in flight"),
    ],
)
def test_a_row_with_a_fault_fails_a_drill(fault: str, wrong: dict[str, Any], text: str) -> None:
    assert failures(fine(fault)) == []
    (line,) = failures({**fine(fault), **wrong})
    assert text in line


@pytest.mark.parametrize(
    ("fault", "nothing", "text"),
    [
        ("expire-lease", "kv_late", "no KV came late"),
        ("break-nixl", "link_failures", "no KV was to come"),
        ("break-nixl", "link_repairs", "over no link again"),
        ("hang-decode", "resumed", "no stream was with"),
        ("hang-prefill", "prefill_failures", "no prompt was with"),
        ("kill-ingress", "retried", "no request was with"),
        ("node-loss", "retried", "no stream was with"),
    ],
)
def test_a_drill_that_shows_nothing_fails(fault: str, nothing: str, text: str) -> None:
    (line,) = failures({**fine(fault), nothing: 0})
    assert text in line


def test_answers_may_be_lost_if_everything_dies_but_nothing_that_a_person_has_set() -> None:
    row = compared("kill-everything", [answer(1)], [answer(1, ended=False, error="HTTP 503", span_s=(9.0, 11.0))])
    row |= {"recovered_s": 40.0, "held": {}, "retried": 1, "lost": 1}
    by_hand = {"paused": True, "scaled": [2, 2], "tuned": 77.0, "cordoned": ["n"]}
    assert failures({**row, "settings": by_hand, "settings_after": by_hand}) == []
    (line,) = failures({**row, "settings": by_hand, "settings_after": {**by_hand, "paused": False}})
    assert line.startswith("set by hand: ")
    (line,) = failures({**row, "settings": {}, "settings_after": {}})  # no coordinator has answered
    assert line.startswith("set by hand: ")
    (line,) = failures({**row, "settings": by_hand, "settings_after": by_hand, "wrong_tokens": 1})
    assert line == "wrong tokens: 1 of 1"


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
def test_a_fault_without_a_process_to_break_is_an_error(fault: str) -> None:
    with pytest.raises(DrillError, match="no "):
        FAULTS[fault]([])
