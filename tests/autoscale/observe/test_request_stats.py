"""Waiting times of requests, as the autoscaler sees them."""

import pytest

from autoscale.observe.request_stats import RequestStats
from autoscale.observe.signals import Signals
from autoscale.slo import SloConfig
from autoscale.types import PoolKey
from kvtransfer.topology import Role

D = PoolKey("g0", Role.DECODE)


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def latency(stats: RequestStats, clock: Clock, begin: dict[str, float]) -> tuple[float | None, float | None]:
    """The median TTFT and TPOT between an earlier report and now."""
    signals = Signals(1e9)
    signals.add({D: {"d0": (0.0, begin)}}, 0.0, 2.0)
    signals.add({D: {"d0": (1.0, stats.report())}}, 1.0, 2.0)
    seen = signals.latency(0.5)
    return seen.ttft_s, seen.tpot_s


def test_ttft_starts_at_the_endpoint_and_tpot_at_the_first_token() -> None:
    clock = Clock()
    stats = RequestStats(clock)
    before = stats.report()
    timer = stats.begin(98.5, input_tokens=7, is_streamed=True)  # the request took 1.5 s to get here
    clock.now_s = 102.5
    timer.add_tokens(1)
    clock.now_s = 103.0
    timer.add_tokens(4)
    clock.now_s = 103.5
    timer.add_tokens(5)
    timer.end()
    ttft_s, tpot_s = latency(stats, clock, before)
    assert ttft_s == pytest.approx(4.0, abs=1.0)  # the bucket from 3 to 5 s
    assert tpot_s == pytest.approx(0.11, abs=0.04)  # one second over nine tokens, between 0.1 and 0.15
    report = stats.report()
    assert (report["requests"], report["requests_ended"], report["input_tokens"], report["output_tokens"]) == (
        1,
        1,
        7,
        10,
    )


def test_a_long_prompt_is_counted_by_its_own_objective() -> None:
    """10,000 tokens at 1 ms each have 10 s instead of 1 s, so 6 s of waiting or prefill count as 0.6 s."""
    slo = SloConfig(ttft_s=1.0, ttft_s_per_input_token=1e-3)
    for streams_at_once in (True, False):
        clock = Clock()
        stats = RequestStats(clock, slo.ttft_share)
        before = stats.report()
        timer = stats.begin(100.0, 10_000, is_streamed=streams_at_once)
        clock.now_s = 106.0
        if streams_at_once:
            assert timer.waited_s(clock.now_s) == pytest.approx(0.6)
            timer.add_tokens(1)
        else:
            timer.add_all(1, 106.0, 106.0)
        timer.end()
        assert latency(stats, clock, before)[0] == pytest.approx(0.6, abs=0.1)
        assert (stats.report()["first_tokens"], stats.report()["first_tokens_s"]) == (1.0, 6.0)
    assert slo.ttft_share(500) == 1.0
    assert SloConfig().ttft_share(10**9) == 1.0


def test_the_squares_of_lengths_are_counted() -> None:
    stats = RequestStats(Clock())
    for tokens in (3, 4):
        stats.begin(100.0, tokens, is_streamed=True)
    assert stats.report()["input_tokens_squared"] == 25.0


def test_a_waiting_request_is_reported_while_it_waits_and_not_after() -> None:
    clock = Clock()
    stats = RequestStats(clock)
    timer, other = stats.begin(100.0, 1, is_streamed=True), stats.begin(100.0, 1, is_streamed=True)
    clock.now_s = 108.0
    assert sum(value for name, value in stats.report().items() if name.startswith("late")) == 2
    timer.add_tokens(1)
    other.end()  # its client has left
    report = stats.report()
    assert sum(value for name, value in report.items() if name.startswith("late")) == 0
    assert report["requests_ended"] == 0
    timer.end()
    assert stats.report()["requests_ended"] == 1


def test_one_token_gives_no_tpot_and_zero_tokens_no_ttft() -> None:
    stats = RequestStats(Clock())
    timer = stats.begin(100.0, 1, is_streamed=True)
    timer.add_tokens(0)
    timer.add_tokens(1)
    timer.end()
    assert sum(value for name, value in stats.report().items() if name.startswith("tpot")) == 0
    assert sum(value for name, value in stats.report().items() if name.startswith("ttft")) == 1


