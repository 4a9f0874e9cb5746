"""Laws of traces from logs."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from autoscale.traces.log_import import load_openai, load_vllm
from autoscale.traces.trace import TraceRequest


def write(folder: Path, text: str, name: str = "a.log") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def rows(requests: tuple[TraceRequest, ...]) -> list[tuple[float, int, int]]:
    return [(request.at_s, request.input_tokens, request.output_tokens) for request in requests]


def span(start_ns: object = "1795374853985166592", name: str = "llm_request", **attributes: Any) -> dict[str, Any]:
    """As vLLM 0.29 sends it and OpenTelemetry's JSON encoding writes it."""
    values = {"id": {"stringValue": "chatcmpl-a724ab6051d26106"}} | attributes
    names = {
        "id": "gen_ai.request.id",
        "prompt": "gen_ai.usage.prompt_tokens",
        "output": "gen_ai.usage.completion_tokens",
    }
    latency = {"key": "gen_ai.latency.time_to_first_token", "value": {"doubleValue": 11.21721339225769}}
    return {
        **{"traceId": "9dc03ee2289bb32baaf244eda1465671", "spanId": "0aa3fdc2f412fddb", "name": name, "kind": 2},
        **{"startTimeUnixNano": start_ns, "endTimeUnixNano": "1795374865246790129"},
        "attributes": [latency, *({"key": names[key], "value": value} for key, value in values.items())],
    }


def spans(*listed: dict[str, Any]) -> str:
    resource = {"attributes": [{"key": "service.name", "value": {"stringValue": "vllm"}}]}
    scopes = [{"scope": {"name": "vllm.tracing.otel"}, "spans": list(listed)}]
    return json.dumps({"resourceSpans": [{"resource": resource, "scopeSpans": scopes}]}) + "\n"


def of(tokens: int) -> dict[str, str]:
    return {"intValue": str(tokens)}


def test_spans_tell_lengths_and_times_to_the_microsecond(tmp_path: Path) -> None:
    other = {"stringValue": "cmpl-1"}
    choice: dict[str, Any] = {"id": {"stringValue": "chatcmpl-2"}, "prompt": of(18), "output": of(4)}
    text = (
        spans(span("1795374865261936896", id=other, prompt=of(7), output=of(6)), span(name="Load model"))
        + spans(span(prompt=of(20), output=of(8)))
        + spans(span("1795374866781641728", **choice), span("1795374866781641728", **choice))
        + spans(span(id={"stringValue": "cmpl-3"}, prompt=of(5), output=of(0)))
        + "not JSON\n"
    )
    found = load_vllm([write(tmp_path, text)])
    # Spans are sent as requests end; the two choices of the last (n = 2) are one request.
    assert rows(found.requests) == [(0.0, 20, 8), (11.27677, 7, 6), (12.796475, 18, 8)]
    assert found.format == "vLLM's spans"
    assert found.skipped == {"other lines": 1, "other spans": 1, "requests without output": 1}


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (span(prompt=of(20)), "gen_ai.usage.completion_tokens is None: expected a whole number"),
        (span(prompt={"stringValue": "x"}, output=of(1)), "gen_ai.usage.prompt_tokens is 'x': expected a whole number"),
        (span(-1, prompt=of(1), output=of(1)), "startTimeUnixNano is -1: expected a whole number, 0 or more"),
        ({"name": "llm_request"}, "no spans of OpenTelemetry: KeyError 'attributes'"),
    ],
)
def test_a_span_that_is_wrong_is_named_with_its_field(tmp_path: Path, bad: dict[str, Any], says: str) -> None:
    path = write(tmp_path, spans(span(prompt=of(20), output=of(8))) + spans(bad))
    with pytest.raises(ValueError, match=re.escape(f"{path}: line 2: {says}")):
        load_vllm([path])


def test_a_text_log_of_vllm_is_refused_with_what_to_give_instead(tmp_path: Path) -> None:
    path = write(tmp_path, "INFO 11-22 19:14:13 [logger.py:41] Received request chatcmpl-0: prompt: 'a'\n")
    with pytest.raises(ValueError, match=r"1 other lines\): expected the spans .* vLLM's text log is not read"):
        load_vllm([path])


def test_spans_of_several_servers_are_put_together(tmp_path: Path) -> None:
    first = write(tmp_path, spans(span("1795374865000000000", prompt=of(20), output=of(8))))
    second = write(
        tmp_path, spans(span("1795374864500000000", id={"stringValue": "b"}, prompt=of(3), output=of(4))), "b"
    )
    assert rows(load_vllm([first, second]).requests) == [(0.0, 3, 4), (0.5, 20, 8)]


