"""What the demonstration reads from a metrics page, what it prints, and when it is complete."""

import io
import re
from collections import Counter
from collections.abc import Callable

import pytest
from rich.console import Console

from autoscale.report import Report
from autoscale.traces.trace import TraceRequest
from router.length import PathReason
from serve_app.local.quickstart import Metrics, is_complete, prefill_metrics, run_trace, sample_trace, show
from tests.serve_app.fake_endpoint import FakeEndpoint, refuse

MakeEndpoint = Callable[..., FakeEndpoint]

# Two decode replicas; names that only resemble ours, and parts of our own families that are no totals.
PAGE = """
# TYPE tandem_prefill_path_total counter
tandem_prefill_path_total{path="local",reason="short",replica="a"} 3.0
tandem_prefill_path_total{path="local",reason="short",replica="b"} 4.0
tandem_prefill_path_total{path="local",reason="prefill_backlog",replica="a"} 1.0
tandem_prefill_path_total{path="remote",reason="long",replica="a"} 5.0
# TYPE tandem_prefill_path_created gauge
tandem_prefill_path_created{path="local",reason="short",replica="a"} 1.7e+09
# TYPE vllm:nixl_bytes_transferred histogram
vllm:nixl_bytes_transferred_bucket{engine="0",le="+Inf"} 7.0
vllm:nixl_bytes_transferred_count{engine="0"} 7.0
vllm:nixl_bytes_transferred_sum{engine="0"} 1.5e+06
vllm:nixl_bytes_transferred_sum{engine="1"} 250000.0
# TYPE vllm:nixl_post_time_seconds histogram
vllm:nixl_post_time_seconds_sum{engine="0"} 9.0
"""
METRICS: Metrics = Counter(
    {
        ("path", "local", "short"): 7,
        ("path", "local", "prefill_backlog"): 1,
        ("path", "remote", "long"): 5,
        ("nixl_bytes",): 1_750_000,
    }
)


def report(*, ok: int = 13, errors: dict[str, int] | None = None, has_quantiles: bool = True) -> Report:
    errors = errors or {}
    return Report(
        requests_ok=ok,
        requests_failed=sum(errors.values()),
        duration_s=10.0,
        ttft_s={"p50": 0.0123, "p90": 0.2, "p99": 1.5} if has_quantiles else {},
        tpot_s={"p50": 0.004, "p90": 0.00506, "p99": 0.0061} if has_quantiles else {},
        output_tokens_per_s=123.44,
        requests_per_s=1.3,
        slo_attainment_frac=None,
        goodput_requests_per_s=None,
        errors=errors,
    )


def shown(report: Report, metrics: Metrics = METRICS) -> str:
    console = Console(record=True, width=100, file=io.StringIO())
    show(report, metrics, console)
    return console.export_text()


def rows(text: str) -> list[list[str]]:
    """The cells of each row of the table, without the empty ones."""
    cells = [re.split("[│┃]", line)[1:-1] for line in text.splitlines() if line.startswith(("│", "┃"))]
    return [[cell.strip() for cell in row if cell.strip()] for row in cells]


def test_prefill_metrics_add_up_replicas_and_take_totals_only(make_endpoint: MakeEndpoint) -> None:
    assert prefill_metrics(make_endpoint(metrics_page=PAGE).url + "/metrics") == METRICS


def test_page_without_our_metrics_counts_nothing(make_endpoint: MakeEndpoint) -> None:
    assert prefill_metrics(make_endpoint(metrics_page="python_info 1.0\n").url + "/metrics") == Counter()


def test_table_has_latencies_in_ms_paths_bytes_and_rates() -> None:
    assert rows(shown(report())) == [
        ["p50", "p90", "p99"],
        ["time to first token, TTFT (ms)", "12.3", "200.0", "1500.0"],
        ["time per output token, TPOT (ms)", "4.0", "5.1", "6.1"],
        ["requests ok / failed", "13 / 0"],
        ["prompts prefilled where they decode: prefill had a queue", "1"],
        ["prompts prefilled where they decode: short", "7"],
        ["prompts prefilled by a prefill engine: long", "5"],
        ["KV moved over NIXL", "1.8 MB"],
        ["output tokens/s", "123.4"],
    ]


def test_a_figure_that_was_not_observed_is_a_dash_and_not_zero() -> None:
    table = rows(shown(report(ok=0, errors={"HTTP 500": 2}, has_quantiles=False), Counter()))
    assert table[1:4] == [
        ["time to first token, TTFT (ms)", "-", "-", "-"],
        ["time per output token, TPOT (ms)", "-", "-", "-"],
        ["requests ok / failed", "0 / 2"],
    ]
    assert table[4:] == [["KV moved over NIXL", "0.0 MB"], ["output tokens/s", "123.4"]]


def test_every_cause_of_failure_is_printed_word_by_word() -> None:
    errors = {"HTTP 503": 2, "stream ended without [DONE]": 1, "stream error: [/b] [red]": 3}
    lines = shown(report(errors=errors)).splitlines()
    assert lines[-3:] == [f"{count} x {error}" for error, count in errors.items()]


@pytest.mark.parametrize(
    ("errors", "without", "is_it"),
    [
        ({}, [], True),
        ({}, [("path", "local", "prefill_backlog")], True),
        ({"HTTP 500": 1}, [], False),
        ({}, [("path", "remote", "long")], False),
        ({}, [("path", "local", "prefill_backlog"), ("path", "local", "short")], False),
        ({}, [("nixl_bytes",)], False),
    ],
)
@pytest.mark.parametrize("is_zero", [True, False], ids=["zero", "absent"])
def test_the_demonstration_is_complete_if_no_request_failed_both_paths_were_taken_and_kv_moved(
    errors: dict[str, int], without: list[tuple[str, ...]], is_it: bool, is_zero: bool
) -> None:
    metrics = Counter(METRICS)
    for key in without:
        metrics[key] = 0
        if not is_zero:
            del metrics[key]
    assert is_complete(report(errors=errors), metrics) is is_it


def test_trace_is_replayed_and_reported(make_endpoint: MakeEndpoint) -> None:
    endpoint = make_endpoint(refuse(500, first=1))
    trace = [TraceRequest(at_s=0.1 * n, input_tokens=n + 1, output_tokens=2) for n in range(3)]
    done = run_trace(endpoint.url, "m", trace, Console(file=io.StringIO()))
    assert (done.requests_ok, done.errors) == (2, {"HTTP 500": 1})
    assert [len(body["prompt"]) for body in endpoint.bodies] == [1, 2, 3]
    assert {body["model"] for body in endpoint.bodies} == {"m"}


def test_sample_trace_is_there_from_any_folder(
    tmp_path: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(str(tmp_path))
    assert sample_trace(time_factor=1.0, limit=10)


@pytest.mark.parametrize("reason", PathReason)
def test_every_reason_of_a_path_is_explained(reason: PathReason) -> None:
    assert "prefilled where they decode: " in shown(report(), Counter({("path", "local", str(reason)): 1}))
