"""Tandem's Prometheus metrics, and one page of the metrics of all processes."""

import itertools
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric

_LATENCY_BUCKETS_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 30, 60)
_TPOT_BUCKETS_S = (0.002, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1, 2)
_TOKENS_BUCKETS = (0, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)

PREFILL_PATH = Counter("tandem_prefill_path", "Prompts by where they were prefilled and why", ["path", "reason"])
PREFILL_FAILURES = Counter("tandem_prefill_failures", "Calls of prefill replicas that ended without an answer")
REMOTE_PREFILL_S = Histogram(
    "tandem_remote_prefill_seconds", "Time of decode's call of a prefill replica", buckets=_LATENCY_BUCKETS_S
)
PREFILL_PLACES = Counter(
    "tandem_prefill_places", "Prompts that asked the prefill queue for a replica, by the outcome", ["outcome"]
)
PREFILL_PLACE_S = Histogram(
    "tandem_prefill_place_seconds", "Time that a prompt waited in the prefill queue", buckets=_LATENCY_BUCKETS_S
)
HANDOFF_S = Histogram(
    "tandem_handoff_seconds",
    "Time from prefill's answer to the first token on decode: KV pull, queueing and one step",
    buckets=_LATENCY_BUCKETS_S,
)
CACHED_TOKENS_ERROR = Histogram(
    "tandem_cached_tokens_error_tokens",
    "Absolute error of the estimated prefix-cache hit against the engine's own count, local prompts",
    buckets=_TOKENS_BUCKETS,
)
CACHE_EVENTS_LOST = Counter(
    "tandem_cache_events_lost", "Batches of an engine's cache events after a gap, late, or of a new engine", ["how"]
)
ROUTED = Counter("tandem_routed", "Answered calls by role of their replica, and why it was chosen", ["to", "reason"])
PREFIX_EXPECTED = Counter(
    "tandem_prefix_expected_tokens", "Prompt tokens that routers expected in the cache of the chosen replica", ["to"]
)
PREFIX_FOUND = Counter("tandem_prefix_found_tokens", "Expected prompt tokens that the engine had cached", ["to"])
PREFIX_FALSE_HITS = Counter(
    "tandem_prefix_false_hits", "Prompts of which the engine had cached fewer tokens than expected", ["to"]
)
PREFILL_BACKLOG = Gauge(
    "tandem_prefill_backlog_tokens", "Prompt tokens that wait on prefill, by this decode replica's estimate"
)
ENGINE_ASLEEP = Gauge("tandem_engine_asleep", "1 while the engine of this replica sleeps, until it is awake")
LINK_FAILURES = Counter("tandem_link_failures", "Breaks of links from this decode replica to prefill replicas", ["why"])
LINK_REPAIRS = Counter("tandem_link_repairs", "Broken links over which KV came again")
RETRIED = Counter("tandem_retried", "Requests that lost their decode replica before any output, answered by another")
RESUMED = Counter("tandem_resumed", "Streams that lost their decode replica, continued by another")
REFUSED = Counter("tandem_refused", "Requests that were refused before they reached an engine", ["reason", "priority"])
WAITING = Gauge("tandem_waiting_requests", "Requests that wait at this replica of the endpoint")
REQUESTS = Counter("tandem_requests", "HTTP requests answered", ["endpoint", "code"])
TTFT_S = Histogram(
    "tandem_ttft_seconds",
    "Time from arrival at the endpoint to the first output token, of streams with n = 1",
    buckets=_LATENCY_BUCKETS_S,
)
TPOT_S = Histogram(
    "tandem_tpot_seconds", "Mean time per output token after the first, one value per stream", buckets=_TPOT_BUCKETS_S
)


def process_metrics(**labels: str) -> list[Metric]:
    """All metrics of this process, each sample with these labels added."""
    families = []
    for family in REGISTRY.collect():
        copy = Metric(family.name, family.documentation, family.type, family.unit)
        copy.samples = [sample._replace(labels={**sample.labels, **labels}) for sample in family.samples]
        families.append(copy)
    return families


def render(pages: Iterable[list[Metric]]) -> bytes:
    """One Prometheus text page from the metrics of many processes; families of one name are joined."""
    merged: dict[str, Metric] = {}
    for family in itertools.chain.from_iterable(pages):
        empty = Metric(family.name, family.documentation, family.type, family.unit)
        merged.setdefault(family.name, empty).samples.extend(family.samples)
    registry: Any = SimpleNamespace(collect=merged.values)  # Prometheus calls no other method here
    return generate_latest(registry)
