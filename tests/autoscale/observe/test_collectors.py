"""Figures from other sources than the replicas' own reports."""

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

import pytest
from pydantic import TypeAdapter

from autoscale.observe.collected import Collected, checked
from autoscale.observe.collectors import CollectorConfig, read_figures, read_single, read_vector
from autoscale.observe.overrides import strangers, with_collected
from autoscale.observe.ray_collectors import Source
from autoscale.types import Latency, Snapshot, Traffic
from kvtransfer.topology import Role

CONFIG: TypeAdapter[Any] = TypeAdapter(CollectorConfig)
OWN = "tests.autoscale.own:Figures"
NAN = float("nan")


def vector(**values: str) -> bytes:
    series = [{"metric": {"replica": name, "gpu": "0"}, "value": [1.0, value]} for name, value in values.items()]
    return json.dumps({"status": "success", "data": {"resultType": "vector", "result": series}}).encode()


def source(**fields: Any) -> Source:
    return Source(CONFIG.validate_python(fields))


def asked(source: Source) -> tuple[Collected, dict[str, str]]:
    """What a source says once a call of it has ended."""
    source.read()
    deadline = time.monotonic() + 30
    while source._call is not None and not source._call.done():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return source.read()


def test_a_vector_has_a_value_for_each_replica() -> None:
    assert read_vector(vector(a="0.5", b="1"), "replica") == {"a": 0.5, "b": 1.0}
    assert read_vector(vector(a="0.5"), "pod") == {}  # no series has that label


def test_a_figure_of_the_service_is_the_only_series_or_a_scalar() -> None:
    assert read_single(vector(a="0.5")) == 0.5
    assert read_single(vector()) is None
    scalar = {"status": "success", "data": {"resultType": "scalar", "result": [1.0, "3"]}}
    assert read_single(json.dumps(scalar).encode()) == 3.0
    with pytest.raises(ValueError, match="the query yields 2 series: add them up"):
        read_single(vector(a="1", b="2"))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"<html>", "Expecting value"),
        (b"[]", "not in Prometheus' format"),
        (b'{"status": "error", "error": "parse error"}', "'parse error'"),
        (b'{"status": "success", "data": {"resultType": "matrix", "result": []}}', "yields a matrix"),
        (vector(a="many"), "could not convert"),
    ],
)
def test_a_body_that_is_no_answer_is_refused_with_the_reason(body: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_vector(body, "replica")


def test_a_file_has_figures_of_replicas_and_of_the_service() -> None:
    text = '{"a": {"sm_activity_frac": 0.4}, "service": {"ttft_s": 0.3}}'
    expected = Collected(replicas={"a": {"sm_activity_frac": 0.4}}, service={"ttft_s": 0.3}, observed_s=5.0)
    assert read_figures(text, 5.0) == expected
    with pytest.raises(ValueError, match=r"a\.kv_usage_frac"):
        read_figures('{"a": {"kv_usage_frac": "much"}}', 5.0)
    with pytest.raises(ValueError, match="Invalid JSON"):
        read_figures('{"a": {"kv_us', 5.0)


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("kv_usage_frac", NAN, "is not finite"),
        ("running_requests", math.inf, "is not finite"),
        ("decode_tokens_per_s", -0.5, "is negative"),
        ("kv_usage_frac", 1.01, "is a share above 1"),
        ("waiting_requests", "3", "is no number"),
        ("waiting_requests", True, "is no number"),
        ("sm_activity", 0.5, "is unknown"),
    ],
)
def test_a_figure_that_cannot_be_true_is_dropped_alone_and_named(name: str, value: Any, fault: str) -> None:
    sound = {"prefill_tokens_per_s": 5.0}
    figures, faults = checked(Collected(replicas={"a": {name: value, **sound}, "b": {name: value}}))
    assert figures.replicas == {"a": sound, "b": {}}
    (text,) = faults.values()  # one example of a cause
    assert text.startswith(f"{name} of replica a is {value!r}: it {fault}")