def test_a_report_is_plain_floats() -> None:
    assert {type(value) for value in RequestStats(Clock()).report().values()} == {float}


def test_an_answer_in_one_piece_is_timed_by_the_engine_and_never_counts_as_waiting() -> None:
    clock = Clock()
    stats = RequestStats(clock)
    before = stats.report()
    timer = stats.begin(99.0, 1, is_streamed=False)
    clock.now_s = 160.0
    assert sum(value for name, value in stats.report().items() if name.startswith("late")) == 0
    timer.add_all(11, first_s=99.55, last_s=100.55)
    timer.end()
    ttft_s, tpot_s = latency(stats, clock, before)
    assert ttft_s == pytest.approx(0.55, abs=0.05)
    assert tpot_s == pytest.approx(0.09, abs=0.011)


def test_a_running_stream_counts_with_its_present_pace_and_an_ended_one_with_its_mean() -> None:
    clock = Clock()
    stats = RequestStats(clock)
    before = stats.report()
    timer = stats.begin(100.0, 1, is_streamed=True)
    timer.add_tokens(1)
    clock.now_s = 101.0
    timer.add_tokens(25)
    assert latency(stats, clock, before)[1] is None  # the stream is too young
    clock.now_s = 102.0
    timer.add_tokens(25)
    assert latency(stats, clock, before)[1] == pytest.approx(0.04, abs=0.005)
    clock.now_s = 104.0
    timer.add_tokens(20)  # it is slower now, which its mean would not show
    assert latency(stats, clock, before)[1] == pytest.approx(0.1, abs=0.02)
    clock.now_s = 105.0
    assert latency(stats, clock, before)[1] == pytest.approx(0.1, abs=0.02)  # the last pace still counts
    clock.now_s = 114.0
    assert latency(stats, clock, before)[1] == pytest.approx(10.0, abs=5.0)  # the stream stands still
    timer.end()
    assert not any(name.startswith("pace") for name in stats.report())
    mean_s = 4.0 / 70
    assert latency(stats, clock, before)[1] == pytest.approx(mean_s, abs=0.01)


def test_an_answer_in_one_piece_has_no_pace() -> None:
    clock = Clock()
    stats = RequestStats(clock)
    timer = stats.begin(100.0, 1, is_streamed=False)
    timer.add_all(10, 101.0, 102.0)
    clock.now_s = 110.0
    assert not any(name.startswith("pace") for name in stats.report())
    timer.end()


def test_the_mean_length_of_answers_follows_recent_answers() -> None:
    stats = RequestStats(Clock())
    assert stats.output_tokens_mean is None

    def answer(tokens: int) -> None:
        timer = stats.begin(0.0, 7, is_streamed=True)
        timer.add_tokens(tokens, 1.0)
        timer.end()

    answer(320)
    assert stats.output_tokens_mean == 320.0
    answer(0)  # refused, or gone before its first token: no answer
    assert stats.output_tokens_mean == 320.0
    answer(64)
    assert stats.output_tokens_mean == 320.0 - 256 / 64
    for _ in range(640):
        answer(32)
    assert stats.output_tokens_mean == pytest.approx(32.0, rel=1e-3)  # (63 / 64)^640 of the difference of 284 is left


def test_result_of_a_pooling_model_has_a_ttft_and_no_tokens() -> None:
    clock = Clock()
    stats = RequestStats(clock)
    before = stats.report()
    timer = stats.begin(clock.now_s, 10, is_streamed=True)
    clock.now_s += 0.5
    assert stats.report()["first_tokens"] == 0.0
    timer.add_result()
    timer.end()
    report = stats.report()
    assert (report["requests"], report["first_tokens"], report["first_tokens_s"]) == (1.0, 1.0, 0.5)
    assert (report["requests_ended"], report["output_tokens"]) == (0.0, 0.0)
    ttft_s, tpot_s = latency(stats, clock, before)
    assert ttft_s == pytest.approx(0.5, rel=0.1)  # the width of a bucket
    assert tpot_s is None
