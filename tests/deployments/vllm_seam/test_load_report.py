"""The header with the load of the engine, in the format that a client asks for."""

import json

import pytest

pytestmark = pytest.mark.vllm


def test_a_client_gets_the_load_in_its_format_and_no_header_without_one() -> None:
    from prometheus_client import Gauge

    from deployments.vllm_seam.load_report import load_headers

    usage = Gauge("vllm:kv_cache_usage_perc", "KV in use.", ["engine"])
    usage.labels("0").set(0.25)
    (header,) = load_headers([("endpoint-load-metrics-format", "json")])
    assert header[0] == "endpoint-load-metrics"
    assert json.loads(header[1].removeprefix("JSON "))["named_metrics"]["kv_cache_usage_perc"] == 0.25
    assert load_headers([("x-other", "y"), ("endpoint-load-metrics-format", "TEXT")]) == (
        ("endpoint-load-metrics", "TEXT named_metrics.kv_cache_usage_perc=0.25"),
    )
    for none in ([], [("endpoint-load-metrics-format", "xml")], [("x-other", "JSON")]):
        assert load_headers(none) == ()
