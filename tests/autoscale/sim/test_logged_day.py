"""Laws of a day that is read from a decision log."""

import json
import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.decision_log import config_line, decision_line, traffic_line
from autoscale.sim.logged_day import read_day, trace_of
from autoscale.types import Decision, Plan, Snapshot, Traffic

MakeConfig = Callable[..., AutoscaleConfig]
MakeSnapshot = Callable[..., Snapshot]
DAY_S = 86_400.0


def rate(at_s: float) -> float:
    """A day with its peak at noon, requests per second."""
    return 1.0 + 0.8 * math.sin(2 * math.pi * (at_s / DAY_S - 0.25))


def traffic(at_s: float) -> Traffic:
    return Traffic(
        requests_per_s=rate(at_s),
        input_tokens_mean=1000.0 if at_s < DAY_S / 2 else 2000.0,
        input_tokens_weighted_mean=1500.0 if at_s < DAY_S / 2 else 3000.0,
        output_tokens_mean=200.0,
    )


@pytest.fixture(name="decision")
def _decision(make_snapshot: MakeSnapshot) -> Callable[..., str]:
    plan = Plan(
        counts={},
        admitted=(),
        withdrawn=(),
        victims=(),
        decision=Decision(wanted=None, reason="test"),
        state=make_snapshot().state,
    )

    def make(at_s: float, service: str = "m", bounds: tuple[int, int] = (1, 9)) -> str:
        snapshot = make_snapshot(now_s=at_s, traffic=traffic(at_s), bounds=bounds)
        return decision_line(service, snapshot, plan)

    return make


@pytest.fixture(name="log")
def _log(make_autoscale: MakeConfig, decision: Callable[..., str]) -> list[str]:
    """A whole day: a line a minute, of traffic or of a decision."""
    config = make_autoscale(window_s=20.0)
    times_s = np.arange(0.0, DAY_S + 1.0, 60.0).tolist()
    lines = [decision(at_s) if at_s % 3600.0 == 0.0 else traffic_line("m", at_s, traffic(at_s)) for at_s in times_s]
    return [config_line("m", config, 0.0, "start"), *lines]


def test_the_rate_curve_of_a_day_comes_back(log: list[str]) -> None:
    day = read_day(log)
    arrivals = np.array([request.at_s for request in trace_of(day, np.random.default_rng(1))])
    assert arrivals.size == pytest.approx(DAY_S, rel=0.02)  # the mean rate is 1; 4 standard errors are 1.4 %
    counts, edges = np.histogram(arrivals, bins=24, range=(0.0, DAY_S))
    expected = [3600.0 * rate((low + high) / 2.0) for low, high in pairwise(edges)]
    # Four standard errors of the fewest requests of an hour, 720: 15 %.
    assert counts.tolist() == pytest.approx(expected, rel=0.15)
    assert np.all(np.diff(arrivals) >= 0.0)


def test_lengths_have_the_logged_means_and_the_logged_spread_of_prompts(log: list[str]) -> None:
    trace = trace_of(read_day(log), np.random.default_rng(1))
    for is_late, mean in ((False, 1000.0), (True, 2000.0)):
        # Without the hour around noon: means are interpolated over the change.
        half = [r for r in trace if abs(r.at_s - DAY_S / 2) > 1800.0 and (r.at_s > DAY_S / 2) == is_late]
        prompts = np.array([request.input_tokens for request in half], dtype=float)
        assert prompts.mean() == pytest.approx(mean, rel=0.03)
        assert (prompts**2).sum() / prompts.sum() == pytest.approx(1.5 * mean, rel=0.05)
        assert np.mean([request.output_tokens for request in half]) == pytest.approx(200.0, rel=0.03)


def test_equal_seeds_give_equal_traces(log: list[str]) -> None:
    day = read_day(log)
    assert trace_of(day, np.random.default_rng(3)) == trace_of(day, np.random.default_rng(3))


def test_only_the_last_day_of_a_longer_log_counts(log: list[str]) -> None:
    day = read_day(log, last_s=3600.0)
    assert day.span_s == pytest.approx(3600.0, abs=60.0)
    assert "the log has 1.0 hours of traffic, not a day" in day.notes()[0]
    assert not any("hours" in note for note in read_day(log).notes())


def test_a_long_gap_is_interpolated_and_named(log: list[str]) -> None:
    holed = [line for index, line in enumerate(log) if not 600 <= index < 720]  # two hours
    day = read_day(holed)
    assert any("8% of the time lies between lines more than 150 s apart, at most 121 minutes" in n for n in day.notes())
    arrivals = np.array([request.at_s for request in trace_of(day, np.random.default_rng(1))])
    assert arrivals.size == pytest.approx(DAY_S, rel=0.03)


