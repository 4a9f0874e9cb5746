"""Reads replicas' gauges from other sources, in the thread of the tick; a source that fails adds nothing."""

import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import Any

from autoscale.observe.collectors import (
    CollectorConfig,
    FileCollectorConfig,
    Gauges,
    PrometheusCollectorConfig,
    read_gauges,
    read_vector,
)


def _prometheus(config: PrometheusCollectorConfig) -> Gauges:
    until_s = time.monotonic() + config.timeout_s
    found: dict[str, dict[str, float]] = {}
    for gauge, query in config.queries.items():
        url = f"{config.url.rstrip('/')}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        with urllib.request.urlopen(url, timeout=max(0.1, until_s - time.monotonic())) as answer:  # noqa: S310 (http alone)
            values = read_vector(answer.read(), config.replica_label)
        for replica, value in values.items():
            found.setdefault(replica, {})[gauge] = value
    return found


def _file(config: FileCollectorConfig) -> Gauges:
    age_s = time.time() - config.path.stat().st_mtime
    if age_s > config.most_age_s:
        raise ValueError(f"{config.path} was written {age_s:.0f} s ago, and counts for {config.most_age_s:g} s")
    return read_gauges(config.path.read_text())


COLLECTORS: dict[str, Callable[[Any], Gauges]] = {"ray": lambda config: {}, "prometheus": _prometheus, "file": _file}


def collect(config: CollectorConfig) -> tuple[Gauges, str | None]:
    """The gauges of the source, and the reason if they cannot be read; then the replicas' own reports count."""
    try:
        return COLLECTORS[config.kind](config), None
    except (OSError, ValueError) as error:  # urllib's own are OSErrors
        return {}, f"collector {config.kind}: {error}"