def test_requests_of_one_second_are_spread_over_it(tmp_path: Path) -> None:
    lines = [{"created": 1_700_000_000, "usage": {"prompt_tokens": 1, "completion_tokens": 1}} for _ in range(4)]
    path = write(tmp_path, "".join(json.dumps(line) + "\n" for line in lines))
    assert [request.at_s for request in load_openai([path]).requests] == [0.0, 0.25, 0.5, 0.75]


def litellm(start: object, prompt: object = 10, output: object = 20, **changes: Any) -> dict[str, Any]:
    """LiteLLM's StandardLoggingPayload (its documentation, proxy/logging_spec), without what is about models."""
    name = f"chatcmpl-{start}-{prompt}"
    tokens = {"total_tokens": 30, "prompt_tokens": prompt, "completion_tokens": output}
    usage = {"completion_tokens": output, "prompt_tokens": prompt, "total_tokens": 30, "prompt_tokens_details": None}
    return {
        **{"id": name, "trace_id": None, "call_type": "acompletion", "cache_hit": None, "stream": True},
        **{"status": "success", "startTime": start, "endTime": 1737710447.9, "completionStartTime": 1737710447.1},
        **{"response_time": 0.4, "model": "gpt-4o", "metadata": {"user_api_key_hash": None}, **tokens},
        "messages": [{"role": "user", "content": "Hello"}],
        "response": {"id": name, "created": 1742855151, "object": "chat.completion", "usage": usage},
        **{"error_str": None, "error_information": {"error_code": "", "error_message": ""}, **changes},
    }


def lines(*objects: object) -> str:
    return "".join(each if isinstance(each, str) else json.dumps(each) + "\n" for each in objects)


def test_litellms_log_is_sorted_by_start_and_says_what_it_left_out(tmp_path: Path) -> None:
    text = lines(
        {"message": "LiteLLM: Proxy initialized", "level": "INFO", "timestamp": "2025-01-24T09:20:40.1"},
        litellm(1737710446.5, 11),
        litellm(1737710445.25, 7, 9),
        litellm(1737710447.0, 0, 0, status="failure", error_str="RateLimitError"),
        litellm(1737710448.0, cache_hit=True),
        litellm(1737710449.0, 8, 0, call_type="aembedding"),
        'INFO:     127.0.0.1:1 - "GET /health/liveliness HTTP/1.1" 200 OK\n',
        litellm(1737710446.5, 11),
    )
    found = load_openai([write(tmp_path, text)])
    assert rows(found.requests) == [(0.0, 7, 9), (1.25, 11, 20)]
    assert found.format == "a proxy's log with times in startTime, tokens in the object itself"
    assert found.skipped == {
        "answers from the proxy's cache": 1,
        "failed requests": 1,
        "lines that are no JSON object": 1,
        "objects without usage": 1,
        "repeated ids, but for the last": 1,
        "requests without output": 1,
    }


def spend(start: str, hit: str = "None") -> dict[str, Any]:
    """A row of LiteLLM's spend logs."""
    times = {"startTime": start, "endTime": "2025-01-24 09:20:46.851954"}
    tokens = {"spend": 2.2e-4, "total_tokens": 30, "prompt_tokens": 10, "completion_tokens": 20}
    rest = {"metadata": '{"usage_object": {"prompt_tokens": 10}}', "response": "{}", "status": "success"}
    return {"request_id": f"chatcmpl-{start}", "call_type": "acompletion", "cache_hit": hit, **times, **tokens, **rest}


def test_litellms_spend_logs_are_read(tmp_path: Path) -> None:
    starts = ("2025-01-24 09:20:46.847371", "2025-01-24 09:20:47.000000", "2025-01-24 09:20:48")
    text = lines(spend(starts[0]), spend(starts[1], "True"), spend(starts[2], "False"))
    assert rows(load_openai([write(tmp_path, text)]).requests) == [(0.0, 10, 20), (1.152629, 10, 20)]


def chat(created: object, prompt: object = 5, output: object = 6) -> dict[str, Any]:
    usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": 11}
    message = {"index": 0, "message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop"}
    return {"object": "chat.completion", "created": created, "model": "m", "choices": [message], "usage": usage}


