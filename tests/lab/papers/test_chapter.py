"""The figures of the queue-depth chapter, from our policy in the chapter's loop."""

from collections.abc import Mapping

import numpy as np
import pytest

from tests.lab.papers.chapter import STARTS_S, Row, as_printed, chapter_rows, claims, simulate, startup_rows

ByName = Mapping[str, Row]


@pytest.fixture(scope="module")
def table() -> ByName:
    return {row.name: row for row in chapter_rows()}


@pytest.fixture(scope="module")
def by_start() -> Mapping[int, ByName]:
    return {start_s: {row.name: row for row in rows} for start_s, rows in startup_rows().items()}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Output 23.4.1.
        ("reactive", ("33.29", 5034, 8214)),
        ("headroom", ("7.71", 1157, 9657)),
        ("predictive", ("0.00", 66, 7557)),
        # Other rows of our policy in that loop.
        ("printed law", ("27.78", 4936, 13651)),
        ("reactive without 1e-9", ("35.03", 6666, 8629)),
    ],
)
def test_the_table_is_that_of_the_chapter(table: ByName, name: str, expected: tuple[str, float, float]) -> None:
    assert as_printed(table[name]) == expected


def test_every_claim_is_reproduced_but_that_law_and_code_agree() -> None:
    deviating = [claim for claim in claims() if not claim.is_reproduced]
    assert [claim.source for claim in deviating] == ["queue-depth chapter, section 23.4.2"]


def test_the_printed_law_needs_two_thirds_more_replicas_for_fewer_violations(table: ByName) -> None:
    law, code = table["printed law"], table["reactive"]
    assert law.violations_frac < code.violations_frac
    assert law.replica_seconds / code.replica_seconds == pytest.approx(1.66, abs=0.01)


@pytest.mark.parametrize(
    ("start_s", "reactive", "headroom", "predictive"),
    [
        # Code 23.4.1 as printed, with another STARTUP_S.
        (5, ("12.26", 1203, 6765), ("0.00", 0, 9272), ("0.00", 66, 7321)),
        (60, ("59.57", 13716, 15414), ("23.67", 13165, 19298), ("4.85", 633, 8640)),
        (120, ("58.82", 4003, 11830), ("36.75", 22083, 40761), ("0.00", 439, 10140)),
    ],
)
def test_rows_of_other_start_times_are_those_of_the_chapters_code(
    by_start: Mapping[int, ByName],
    start_s: int,
    reactive: tuple[str, float, float],
    headroom: tuple[str, float, float],
    predictive: tuple[str, float, float],
) -> None:
    rows = by_start[start_s]
    assert as_printed(rows["reactive"]) == reactive
    assert as_printed(rows["headroom"]) == headroom
    assert as_printed(rows["predictive"]) == predictive


def test_the_exercise_contains_the_table(table: ByName, by_start: Mapping[int, ByName]) -> None:
    assert tuple(by_start) == STARTS_S
    for name in ("reactive", "headroom", "predictive"):
        assert by_start[20][name] == table[name]


def test_reacting_is_unusable_from_the_shortest_start_on_and_with_headroom_from_30_s(
    by_start: Mapping[int, ByName],
) -> None:
    for start_s, rows in by_start.items():
        assert rows["reactive"].violations_frac > 0.1
        assert (rows["headroom"].violations_frac > 0.1) is (start_s >= 30)
        assert rows["predictive"].violations_frac < 0.05


def test_prediction_gains_more_the_longer_a_start_takes(by_start: Mapping[int, ByName]) -> None:
    gained = [rows["reactive"].violations_frac - rows["predictive"].violations_frac for rows in by_start.values()]
    assert gained[0] < 0.13
    assert min(gained[STARTS_S.index(30) :]) > 0.5


def test_headroom_on_a_perfect_forecast_misses_no_request_at_38_percent_more(by_start: Mapping[int, ByName]) -> None:
    for rows in by_start.values():
        both, alone = rows["headroom and predictive"], rows["predictive"]
        assert both.violations_frac == 0.0
        assert both.replica_seconds > 1.38 * alone.replica_seconds


def test_a_forecast_from_past_arrivals_needs_its_headroom(by_start: Mapping[int, ByName]) -> None:
    """A spike of a minute is not on the line through the minute before; the chapter's forecast knows it."""
    for start_s, rows in by_start.items():
        seen, both = rows["policy's predictive"], rows["policy's headroom and predictive"]
        assert rows["predictive"].violations_frac < seen.violations_frac < rows["reactive"].violations_frac
        assert both.violations_frac < seen.violations_frac
        # It has fewer violations than headroom alone if a start takes 20 s or more; below, neither has any.
        headroom = rows["headroom"].violations_frac
        assert both.violations_frac < headroom if start_s >= 20 else both.violations_frac == headroom == 0.0


def test_the_loop_by_hand() -> None:
    """No request arrives, so no replica is ready at first. Three start at 0 s, take 5 s, and two may end at 10 s."""
    row = simulate("three", lambda now_s, queue, arrivals: 3 if now_s < 7 else 1, np.zeros(15), start_s=5)
    assert row == Row(name="three", violations_frac=0.0, peak_queue=0.0, replica_seconds=10 * 3 + 4 * 1)


def test_too_few_replicas_by_hand() -> None:
    """80/s on average come to one replica, which serves 40; it is the last of three after the first second."""
    arrivals = np.random.default_rng(0).poisson(np.full(100, 80.0))
    row = simulate("one", lambda now_s, queue, arrivals: 1, np.full(100, 80.0))
    assert row.replica_seconds == 3 + 99
    assert row.peak_queue == arrivals[1:].sum() - 99 * 40
    # The objective of 0.5 s is a queue of 20 at 40/s. The 57 of the second second leave 17; the queue then grows.
    assert arrivals[1] == 57
    assert row.violations_frac == arrivals[3:].sum() / arrivals.sum()
