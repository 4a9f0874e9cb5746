"""Counters of replicas become rates and quantiles of a service."""

import math
from bisect import bisect_left
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscale.observe.endpoint_report import endpoint_figures, figures_of, joined
from autoscale.observe.histogram import (
    LENGTH_EDGES_TOKENS,
    TPOT_EDGES_S,
    TTFT_EDGES_S,
    Histogram,
    distribution,
    quantile,
)
from autoscale.observe.report_window import ReportWindow
from autoscale.observe.request_stats import RequestStats
from autoscale.observe.signals import Signals
from autoscale.slo import SloConfig
from autoscale.types import Latency, PoolKey, Refused, Traffic
from kvtransfer.topology import Role
from router.admission_config import Priority
from router.demand import Demand

P, D = PoolKey("g0", Role.PREFILL), PoolKey("g0", Role.DECODE)


def test_a_quantile_is_interpolated_inside_its_bucket() -> None:
    # 10 below 1 s, 10 between 1 and 3 s: the median is 1 s, three quarters 2 s.
    assert quantile((1.0, 3.0), (10, 10, 0), 0.5) == pytest.approx(1.0)
    assert quantile((1.0, 3.0), (10, 10, 0), 0.75) == pytest.approx(2.0)
    assert quantile((1.0, 3.0), (0, 0, 5), 0.5) == 3.0
    assert quantile((1.0, 3.0), (0, 0, 0), 0.5) is None


@given(st.lists(st.floats(0.0, 59.0), min_size=1, max_size=200), st.floats(0.01, 0.99))
def test_a_quantile_of_buckets_is_in_the_bucket_of_the_exact_one(values: list[float], share: float) -> None:
    histogram = Histogram(TTFT_EDGES_S)
    for value in values:
        histogram.observe(value)
    found = quantile(TTFT_EDGES_S, histogram.counts, share)
    exact = sorted(values)[math.ceil(share * len(values) - 1e-9) - 1]
    index = bisect_left(TTFT_EDGES_S, exact)
    assert found is not None
    assert (0.0, *TTFT_EDGES_S)[index] - 1e-9 <= found <= TTFT_EDGES_S[index] + 1e-9


class Feed:
    """Replicas that count, reported every two seconds."""

    def __init__(self, window_s: float = 10.0) -> None:
        self.signals = Signals(window_s)
        self.now_s = 1000.0
        self.totals: dict[tuple[PoolKey, str], dict[str, float]] = {}

    def step(self, shown: dict[tuple[PoolKey, str], dict[str, float]], *, skew_s: float = 0.0, **gauges: Any) -> None:
        self.now_s += 2.0
        reports: dict[PoolKey, dict[str, Any]] = {P: {}, D: {}}
        for (key, name), gains in shown.items():
            totals = self.totals.setdefault((key, name), {})
            for counter, gain in gains.items():
                totals[counter] = totals.get(counter, 0.0) + gain
            reports[key][name] = (self.now_s + skew_s, {**totals, **gauges})
        self.signals.add(reports, self.now_s, 2.0)


def test_a_rate_needs_two_reports_and_is_that_of_the_window() -> None:
    feed = Feed()
    feed.step({(D, "d0"): {"decode_tokens": 500.0}}, running_requests=3.0)
    (stats,) = feed.signals.replicas(D)
    assert (stats.decode_tokens_per_s, stats.running_requests, stats.observed_s) == (None, 3.0, 1002.0)
    feed.step({(D, "d0"): {"decode_tokens": 200.0}})
    assert feed.signals.replicas(D)[0].decode_tokens_per_s == pytest.approx(100.0)
    for _ in range(10):
        feed.step({(D, "d0"): {"decode_tokens": 20.0}})
    assert feed.signals.replicas(D)[0].decode_tokens_per_s == pytest.approx(10.0)


def test_a_rate_falls_by_the_clock_when_an_engine_stands_still() -> None:
    feed = Feed(window_s=8.0)
    for _ in range(5):
        feed.step({(D, "d0"): {"decode_tokens": 200.0}})
    rates = []
    for _ in range(5):
        feed.step({(D, "d0"): {"decode_tokens": 0.0}})
        rates.append(feed.signals.replicas(D)[0].decode_tokens_per_s)
    assert rates == pytest.approx([75.0, 50.0, 25.0, 0.0, 0.0])


def test_a_wrong_clock_of_a_replica_changes_neither_rates_nor_freshness() -> None:
    feed = Feed()
    for _ in range(3):
        feed.step({(D, "d0"): {"decode_tokens": 200.0}}, skew_s=-3600.0)
    (stats,) = feed.signals.replicas(D)
    assert stats.decode_tokens_per_s == pytest.approx(100.0)
    assert stats.observed_s == feed.now_s


