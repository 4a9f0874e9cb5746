"""The load generator, against a real HTTP server that answers as a good or a bad endpoint would."""

import asyncio
import time
from collections.abc import Callable

import pytest

from autoscale.report import RequestRecord
from autoscale.traces.trace import TraceRequest
from serve_app.load import generator as bench
from serve_app.load.generator import LoadGenerator
from tests.serve_app.fake_endpoint import DONE, TOKEN, Answer, FakeEndpoint, hold, raw, refuse, tokens

MakeEndpoint = Callable[..., FakeEndpoint]


def one(at_s: float = 0.0, input_tokens: int = 4, output_tokens: int = 2) -> TraceRequest:
    return TraceRequest(at_s=at_s, input_tokens=input_tokens, output_tokens=output_tokens)


def replay(url: str, *trace: TraceRequest) -> list[RequestRecord]:
    return asyncio.run(LoadGenerator(url, "m").replay(trace))


def keep(url: str, requests: list[TraceRequest], concurrency: int, seed: int = 0) -> list[RequestRecord]:
    return asyncio.run(LoadGenerator(url, "m", seed=seed).keep_in_flight(requests, concurrency))


def test_ttft_and_tpot_are_what_the_endpoint_did(make_endpoint: MakeEndpoint) -> None:
    endpoint = make_endpoint(tokens(first_s=0.3, gap_s=0.05))
    (record,) = replay(endpoint.url, one(output_tokens=9))
    ((first_s, *_, last_s),) = endpoint.tokens_s
    assert record.error is None
    assert record.ttft_s is not None
    # A token arrives after it was sent; on a busy machine the way to the server and back takes up to 0.2 s.
    assert first_s - endpoint.arrived_s[0] <= record.ttft_s < first_s - endpoint.arrived_s[0] + 0.2
    assert record.tpot_s == pytest.approx((last_s - first_s) / 8, abs=0.2 / 8)


def test_record_carries_the_lengths_of_its_request(make_endpoint: MakeEndpoint) -> None:
    (record,) = replay(make_endpoint().url, one(input_tokens=7, output_tokens=3))
    assert (record.input_tokens, record.output_tokens) == (7, 3)


