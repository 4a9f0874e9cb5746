"""Reads replicas' gauges from other sources, in the thread of the tick; a source that fails gives no gauges."""

import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
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
    deadline_s = time.monotonic() + config.timeout_s
    gauges: dict[str, dict[str, float]] = {}
    for gauge, query in config.queries.items():
        url = f"{config.url.rstrip('/')}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        timeout_s = max(0.1, deadline_s - time.monotonic())  # a timeout of 0 or less is an error
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:  # noqa: S310 (the url is http or https)
            values = read_vector(answer.read(), config.replica_label)
        for replica, value in values.items():
            gauges.setdefault(replica, {})[gauge] = value
    return gauges


def _file(config: FileCollectorConfig) -> Gauges:
    age_s = time.time() - config.path.stat().st_mtime
    if age_s > config.most_age_s:
        raise ValueError(f"{config.path} was written {age_s:.0f} s ago, and is used for {config.most_age_s:g} s")
    return read_gauges(config.path.read_text())


COLLECTORS: dict[str, Callable[[Any], Gauges]] = {"ray": lambda config: {}, "prometheus": _prometheus, "file": _file}


def collect(config: CollectorConfig) -> tuple[Gauges, str | None]:
    """The gauges of the source, and ``None``; or no gauges, and the reason: then the replicas' own reports count."""
    try:
        return COLLECTORS[config.kind](config), None
    # urllib's own errors are OSErrors. An answer that breaks off, and a port that is no number, are HTTPExceptions.
    except (OSError, ValueError, HTTPException) as error:
        return {}, f"collector {config.kind}: {error}"
