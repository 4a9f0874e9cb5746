"""Asks who else knows something of replicas, in the tick's own thread; who does not answer says nothing."""

import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import Any

from autoscale.collectors import (
    CollectorConfig,
    FileCollectorConfig,
    Gauges,
    PrometheusCollectorConfig,
    RayCollectorConfig,
    read_gauges,
    read_vector,
)


def _ray(config: RayCollectorConfig) -> Gauges:
    return {}


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


COLLECTORS: dict[str, Callable[[Any], Gauges]] = {"ray": _ray, "prometheus": _prometheus, "file": _file}


def collect(config: CollectorConfig) -> tuple[Gauges, str | None]:
    """What is known, and why it is nothing where that cannot be had: the replicas' own reports hold then."""
    try:
        return COLLECTORS[config.kind](config), None
    except (OSError, ValueError) as error:  # urllib's own are OSErrors
        return {}, f"collector {config.kind}: {error}"