def test_the_last_configuration_and_limits_hold(
    log: list[str], make_autoscale: MakeConfig, decision: Callable[..., str]
) -> None:
    changed = config_line("m", make_autoscale(pd_ratio="1:3"), DAY_S, "tuned")
    day = read_day([*log, changed, decision(DAY_S + 5.0, bounds=(2, 5))])
    assert str(day.config.pd_ratio) == "1:3"
    assert {limits.highest_replicas for limits in day.pools.root.values()} == {5}


def test_a_half_written_last_line_is_left_out_and_named(log: list[str]) -> None:
    day = read_day([*log, log[-1][:50]])
    assert day.points == read_day(log).points
    assert "1 lines were left out: the last one is cut off" in day.notes()


def test_lines_of_another_version_are_left_out_and_named(log: list[str]) -> None:
    old = json.dumps({"service": "m", "snapshot": {"now_s": 5.0, "what": "was"}, "plan": {}})
    day = read_day([log[0], old, *log[1:]])
    assert "1 lines were left out: of another version of Tandem" in day.notes()


def test_a_line_that_a_killed_writer_left_is_left_out_and_named(log: list[str]) -> None:
    day = read_day([*log[:700], log[700][:50], *log[701:]])
    assert "1 lines were left out: cut off" in day.notes()


def test_a_last_configuration_that_cannot_be_read_is_no_reason_to_take_an_older_one(
    log: list[str], make_autoscale: MakeConfig
) -> None:
    own = json.loads(config_line("m", make_autoscale(), DAY_S, "tuned"))
    own["config"]["policy"] = {"kind": "absent_package.policies:Own"}
    with pytest.raises(ValueError, match=r"line \d+ has the last configuration: .*absent_package"):
        read_day([*log, json.dumps(own)])
    back = config_line("m", make_autoscale(pd_ratio="1:3"), DAY_S, "tuned")
    assert str(read_day([*log, json.dumps(own), back]).config.pd_ratio) == "1:3"


def test_a_log_with_a_wrong_time_is_refused(log: list[str]) -> None:
    late = traffic_line("m", DAY_S + 1e15, Traffic(requests_per_s=1.0))
    with pytest.raises(ValueError, match="more than 31: give another part of it"):
        trace_of(read_day([*log, late], last_s=math.inf), np.random.default_rng(1))


def test_cached_prompts_are_noted(log: list[str]) -> None:
    cached = [traffic_line("m", 60.0 * n, Traffic(requests_per_s=1.0, cached_frac=0.4)) for n in range(1, 30)]
    assert any("of the prompt tokens came from prefix caches" in note for note in read_day([*log[:2], *cached]).notes())


def test_rates_that_were_not_wholly_observed_do_not_count(log: list[str]) -> None:
    partly = traffic_line("m", DAY_S + 60.0, Traffic(requests_per_s=99.0, is_whole=False))
    unknown = traffic_line("m", DAY_S + 120.0, Traffic())
    assert max(point.requests_per_s for point in read_day([*log, partly, unknown]).points) < 2.0


def test_a_log_that_is_no_days_log_is_refused_by_its_fault(log: list[str], make_autoscale: MakeConfig) -> None:
    other = config_line("n", make_autoscale(), 0.0, "start")
    quiet = [traffic_line("m", 60.0 * n, Traffic(requests_per_s=0.0)) for n in range(1, 60)]
    for lines, service, says in (
        ([], None, "the log is empty"),
        (["\n"], None, "the log is empty"),
        (["hello", *log], None, "line 1 is no line of a decision log"),
        (['{"a": 1}', *log], None, "line 1 is no line of a decision log"),
        ([*log, other], None, "the log has 2 services: choose one of m, n with --service"),
        (log, "x", "the log has no service 'x': it has m"),
        (log[1:], None, "no line has a configuration of m"),
        ([log[0], *log[2:50]], None, "no line has a decision about m"),
        (log[:5], None, "less than 10 minutes of m's traffic"),
    ):
        with pytest.raises(ValueError, match=says):
            read_day(lines, service)
    with pytest.raises(ValueError, match=r"the log has no requests in 1\.0 hours"):
        trace_of(read_day([log[0], json.dumps(_without_rate(log[1])), *quiet]), np.random.default_rng(0))


def _without_rate(line: str) -> dict[str, object]:
    record: dict[str, object] = json.loads(line)
    record["snapshot"]["traffic"]["requests_per_s"] = 0.0  # type: ignore[index]
    return record