def test_request_asks_for_exactly_this_many_greedy_streamed_tokens(make_endpoint: MakeEndpoint) -> None:
    endpoint = make_endpoint()
    replay(endpoint.url + "/", one(output_tokens=3))
    (body,) = endpoint.bodies
    assert len(body.pop("prompt")) == 4
    assert body == {
        "model": "m",
        "max_tokens": 3,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@pytest.mark.parametrize("space", [b"", b" "])
def test_output_tokens_are_those_that_the_endpoint_counted(make_endpoint: MakeEndpoint, space: bytes) -> None:
    usage = b'data: {"choices":%b[],"usage":{"completion_tokens":2}}\n\n' % space
    (record,) = replay(make_endpoint(raw(TOKEN, TOKEN, usage, DONE)).url, one(output_tokens=3))
    assert (record.output_tokens, record.error) == (2, None)


@pytest.mark.parametrize(("usage", "error"), [(b"null", None), (b"{}", None), (b"3", "TypeError")])
def test_an_event_without_choices_need_not_count(make_endpoint: MakeEndpoint, usage: bytes, error: str | None) -> None:
    event = b'data: {"choices":[],"usage":%b}\n\n' % usage
    (record,) = replay(make_endpoint(raw(event, TOKEN, DONE)).url, one(output_tokens=5))
    assert (record.output_tokens, record.error) == (5, error)


def test_prompt_has_exactly_the_asked_length_in_ids_of_any_tokenizer(make_endpoint: MakeEndpoint) -> None:
    endpoint = make_endpoint()
    keep(endpoint.url, [one(input_tokens=length) for length in (1, 7, 4096)], 1)
    assert [len(body["prompt"]) for body in endpoint.bodies] == [1, 7, 4096]
    ids = {token for body in endpoint.bodies for token in body["prompt"]}
    assert min(ids) >= 300
    assert max(ids) < 1000


def test_no_prompt_repeats_and_a_seed_gives_the_same_ones_again(make_endpoint: MakeEndpoint) -> None:
    endpoint = make_endpoint()
    for seed in (0, 0, 1):
        keep(endpoint.url, [one(input_tokens=16)] * 2, 1, seed=seed)
    a, b, again_a, again_b, c, d = (tuple(body["prompt"]) for body in endpoint.bodies)
    assert (a, b) == (again_a, again_b)
    assert len({a, b, c, d}) == 4


@pytest.mark.parametrize(
    ("answer", "error", "has_token"),
    [
        pytest.param(refuse(503), "HTTP 503", False, id="status"),
        pytest.param(refuse(404), "HTTP 404", False, id="another status"),
        pytest.param(raw(TOKEN, TOKEN), "stream ended without [DONE]", True, id="no end"),
        pytest.param(raw(b'{"choices": []}'), "stream ended without [DONE]", False, id="no stream"),
        pytest.param(
            raw(TOKEN, b'data: {"error": {"type": "server_error"}}\n\n', DONE), "stream error: server_error", True
        ),
        pytest.param(raw(b'data: {"error": "overloaded"}\n\n', DONE), "stream error: overloaded", False),
        pytest.param(raw(b'data: {"error": {"ty\n\n', DONE), "JSONDecodeError", False, id="half an event"),
        pytest.param(raw(TOKEN, b"data: " + b"x" * (4 << 20)), "LineTooLong", True, id="line without end"),
        pytest.param(raw(TOKEN, cut=True), "ClientPayloadError", True, id="connection closed"),
    ],
)
def test_a_bad_answer_is_recorded_with_its_cause(
    make_endpoint: MakeEndpoint, answer: Answer, error: str, has_token: bool
) -> None:
    (record,) = replay(make_endpoint(answer).url, one())
    assert record.error == error
    assert (record.first_token_s is not None) is has_token
    assert (record.last_token_s is not None) is has_token


def test_event_needs_no_space_after_its_colon_and_comments_are_no_tokens(make_endpoint: MakeEndpoint) -> None:
    answer = raw(b": ping\n\n", TOKEN.replace(b"data: ", b"data:"), b"data:[DONE]\r\n\r\n")
    (record,) = replay(make_endpoint(answer).url, one())
    assert record.error is None
    assert record.first_token_s == record.last_token_s is not None


def test_an_unreachable_endpoint_is_recorded(dead_url: str) -> None:
    cases = {
        dead_url: "ClientConnectorError",
        "http://no.such.host.invalid": "ClientConnectorDNSError",
        "http://127.0.0.1:99999": "InvalidUrlClientError",
    }
    for url, error in cases.items():
        (record,) = replay(url, one())
        assert (record.error, record.first_token_s, record.last_token_s) == (error, None, None)


def test_endpoint_that_never_answers_is_given_up(make_endpoint: MakeEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_TIMEOUT_S", 0.2)
    for answer, has_token in ((hold(2), False), (tokens(gap_s=60.0), True)):
        (record,) = replay(make_endpoint(answer).url, one())
        assert record.error == "TimeoutError"
        assert (record.first_token_s is not None) is has_token


def test_failure_of_one_request_leaves_the_others_alone(make_endpoint: MakeEndpoint) -> None:
    records = replay(make_endpoint(refuse(500, first=1)).url, one(0.0), one(0.1), one(0.2))
    assert [record.error for record in records] == ["HTTP 500", None, None]


def test_replay_sends_at_the_times_of_the_trace_and_in_its_order(make_endpoint: MakeEndpoint) -> None:
    endpoint = make_endpoint()
    trace = [one(at_s, input_tokens=length) for length, at_s in enumerate((0.0, 0.05, 0.2, 0.2, 0.5), start=1)]
    start = time.perf_counter()
    records = replay(endpoint.url, *trace)
    for request, record, arrived_s in zip(trace, records, endpoint.arrived_s, strict=True):
        # asyncio may wake one tick of its clock early, and on a busy machine 0.2 s late.
        assert request.at_s - 0.001 <= record.sent_s < request.at_s + 0.2
        assert arrived_s >= start + request.at_s - 0.001
    assert [len(body["prompt"]) for body in endpoint.bodies] == [1, 2, 3, 4, 5]


def test_replay_waits_for_no_answer_and_for_no_free_connection(
    make_endpoint: MakeEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "_TIMEOUT_S", 5.0)
    count = 120  # more than the 100 connections that aiohttp opens by default
    records = replay(make_endpoint(hold(count)).url, *(one(0.001 * n) for n in range(count)))
    assert [record.error for record in records] == [None] * count


def test_records_keep_the_order_of_the_trace_whichever_ends_first(make_endpoint: MakeEndpoint) -> None:
    endpoint = make_endpoint(tokens(gap_s=0.05))
    records = replay(endpoint.url, one(0.0, 1, 6), one(0.01, 2, 1), one(0.02, 3, 3))
    assert [record.input_tokens for record in records] == [1, 2, 3]
    assert [record.last_token_s for record in records] != sorted(record.last_token_s or 0.0 for record in records)


@pytest.mark.parametrize("concurrency", [1, 3])
def test_as_many_requests_as_asked_are_in_flight_and_never_more(make_endpoint: MakeEndpoint, concurrency: int) -> None:
    endpoint = make_endpoint(tokens(first_s=0.03))
    records = keep(endpoint.url, [one(input_tokens=length) for length in range(1, 10)], concurrency)
    assert endpoint.most_in_flight == concurrency
    assert sorted(record.input_tokens for record in records) == list(range(1, 10))


def test_a_closed_loop_ignores_arrival_times(make_endpoint: MakeEndpoint) -> None:
    records = keep(make_endpoint().url, [one(at_s=3600.0)] * 2, 1)
    assert [record.error for record in records] == [None, None]
    assert max(record.sent_s for record in records) < 5.0


def test_every_request_is_reported_with_its_record_when_it_ends_and_failed_ones_too(
    make_endpoint: MakeEndpoint,
) -> None:
    seen: list[tuple[TraceRequest, RequestRecord]] = []
    url, trace = make_endpoint(refuse(500, first=1)).url, [one(), one(input_tokens=5)]
    records = asyncio.run(LoadGenerator(url, "m").replay(trace, lambda *pair: seen.append(pair)))
    assert {request.input_tokens: record for request, record in seen} == {4: records[0], 5: records[1]}
    assert {record.error for _, record in seen} == {"HTTP 500", None}


def test_a_cancelled_replay_ends_its_requests(make_endpoint: MakeEndpoint) -> None:
    seen: list[TraceRequest] = []

    async def cancelled() -> None:
        generator = LoadGenerator(make_endpoint(tokens(first_s=60.0)).url, "m")
        trace = [one(), one(at_s=3600.0)]
        replay = asyncio.create_task(generator.replay(trace, lambda request, _: seen.append(request)))
        await asyncio.sleep(0.5)
        replay.cancel()
        await asyncio.wait([replay])

    asyncio.run(asyncio.wait_for(cancelled(), timeout=10.0))
    assert seen == []