def test_a_service_figure_that_cannot_be_true_is_dropped_too() -> None:
    figures, faults = checked(Collected(service={"ttft_s": NAN, "tpot_s": 0.05, "requests_per_s": -1.0}))
    assert figures.service == {"tpot_s": 0.05}
    assert list(faults) == ["ttft_s is not finite", "requests_per_s is negative"]


@pytest.mark.parametrize("answer", [None, {"a": {}}, Collected(observed_s=NAN), Collected(observed_s=-1.0)])
def test_an_answer_without_a_form_or_a_time_is_refused(answer: Any) -> None:
    with pytest.raises(ValueError, match=r"which is no Collected|observed_s is "):
        checked(answer)


def test_collected_figures_replace_those_of_the_replicas(make_snapshot: Callable[..., Snapshot]) -> None:
    stats = {Role.DECODE: {"decode_tokens_per_s": 10.0, "prefill_tokens_per_s": 1.0}}
    snapshot = make_snapshot(
        1,
        2,
        stats=stats,
        latency=Latency(ttft_s=1.0, tpot_s=0.1, ttft_mean_s=0.5),
        traffic=Traffic(requests_per_s=1.0, input_tokens_mean=100.0, cached_frac=0.5, is_whole=False),
    )
    collected = Collected(
        replicas={"d0": {"decode_tokens_per_s": 99.0}, "stranger": {"decode_tokens_per_s": 1.0}},
        service={"tpot_s": 0.2, "requests_per_s": 7.0, "output_tokens_mean": 30.0},
    )
    seen = with_collected(snapshot, collected)
    rates = [(each.decode_tokens_per_s, each.prefill_tokens_per_s) for each in seen.pools[1].replicas]
    assert rates == [(99.0, 1.0), (10.0, 1.0)]
    assert seen.latency == Latency(ttft_s=1.0, tpot_s=0.2, ttft_mean_s=0.5)
    assert seen.traffic == Traffic(
        requests_per_s=7.0, input_tokens_mean=100.0, output_tokens_mean=30.0, cached_frac=0.5, is_whole=False
    )
    assert with_collected(snapshot, Collected()) is snapshot


def test_figures_of_no_running_replica_are_named() -> None:
    some = Collected(replicas={"a": {}, "b": {}})
    assert strangers(some, {"d0", "d1"}) == "no figure is of a running replica: it names a, and d0 runs"
    assert strangers(some, {"b", "d1"}) is None
    assert strangers(some, set()) is None  # the service sleeps
    assert strangers(Collected(service={"ttft_s": 1.0}), {"d0"}) is None


@pytest.fixture(name="prometheus")
def _prometheus() -> Iterator[str]:
    """A server that answers two queries."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            (query,) = parse_qs(urlparse(self.path).query)["query"]
            answer = {"sum(x)": vector(a="0.25"), "y": vector(a="7", b="9"), "one": vector(a="0.4")}.get(query)
            if query == "slow":
                time.sleep(1.0)
            self.send_response(200 if answer or query == "cut" else 400)
            if query == "cut":
                self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(answer or b"{}")

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


def test_prometheus_answers_one_query_for_each_figure(prometheus: str) -> None:
    queries = {"sm_activity_frac": "sum(x)", "decode_tokens_per_s": "y"}
    figures, faults = asked(
        source(kind="prometheus", url=prometheus, queries=queries, service_queries={"ttft_s": "one"})
    )
    assert faults == {}
    assert figures.replicas == {
        "a": {"sm_activity_frac": 0.25, "decode_tokens_per_s": 7.0},
        "b": {"decode_tokens_per_s": 9.0},
    }
    assert figures.service == {"ttft_s": 0.4}


def test_prometheus_without_a_query_is_refused() -> None:
    with pytest.raises(ValueError, match="give queries or service_queries"):
        source(kind="prometheus", url="http://x")


@pytest.mark.parametrize(
    ("url", "query", "cause"),
    [
        (None, "no such", "HTTP Error 400"),
        (None, "slow", "timed out"),
        (None, "cut", "IncompleteRead"),
        ("http://127.0.0.1:9", "y", "refused"),
        ("http://127.0.0.1:9o90", "y", "nonnumeric port: '9o90'"),
    ],
)
def test_a_source_that_does_not_answer_adds_nothing_and_the_cause_is_reported(
    prometheus: str, url: str | None, query: str, cause: str
) -> None:
    fields = {"url": url or prometheus, "queries": {"kv_usage_frac": query}, "timeout_s": 0.3}
    figures, faults = asked(source(kind="prometheus", **fields))
    (text,) = faults.values()
    assert figures == Collected() and text.startswith("collector prometheus: ") and cause in text


def test_a_file_counts_while_it_is_new(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    collector = source(kind="file", path=str(path))
    figures, faults = asked(collector)
    assert figures == Collected() and "No such file" in str(faults)
    path.write_text('{"a": {"kv_usage_frac": 0.9, "waiting_requests": NaN}}')
    # A call that began before the change may still give its answer.
    assert until(collector, "waiting_requests of replica a is nan").replicas == {"a": {"kv_usage_frac": 0.9}}
    os.utime(path, (time.time() - 60.0,) * 2)
    assert until(collector, "its last answer is older than 30 s (most_age_s)") == Collected()


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """While it is closed, the collector of one's own blocks."""
    from tests.autoscale.own import Figures

    Figures.calls = 0
    Figures.may_go_on.set()
    yield Figures.may_go_on
    Figures.may_go_on.set()


