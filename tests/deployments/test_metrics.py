"""One Prometheus page from the metrics of several real processes."""

import base64
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from deployments.metrics import render

# Each replica does some work; then its metrics go to the ingress as Ray sends them, pickled.
REPLICA = """
import base64, json, pickle, sys
from deployments.metrics import HANDOFF_S, PREFILL_BACKLOG, PREFILL_PATH, process_metrics
replica, count = sys.argv[1], int(sys.argv[2])
PREFILL_PATH.labels("local", "short").inc(count)
PREFILL_BACKLOG.set(10 * count)
for _ in range(count):
    HANDOFF_S.observe(0.04)
page = process_metrics(role="decode", group="g0", replica=replica)
print(json.dumps(base64.b64encode(pickle.dumps(page)).decode()))
"""


@pytest.fixture(scope="module")
def pages(run_python: Callable[..., Any]) -> list[list[Metric]]:
    return [
        pickle.loads(base64.b64decode(run_python(REPLICA, name, count))) for name, count in (("a", "1"), ("b", "2"))
    ]


def values(page: bytes, sample: str, **labels: str) -> dict[str, float]:
    """Value per replica of the samples with this name and these labels."""
    return {
        found.labels["replica"]: found.value
        for family in text_string_to_metric_families(page.decode())
        for found in family.samples
        if found.name == sample and labels.items() <= found.labels.items()
    }


def test_samples_of_both_processes_are_on_the_page(pages: list[list[Metric]]) -> None:
    page = render(pages)
    assert values(page, "tandem_prefill_path_total", path="local", reason="short") == {"a": 1.0, "b": 2.0}
    assert values(page, "tandem_prefill_backlog_tokens") == {"a": 10.0, "b": 20.0}
    assert values(page, "tandem_handoff_seconds_count") == {"a": 1.0, "b": 2.0}
    assert values(page, "tandem_handoff_seconds_bucket", le="0.03") == {"a": 0.0, "b": 0.0}
    assert values(page, "tandem_handoff_seconds_bucket", le="0.05") == {"a": 1.0, "b": 2.0}


def test_family_of_many_processes_is_declared_once(pages: list[list[Metric]]) -> None:
    declared = [line for line in render(pages).decode().splitlines() if line.startswith("# TYPE ")]
    assert len(declared) == len(set(declared))
    assert "# TYPE tandem_prefill_path_total counter" in declared
    assert "# TYPE tandem_handoff_seconds histogram" in declared


def test_every_sample_carries_the_labels_of_its_process(pages: list[list[Metric]]) -> None:
    for page, replica in zip(pages, "ab", strict=True):
        samples = [sample for family in page for sample in family.samples]
        assert samples
        for sample in samples:
            assert sample.labels.items() >= {"role": "decode", "group": "g0", "replica": replica}.items()


def test_rendering_again_gives_the_same_page(pages: list[list[Metric]]) -> None:
    assert render(pages) == render(pages)


def test_no_process_gives_an_empty_page() -> None:
    assert render([]) == b""


def test_page_carries_unit_and_help(pages: list[list[Metric]]) -> None:
    page = render(pages).decode()
    assert "# HELP tandem_prefill_path_total Prompts by where they were prefilled and why" in page
    assert json.dumps(page).isascii()
