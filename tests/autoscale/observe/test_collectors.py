"""Gauges from other sources than the replicas' own reports."""

import json
import os
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

import pytest
from pydantic import TypeAdapter

from autoscale.observe.collectors import CollectorConfig, read_gauges, read_vector
from autoscale.observe.ray_collectors import COLLECTORS, collect

CONFIG: TypeAdapter[Any] = TypeAdapter(CollectorConfig)


def vector(**values: str) -> bytes:
    series = [{"metric": {"replica": name, "gpu": "0"}, "value": [1.0, value]} for name, value in values.items()]
    return json.dumps({"status": "success", "data": {"resultType": "vector", "result": series}}).encode()


def test_a_vector_has_a_value_for_each_replica() -> None:
    assert read_vector(vector(a="0.5", b="1"), "replica") == {"a": 0.5, "b": 1.0}
    assert read_vector(vector(a="0.5"), "pod") == {}  # no series has that label
    assert read_vector(vector(a="NaN", b="+Inf", c="2"), "replica") == {"c": 2.0}


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


def test_a_file_names_replicas_and_gauges() -> None:
    assert read_gauges('{"a": {"sm_activity_frac": 0.4}}') == {"a": {"sm_activity_frac": 0.4}}
    with pytest.raises(ValueError, match=r"a\.sm_activity"):
        read_gauges('{"a": {"sm_activity": 0.4}}')
    with pytest.raises(ValueError, match=r"a\.kv_usage_frac"):
        read_gauges('{"a": {"kv_usage_frac": "much"}}')


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", '"nan"'])
def test_a_file_with_a_number_that_is_not_finite_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match=r"a\.kv_usage_frac: Input should be a finite number"):
        read_gauges(f'{{"a": {{"kv_usage_frac": {value}}}}}')


@pytest.fixture(name="prometheus")
def _prometheus() -> Iterator[str]:
    """A server that answers two queries."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            (query,) = parse_qs(urlparse(self.path).query)["query"]
            answer = {"sum(x)": vector(a="0.25"), "y": vector(a="7", b="9")}.get(query)
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


def test_prometheus_answers_one_query_for_each_gauge(prometheus: str) -> None:
    queries = {"sm_activity_frac": "sum(x)", "running_requests": "y"}
    config = CONFIG.validate_python({"kind": "prometheus", "url": prometheus, "queries": queries})
    assert collect(config) == (
        {"a": {"sm_activity_frac": 0.25, "running_requests": 7.0}, "b": {"running_requests": 9.0}},
        None,
    )


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
    gauges, reason = collect(CONFIG.validate_python({"kind": "prometheus", **fields}))
    assert gauges == {} and reason is not None and reason.startswith("collector prometheus: ") and cause in reason


def test_a_file_counts_while_it_is_new(tmp_path: Path) -> None:
    path = tmp_path / "gauges.json"
    config = CONFIG.validate_python({"kind": "file", "path": str(path)})
    gauges, reason = collect(config)
    assert gauges == {} and reason is not None and "No such file" in reason
    path.write_text('{"a": {"kv_usage_frac": 0.9}}')
    assert collect(config) == ({"a": {"kv_usage_frac": 0.9}}, None)
    os.utime(path, (time.time() - 60.0,) * 2)
    gauges, reason = collect(config)
    assert gauges == {} and reason is not None and "written 60 s ago" in reason


def test_every_kind_has_a_collector() -> None:
    assert collect(CONFIG.validate_python({"kind": "ray"})) == ({}, None)
    assert set(COLLECTORS) == {"ray", "prometheus", "file"}