def test_the_same_report_again_is_no_news() -> None:
    window = ReportWindow(0.0)
    for now_s in (10.0, 12.0, 14.0):
        window.add(9.0, {"decode_tokens": 5.0}, now_s=now_s, window_s=10.0, interval_s=2.0)
    assert window.seen_s == 10.0
    assert window.rate("decode_tokens") is None


@pytest.mark.parametrize(("report_s", "tokens"), [(5.0, 900.0), (30.0, 0.0)])
def test_a_clock_set_back_or_a_restarted_engine_starts_a_new_window(report_s: float, tokens: float) -> None:
    window = ReportWindow(0.0)
    window.add(10.0, {"decode_tokens": 500.0}, now_s=10.0, window_s=100.0, interval_s=2.0)
    window.add(20.0, {"decode_tokens": 700.0}, now_s=20.0, window_s=100.0, interval_s=2.0)
    window.add(report_s, {"decode_tokens": tokens}, now_s=30.0, window_s=100.0, interval_s=2.0)
    assert window.rate("decode_tokens") is None
    window.add(report_s + 10.0, {"decode_tokens": tokens + 50.0}, now_s=40.0, window_s=100.0, interval_s=2.0)
    assert window.rate("decode_tokens") == pytest.approx(5.0)


def bucket(name: str, edges: tuple[float, ...], value: float, count: float = 1.0) -> dict[str, float]:
    histogram = Histogram(edges)
    histogram.observe(value)
    return {key: number * count for key, number in histogram.as_report(name).items()}


def test_quantiles_are_taken_over_the_merged_buckets_of_all_replicas() -> None:
    feed = Feed()
    fast, slow = bucket("ttft", TTFT_EDGES_S, 0.09, 95.0), bucket("ttft", TTFT_EDGES_S, 4.0, 5.0)
    feed.step({(D, "d0"): fast, (D, "d1"): slow})  # before the window: not counted
    feed.step({(D, "d0"): fast, (D, "d1"): slow})
    assert feed.signals.latency(0.9).ttft_s == pytest.approx(0.05 + 0.05 * 90 / 95)
    assert feed.signals.latency(0.99).ttft_s == pytest.approx(3.0 + 2.0 * 4 / 5)
    # The mean of the two replicas' own p90 would be over two seconds.