def test_openais_own_answers_of_either_api_are_read(tmp_path: Path) -> None:
    usage = {"input_tokens": 19, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": 4, "total_tokens": 23}
    response = {"id": "resp_9", "object": "response", "created_at": 1795374868, "status": "incomplete", "usage": usage}
    chunk = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1795374866, "usage": None}
    text = lines(chat(1795374866), chunk, response, chat(1795374866, 7))
    found = load_openai([write(tmp_path, text)])
    # Times are whole seconds: two requests of one second are put half a second apart.
    assert rows(found.requests) == [(0.0, 5, 6), (0.5, 7, 6), (2.0, 19, 4)]
    assert found.skipped == {"objects without usage": 1}


TIMES = [
    ("2025-01-24T09:20:46Z", "2025-01-24T10:20:47.5+01:00"),
    ("2025-01-24 09:20:46", "2025-01-24 09:20:47.500"),
    (1737710446, 1737710447.5),
    ("1737710446", "1737710447.5"),
    (1737710446000, 1737710447500),
    (1737710446000000, 1737710447500000),
    (1737710446000000000, 1737710447500000000),
]


@pytest.mark.parametrize(("first", "second"), TIMES)
def test_times_are_iso_or_since_1970_in_any_unit(tmp_path: Path, first: object, second: object) -> None:
    usage = {"prompt_tokens": 1, "completion_tokens": 2}
    text = lines(*({"timestamp": at, "usage": usage} for at in (first, second)))
    assert rows(load_openai([write(tmp_path, text)]).requests) == [(0.0, 1, 2), (1.5, 1, 2)]


def test_the_time_of_a_nested_answer_is_that_of_its_record(tmp_path: Path) -> None:
    def entry(at: str, status: int = 200) -> dict[str, Any]:
        asked = {"method": "POST", "body": {"metadata": {"timestamp": "1999-01-01"}}}
        return {"request": asked, "ts": at, "status": status, "response": {"body": chat(1795374866)}}

    text = lines(entry("2025-01-24T09:20:46.5Z"), entry("2025-01-24T09:20:47Z", 502), entry("2025-01-24T09:20:46Z"))
    found = load_openai([write(tmp_path, text)])
    assert rows(found.requests) == [(0.0, 5, 6), (0.5, 5, 6)]
    assert found.format == "a proxy's log with times in ts, tokens in response.body.usage"
    assert found.skipped == {"failed requests": 1}


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (chat(1795374866, "x"), "usage.prompt_tokens is 'x': expected a whole number, 0 or more"),
        (chat(1795374866, 5, -1), "usage.completion_tokens is -1: expected a whole number, 0 or more"),
        (chat(1795374866, 5, 1.5), "usage.completion_tokens is 1.5: expected a whole number, 0 or more"),
        (chat(1795374866, True), "usage.prompt_tokens is True: expected a whole number, 0 or more"),
        (chat("yesterday"), "created is 'yesterday': expected an ISO time, or seconds since 1970"),
        (chat(None), "created is None: expected an ISO time, or seconds since 1970"),
        (chat(float("nan")), "created is nan: expected an ISO time, or seconds since 1970"),
    ],
)
def test_a_request_that_is_wrong_is_named_with_its_field(tmp_path: Path, bad: dict[str, Any], says: str) -> None:
    path = write(tmp_path, lines(chat(1795374866), "\n", bad))
    with pytest.raises(ValueError, match=re.escape(f"{path}: line 3: {says}")):
        load_openai([path])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no request with both lengths (it is empty): expected JSON objects"),
        ("hello\n[1]\n", "no request with both lengths (2 lines that are no JSON object): expected JSON objects"),
        ('{"usage": {"prompt_tokens": 1, "completion_tokens": 1}}\n', "line 1: no time: expected one of startTime, "),
        (None, "cannot be read: "),
    ],
)
def test_a_file_without_requests_is_named(tmp_path: Path, text: str | None, says: str) -> None:
    path = tmp_path / "none.jsonl" if text is None else write(tmp_path, text)
    with pytest.raises(ValueError, match=re.escape(f"{path}: {says}")):
        load_openai([path])


@pytest.mark.parametrize(
    "data",
    [b"no gzip", gzip.compress(b"x" * 1000)[:-12], gzip.compress(b"x")[:10] + b"\xff" * 9],
    ids=["another format", "cut off", "broken"],
)
def test_a_broken_gzip_is_named(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "a.log.gz"
    path.write_bytes(data)
    for load in (load_vllm, load_openai):
        with pytest.raises(ValueError, match=re.escape(f"{path}: cannot be read: ")):
            load([path])
