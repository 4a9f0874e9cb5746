"""What a stream that another replica continues tells its client of cached tokens and times."""

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.wire.messages import PrefillResult, Sent, Times, Usage

pytestmark = pytest.mark.vllm

# Another node's monotonic clock, which is ahead of this one.
BEGUN = Usage(
    cached_tokens=32,
    created_tokens=64,
    times=Times(
        queued_s=5000.0,
        scheduled_s=5002.0,
        first_token_s=5003.5,
        last_token_s=5004.0,
        clock_s=time.time() - time.monotonic() - 5000.0,
    ),
)
TIMES = ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")


def report(usage: Usage | None) -> Any:
    from deployments.replicas.usage import UsageReport

    return UsageReport(time.monotonic(), Sent(outputs=(), frames=1, digest=b"", created="", usage=usage))


def output(*, finished: bool = False, cached_tokens: int = 0, metrics: Any = None) -> Any:
    return SimpleNamespace(
        num_cached_tokens=cached_tokens,
        num_cache_creation_tokens=0,
        kv_transfer_params=None,
        ec_transfer_params=None,
        finished=finished,
        metrics=metrics,
    )


def engine_times(first_s: float, last_s: float) -> Any:
    from vllm.v1.metrics.stats import RequestStateStats

    return RequestStateStats(
        queued_ts=first_s - 0.2, scheduled_ts=first_s - 0.1, first_token_ts=first_s, last_token_ts=last_s
    )


def test_figures_name_the_images_of_the_prompt() -> None:
    from deployments.replicas.usage import UsageReport

    usage = UsageReport(time.monotonic(), None, ("red", "blue")).correct(output())
    assert usage is not None and usage.media == ("red", "blue")


def test_an_answer_that_its_client_had_whole_repeats_its_figures_exactly() -> None:
    usage, repeated = report(BEGUN), output(finished=True)
    assert usage.correct(repeated) == BEGUN
    assert (repeated.num_cached_tokens, repeated.num_cache_creation_tokens) == (32, 64)
    assert [getattr(repeated.metrics, name) for name in TIMES] == [5000.0, 5002.0, 5003.5, 5004.0]


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_continued_answer_ends_with_the_new_last_token_on_the_first_replicas_clock(is_remote: bool) -> None:
    usage, now_s = report(BEGUN), time.monotonic()
    if is_remote:
        result = PrefillResult(
            kv_transfer_params={},
            answered_at_s=0.0,
            backlog_tokens=0,
            replica_id="p",
            cached_tokens=128,
            computed_s=1.0,
        )
        usage.prefilled(result, now_s)
    usage.observe(output(cached_tokens=160, metrics=engine_times(now_s, now_s + 1.5)))
    last = output(finished=True)
    told = usage.correct(last)
    assert (last.num_cached_tokens, told.created_tokens) == (32, 64)
    assert told.times == replace(BEGUN.times, last_token_s=pytest.approx(now_s + 5001.5, abs=0.01))
    assert last.metrics.first_token_ts == 5003.5


def test_a_first_replica_with_a_clock_ahead_makes_no_negative_time() -> None:
    assert BEGUN.times is not None
    now_s = time.monotonic()
    ahead = replace(BEGUN, times=replace(BEGUN.times, clock_s=BEGUN.times.clock_s + now_s + 60.0))
    usage = report(ahead)
    usage.observe(output(metrics=engine_times(now_s, now_s + 1.5)))
    assert usage.correct(output(finished=True)) == ahead


def test_an_answer_of_which_the_client_had_no_token_has_the_figures_of_its_own_engine() -> None:
    usage, now_s = report(None), time.monotonic()
    usage.observe(output(cached_tokens=48, metrics=engine_times(now_s, now_s)))
    first = output()
    told = usage.correct(first)
    assert (first.num_cached_tokens, told.cached_tokens) == (48, 48)
    assert told.times.first_token_s == now_s


def test_only_the_first_and_the_last_output_report_the_figures() -> None:
    from deployments.replicas.usage import UsageReport

    usage, now_s = UsageReport(time.monotonic(), None), time.monotonic()
    reported = []
    for number in range(4):
        one = output(finished=number == 3, metrics=engine_times(now_s, now_s + number))
        usage.observe(one)
        reported.append(usage.correct(one))
    assert [one is not None for one in reported] == [True, False, False, True]
    assert reported[3].times.last_token_s == now_s + 3


def test_a_time_that_prefill_did_not_observe_is_not_reported() -> None:
    from vllm.entrypoints.generate.base.serving import build_per_request_timing_metrics

    from deployments.replicas.usage import UsageReport

    usage, now_s = UsageReport(time.monotonic(), None), time.monotonic()
    usage.prefilled(
        PrefillResult(kv_transfer_params={}, answered_at_s=0.0, backlog_tokens=0, replica_id="p"), time.monotonic()
    )
    one = output(finished=True, cached_tokens=100, metrics=engine_times(now_s, now_s + 1.0))
    usage.observe(one)
    usage.correct(one)
    figures = build_per_request_timing_metrics(one.metrics, 3)
    assert (figures.time_to_first_token_ms, figures.queue_time_ms) == (None, None)
    assert figures.generation_time_ms == pytest.approx(1000.0)
    assert one.num_cached_tokens is None