def test_the_distribution_of_lengths_has_the_exact_mean() -> None:
    feed, lengths = Feed(), (100, 100, 100, 3000)
    requests = RequestStats(lambda: 0.0)
    feed.step({(D, "d0"): requests.report()})
    for tokens in lengths:
        timer = requests.begin(0.0, tokens, is_streamed=False)
        timer.add_all(tokens // 10, 0.0, 1.0)
        timer.end()
    feed.step({(D, "d0"): requests.report()})
    traffic = feed.signals.traffic()
    for shown, mean in ((traffic.input_lengths, 825.0), (traffic.output_lengths, 82.5)):
        assert [share for _, share in shown] == [0.75, 0.25]
        assert sum(value * share for value, share in shown) == pytest.approx(mean)
        assert shown[0][0] < mean < shown[1][0]
    assert Traffic().input_lengths == ()


@given(st.lists(st.floats(1.0, 200_000.0), min_size=1, max_size=50))
def test_a_length_is_known_to_within_a_fifth(values: list[float]) -> None:
    histogram = Histogram(LENGTH_EDGES_TOKENS)
    for value in values:
        histogram.observe(value)
    mean = sum(values) / len(values)
    points = distribution(LENGTH_EDGES_TOKENS, histogram.counts, mean)
    assert sum(share for _, share in points) == pytest.approx(1.0)
    assert sum(value * share for value, share in points) == pytest.approx(mean)
    inside = [value for value in values if 64.0 < value <= LENGTH_EDGES_TOKENS[-1]]
    if len(inside) == len(values) and len(points) == 1:
        assert all(value / mean == pytest.approx(1.0, abs=0.42) for value in values)


def test_a_bucket_that_was_left_out_because_it_was_empty_counts_from_zero() -> None:
    feed = Feed()
    assert Histogram(TTFT_EDGES_S).as_report("ttft") == {}
    feed.step({(D, "d0"): {"decode_tokens": 1.0}})
    feed.step({(D, "d0"): {"decode_tokens": 1.0, **bucket("ttft", TTFT_EDGES_S, 4.0, 5.0)}})
    assert feed.signals.latency(0.5).ttft_s == pytest.approx(4.0)


def test_a_request_that_still_waits_counts_with_the_time_so_far() -> None:
    feed = Feed()
    feed.step({(D, "d0"): {}}, **bucket("late", TTFT_EDGES_S, 8.0, 3.0))
    assert feed.signals.latency(0.5).ttft_s == pytest.approx(7.5)
    assert feed.signals.latency(0.5).tpot_s is None


def test_without_waiting_requests_and_answers_there_is_no_latency() -> None:
    feed = Feed()
    for _ in range(3):
        feed.step({(D, "d0"): {"decode_tokens": 0.0}})
    assert feed.signals.latency(0.95) == Latency()
    assert feed.signals.traffic() == Traffic(requests_per_s=0.0, served_per_s=0.0)
    assert Signals(10.0).traffic() == Traffic()


def test_traffic_counts_requests_that_arrived_at_decode() -> None:
    feed = Feed()
    gains = {
        "requests": 4.0,
        "first_tokens": 3.0,
        "input_tokens": 4000.0,
        "requests_ended": 2.0,
        "output_tokens": 300.0,
    }
    for _ in range(3):
        feed.step({(D, "d0"): gains, (D, "d1"): gains, (P, "p0"): {"requests": 99.0}})
    assert feed.signals.traffic() == Traffic(
        requests_per_s=4.0, served_per_s=3.0, input_tokens_mean=1000.0, output_tokens_mean=150.0
    )


class Endpoint:
    """Replicas of the endpoint, each with the counters of a model, beside one decode replica."""

    def __init__(self, *names: str) -> None:
        self.feed = Feed()
        self.demands = {name: Demand() for name in names}

    def step(self, decode: dict[str, float], waits: dict[str, list[tuple[int, float]]] | None = None) -> None:
        self.feed.step({(D, "d0"): decode})
        reports = {}
        for name, demand in self.demands.items():
            figures = endpoint_figures(demand.figures(), (waits or {}).get(name, []), SloConfig())
            reports[name] = (
                self.feed.now_s,
                figures_of(joined({"m/a": figures, "m": {"offered_requests": 7.0}}), "m/a"),
            )
        self.feed.signals.add_endpoint(reports, self.feed.now_s, 2.0)


def test_demand_is_what_the_endpoint_was_asked_for_and_not_what_reached_decode() -> None:
    endpoint = Endpoint("i0", "i1")
    for _ in range(3):
        for demand in endpoint.demands.values():
            for _ in range(8):
                demand.offer(100)
            for _ in range(2):
                demand.let_pass(100)
            for _ in range(4):
                demand.refuse("predicted_ttft", Priority.LOW)
        endpoint.step({"requests": 4.0, "first_tokens": 4.0, "input_tokens": 1200.0}, {"i0": [(100, 3.5), (100, 0.1)]})
    traffic, latency = endpoint.feed.signals.traffic(), endpoint.feed.signals.latency(0.9)
    assert traffic.requests_per_s == 8.0
    assert (traffic.served_per_s, traffic.waiting_requests) == (2.0, 2.0)
    # The endpoint estimated 100 tokens for each prompt that decode counted as 300.
    assert (traffic.input_tokens_mean, traffic.waiting_tokens) == (300.0, 600.0)
    assert traffic.refused == (Refused(reason="predicted_ttft", priority="low", requests_per_s=4.0),)
    assert latency.refused_frac == 0.5
    assert latency.ttft_s == pytest.approx(3.0 + 2.0 * 0.8)  # requests that wait at the endpoint count
    assert not SloConfig().is_met(replace(latency, ttft_s=None))


def test_a_replica_of_the_endpoint_that_dies_takes_its_counts_along_and_the_traffic_is_not_whole_for_a_window() -> None:
    endpoint = Endpoint("i0", "i1")
    for _ in range(3):
        for demand in endpoint.demands.values():
            demand.offer(100)
        endpoint.step({})
    assert endpoint.feed.signals.traffic().requests_per_s == 1.0
    del endpoint.demands["i0"]
    are_whole = []
    for _ in range(6):
        endpoint.demands["i1"].offer(100)
        endpoint.demands["i1"].offer(100)
        endpoint.step({})
        are_whole.append(endpoint.feed.signals.traffic().is_whole)
    assert are_whole == [False, False, False, False, False, True]
    assert endpoint.feed.signals.traffic().requests_per_s == 1.0


def test_a_clock_that_is_set_back_after_a_loss_makes_traffic_whole_again_after_a_window() -> None:
    endpoint = Endpoint("i0", "i1")
    for _ in range(3):
        endpoint.step({})
    del endpoint.demands["i0"]
    endpoint.step({})
    endpoint.feed.now_s -= 3600.0
    are_whole = []
    for _ in range(8):
        endpoint.demands["i1"].offer(100)
        endpoint.step({})
        are_whole.append(endpoint.feed.signals.traffic().is_whole)
    assert are_whole == [False] * 5 + [True] * 3


def test_the_quietest_replica_of_the_endpoint_is_known() -> None:
    endpoint = Endpoint("i0", "i1")
    for _ in range(3):
        endpoint.step({})
    assert endpoint.feed.signals.traffic().quietest == ("i0", endpoint.feed.now_s)
    last_s = endpoint.feed.now_s
    endpoint.feed.step({(D, "d0"): {}})
    reports = {"i0": (endpoint.feed.now_s, {"x": 1.0}), "i1": (last_s, {"x": 1.0})}
    endpoint.feed.signals.add_endpoint(reports, endpoint.feed.now_s, 2.0)
    assert endpoint.feed.signals.traffic().quietest == ("i1", last_s)


def test_the_first_seconds_of_the_endpoints_reports_are_no_whole_traffic() -> None:
    endpoint = Endpoint("i0")
    are_whole = []
    for _ in range(4):
        endpoint.step({"requests": 4.0})
        are_whole.append(endpoint.feed.signals.traffic().is_whole)
    assert are_whole == [False, False, False, True]  # reports every two seconds, and a window of ten


def test_without_a_report_of_the_endpoint_the_requests_of_decode_are_the_demand() -> None:
    endpoint = Endpoint()
    for _ in range(3):
        endpoint.step({"requests": 4.0})
    assert endpoint.feed.signals.traffic().requests_per_s == 2.0
    assert endpoint.feed.signals.latency(0.9).refused_frac is None


def test_the_weighted_mean_is_the_mean_prompt_length_over_all_tokens() -> None:
    """One prompt of 3,000 tokens and three of 1,000: half of all tokens are in the long one."""
    feed = Feed()
    gains = {"requests": 4.0, "input_tokens": 6000.0, "input_tokens_squared": 12e6}
    for _ in range(3):
        feed.step({(D, "d0"): gains})
    assert feed.signals.traffic().input_tokens_weighted_mean == 2000.0


def test_the_mean_ttft_is_of_requests_with_a_first_token() -> None:
    feed = Feed()
    for _ in range(3):
        feed.step({(D, "d0"): {"first_tokens": 2.0, "first_tokens_s": 1.0}, (D, "d1"): {"first_tokens_s": 3.0}})
    assert feed.signals.latency(0.95).ttft_mean_s == 2.0


def test_a_replica_that_never_reported_was_last_heard_of_when_it_became_known() -> None:
    signals = Signals(10.0)
    for now_s in (100.0, 102.0):
        signals.add({D: {"d0": None}}, now_s, 2.0)
    (stats,) = signals.replicas(D)
    assert (stats.observed_s, stats.decode_tokens_per_s, stats.kv_usage_frac) == (100.0, None, None)


def test_a_replica_that_is_gone_is_forgotten() -> None:
    feed = Feed()
    for _ in range(3):
        feed.step({(D, "d0"): {"decode_tokens": 100.0}, (D, "d1"): {"decode_tokens": 100.0}})
    feed.step({(D, "d1"): {"decode_tokens": 100.0}})
    assert [stats.replica_id for stats in feed.signals.replicas(D)] == ["d1"]
    feed.step({(D, "d0"): {"decode_tokens": 100.0}, (D, "d1"): {"decode_tokens": 100.0}})
    assert feed.signals.replicas(D)[0].decode_tokens_per_s is None


def test_the_default_objectives_are_edges_of_the_histograms() -> None:
    assert 0.05 in TPOT_EDGES_S
    assert 1.0 in TTFT_EDGES_S


def test_the_handoff_time_is_the_mean_over_the_window() -> None:
    feed = Feed()
    feed.step({(D, "d0"): {"handoffs": 10.0, "handoff_s": 100.0}})
    assert feed.signals.replicas(D)[0].handoff_s is None
    feed.step({(D, "d0"): {"handoffs": 4.0, "handoff_s": 0.2}})
    assert feed.signals.replicas(D)[0].handoff_s == pytest.approx(0.05)
    for _ in range(10):
        feed.step({(D, "d0"): {}})
    assert feed.signals.replicas(D)[0].handoff_s is None


@pytest.mark.parametrize("is_ours_too", [False, True])
def test_a_clock_that_is_set_forward_makes_no_load_vanish(is_ours_too: bool) -> None:
    feed = Feed()
    for _ in range(4):
        feed.step({(D, "d0"): {"decode_tokens": 200.0}})
    assert feed.signals.replicas(D)[0].decode_tokens_per_s == 100.0
    skew_s = 0.0 if is_ours_too else 3600.0
    feed.now_s += 3600.0 if is_ours_too else 0.0
    feed.step({(D, "d0"): {"decode_tokens": 200.0}}, skew_s=skew_s)
    assert feed.signals.replicas(D)[0].decode_tokens_per_s is None
    feed.step({(D, "d0"): {"decode_tokens": 200.0}}, skew_s=skew_s)
    assert feed.signals.replicas(D)[0].decode_tokens_per_s == 100.0


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_report_with_a_value_that_is_no_finite_number_is_dropped(wrong: float) -> None:
    feed = Feed()
    for _ in range(3):
        feed.step({(D, "d0"): {"decode_tokens": 200.0}})
    before = feed.signals.replicas(D)
    feed.step({(D, "d0"): {"decode_tokens": 200.0}}, kv_usage_frac=wrong)
    assert feed.signals.replicas(D) == before  # if this goes on, the replica's report gets too old
    feed.step({(D, "d0"): {"decode_tokens": 200.0}})
    assert feed.signals.replicas(D)[0].decode_tokens_per_s == 100.0


def test_gpu_utilization_is_averaged_over_the_window_and_kv_usage_is_the_last_one() -> None:
    feed = Feed(window_s=4.0)
    for busy in (0.0, 0.9, 0.6, 0.3):
        feed.step({(D, "d0"): {}}, gpu_utilization_frac=busy, kv_usage_frac=busy)
    (stats,) = feed.signals.replicas(D)
    assert stats.gpu_utilization_frac == pytest.approx(0.6)  # the mean of the last three
    assert stats.kv_usage_frac == 0.3
    feed.step({(D, "d0"): {}})
    assert feed.signals.replicas(D)[0].gpu_utilization_frac is None


def test_arrivals_are_partly_known_while_a_replica_is_interrupted_and_whole_beside_a_new_one() -> None:
    feed, gains = Feed(), {"requests": 20.0, "decode_tokens": 10.0}
    for _ in range(3):
        feed.step({(D, "d0"): gains, (D, "d1"): gains})
    assert feed.signals.traffic().requests_per_s == pytest.approx(20.0)
    feed.step({(D, "d0"): gains, (D, "d1"): gains}, skew_s=600.0)  # their clocks were set
    assert not feed.signals.traffic().is_whole
    feed.step({(D, "d0"): gains, (D, "d1"): gains}, skew_s=600.0)
    assert feed.signals.traffic().is_whole
    assert feed.signals.traffic().requests_per_s == pytest.approx(20.0)
    feed.step({(D, "d0"): gains, (D, "d1"): gains, (D, "new"): {"requests": 0.0}}, skew_s=600.0)
    assert feed.signals.traffic().is_whole
    assert feed.signals.traffic().requests_per_s == pytest.approx(20.0)


def test_a_report_that_one_tick_just_missed_is_no_clock_jump() -> None:
    window = ReportWindow(0.0)
    # A report every 10 s, read every 20 s: the newest is sometimes fresh and sometimes 10 s old.
    for now_s, report_s in ((20.0, 20.0), (40.0, 30.5), (60.0, 60.0)):
        window.add(report_s, {"decode_tokens": 10.0 * report_s}, now_s=now_s, window_s=60.0, interval_s=20.0)
    assert window.rate("decode_tokens") == pytest.approx(10.0)
    # The tolerance has an upper limit: at an interval of 60 s, a difference of 60 s is a clock jump.
    window.add(180.0, {"decode_tokens": 1800.0}, now_s=120.0, window_s=120.0, interval_s=60.0)
    assert window.rate("decode_tokens") is None


def test_the_cached_share_is_of_all_prompt_tokens_whichever_role_computes_them() -> None:
    feed = Feed()
    feed.step({(P, "p0"): {}, (P, "p1"): {}, (D, "d0"): {"requests": 1.0}})
    assert feed.signals.traffic().cached_frac is None
    gains = {"prefill_tokens": 100.0, "cached_prefill_tokens": 500.0}
    for _ in range(2):
        feed.step(
            {
                (P, "p0"): gains,
                (P, "p1"): {"prefill_tokens": 200.0, "cached_prefill_tokens": 0.0},
                (D, "d0"): {"requests": 1.0, "prefill_tokens": 50.0, "cached_prefill_tokens": 150.0},
            }
        )
    assert feed.signals.traffic().cached_frac == pytest.approx(650.0 / 1000.0)