def test_a_collector_of_ones_own_is_typed_and_asked(gate: threading.Event) -> None:
    with pytest.raises(ValueError, match=r"requests_per_s\n.*Input should be a valid number"):
        source(kind=OWN, requests_per_s="many")
    with pytest.raises(ValueError, match="collector json:dumps is no Collector"):
        source(kind="json:dumps")
    figures, faults = asked(source(kind=OWN, requests_per_s=3.0))
    assert (dict(figures.service), faults) == ({"requests_per_s": 3.0}, {})


def until(collector: Source, words: str) -> Collected:
    """Read a source until a fault of it has these words; the figures then."""
    deadline = time.monotonic() + 30
    while words not in str((answer := collector.read())[1]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return answer[0]


def test_a_read_never_waits_and_the_last_good_answer_counts_until_it_is_too_old(gate: threading.Event) -> None:
    from tests.autoscale.own import Figures

    collector = source(kind=OWN, requests_per_s=3.0, most_age_s=3.0, timeout_s=0.2)
    gate.clear()
    assert collector.read() == (Collected(), {})  # though the call has not ended
    gate.set()
    assert asked(collector)[0].service == {"requests_per_s": 3.0}
    gate.clear()
    calls = Figures.calls
    assert until(collector, "takes longer than 0.2 s (timeout_s)").service == {"requests_per_s": 3.0}
    assert until(collector, "its last answer is older than 3 s (most_age_s)") == Collected()
    assert Figures.calls <= calls + 1  # none begins while one goes on


def test_an_answer_from_the_future_grows_old_like_any_other(gate: threading.Event) -> None:
    collector = source(kind=OWN, requests_per_s=3.0, ahead_s=30.0, most_age_s=0.2)
    collector.read()
    gate.clear()
    assert until(collector, "older than 0.2 s") == Collected()


def test_an_answer_whose_time_is_far_in_the_future_is_not_believed() -> None:
    figures, faults = asked(source(kind=OWN, requests_per_s=3.0, ahead_s=1e6))
    assert figures == Collected()
    assert "more than a minute in the future: give seconds since the epoch" in str(faults)


@pytest.mark.parametrize("fault", ["raise", "exit", "none"])
def test_a_collector_that_fails_is_named(gate: threading.Event, fault: str) -> None:
    figures, faults = asked(source(kind=OWN, fault=fault))
    assert figures == Collected()
    (text,) = faults.values()
    assert text.startswith(f"collector {OWN}: ")
    assert {"raise": "no meter", "exit": "SystemExit: 1", "none": "returned None"}[fault] in text
