"""The figures of a replica's report by name."""

from dataclasses import fields

from autoscale.observe import report_window
from autoscale.observe.replica_report import ReplicaReport
from autoscale.observe.request_stats import RequestStats

NAMES = {field.name for field in fields(ReplicaReport)}
EMPTY = {field.name: 0 for field in fields(ReplicaReport)}


def test_no_two_figures_have_one_name() -> None:
    requests = RequestStats(lambda: 1.0)
    timer = requests.begin(0.0, 5, is_streamed=True)
    timer.add_tokens(1)
    requests.begin(0.0, 5, is_streamed=True)
    own = requests.report()
    assert not NAMES & own.keys()
    assert ReplicaReport(**EMPTY).values(requests) == {**EMPTY, **own}


def test_figures_that_were_not_observed_are_left_out() -> None:
    assert "handoffs" not in ReplicaReport(**{**EMPTY, "handoffs": None}).values()


def test_a_snapshot_shows_gauges_by_the_names_that_replicas_report() -> None:
    shown = {*report_window._GAUGES, *report_window._AVERAGED}
    assert {*shown, "decode_tokens", "prefill_tokens", "handoffs", "handoff_s"} <= NAMES
