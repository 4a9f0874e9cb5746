"""Figures of the day on a cluster that grows, from samples and requests that are known."""

from dataclasses import replace
from pathlib import Path

import pytest

from autoscale.report import RequestRecord, Slo
from kvtransfer.topology import Role
from tests.lab.demo.elastic import day
from tests.lab.demo.elastic_figures import Day, Sample, Wake, plot

PRICES = {"cheapest": 1.0, "spot": 2.0, "reserved": 8.0}
NONE = dict.fromkeys(Role, 0)


def sample(at_s: float, refused: tuple[str, ...] = (), **nodes: int) -> Sample:
    return Sample(at_s=at_s, nodes=nodes, serving=NONE, planned=NONE, refused=refused)


def record(error: str | None = None) -> RequestRecord:
    return RequestRecord(sent_s=1.0, first_token_s=2.0, last_token_s=3.0, input_tokens=1, output_tokens=3, error=error)


WAKES = (
    Wake(at_s=5.0, before="at zero", ttft_s=7.0, error=None),
    Wake(at_s=50.0, before="asleep", ttft_s=0.5, error=None),
)
DAY = Day(
    day_s=240.0,
    records=[record()] * 4,
    slos=[Slo(ttft_s=2.0, tpot_s=1.0)] * 4,
    samples=[
        sample(0.0),
        sample(10.0, spot=1),
        sample(20.0, ("cheapest",), spot=2, reserved=1),
        sample(30.0, ("cheapest",)),
        sample(250.0),
    ],
    wakes=WAKES,
    notice_s=(15.0, 45.0),
    prices=PRICES,
)


def test_nodes_cost_what_they_cost_for_as_long_as_they_are_there() -> None:
    # A second of this day is a tenth of an hour.
    assert DAY.cost() == pytest.approx(10.0 * 0.1 * 2.0 + 10.0 * 0.1 * (2 * 2.0 + 8.0))
    assert DAY.fixed_cost() == pytest.approx(3 * 8.0 * 24.0)
    assert DAY.ended_s("cheapest") == 20.0
    assert DAY.figures()["given_back_s"] == 10.0
    assert DAY.complaints() == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"records": [record(), record("HTTP 500")], "slos": [Slo(ttft_s=2.0, tpot_s=1.0)] * 2}, "requests were lost"),
        ({"wakes": (replace(WAKES[0], error="HTTP 500"), WAKES[1])}, "the rare model were lost"),
        ({"wakes": WAKES[1:]}, "while it was at zero"),
        ({"wakes": WAKES[:1]}, "while it was asleep"),
        ({"samples": [sample(0.0, ("cheapest",), spot=1)] * 2}, "not given back: {'spot': 1}"),
        ({"samples": [sample(0.0, spot=1), sample(1.0)]}, "was not given up"),
        ({"samples": [sample(0.0, ("cheapest",), reserved=1), sample(1.0)]}, "no spot node"),
        ({"notice_s": None}, "no node was taken away"),
        ({"notice_s": (15.0, None)}, "no node was taken away"),
    ],
)
def test_what_the_day_did_not_show_is_said(changes: dict[str, object], words: str) -> None:
    (complaint,) = replace(DAY, **changes).complaints()  # type: ignore[arg-type]
    assert words in complaint


def test_the_table_and_the_picture(tmp_path: Path) -> None:
    rows = dict(DAY.rows())
    assert rows["requests, lost"] == "4, 0"
    assert rows["rare model, at zero"] == "first token after 7.0 s"
    assert rows["spot node"] == "notice at 15 s, gone after 30 s"
    plot(DAY, tmp_path / "day.png")
    assert (tmp_path / "day.png").stat().st_size > 10_000


def test_the_day_begins_in_its_quietest_hours() -> None:
    trace = day(240.0)
    assert [one.at_s for one in trace] == sorted(one.at_s for one in trace)
    assert trace[0].at_s >= 0.0
    assert trace[-1].at_s < 240.0
    quarters = [sum(int(one.at_s // 60.0) == number for one in trace) for number in range(4)]
    assert quarters[0] < quarters[2] / 2
