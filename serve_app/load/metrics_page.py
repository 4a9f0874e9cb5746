"""Reads a metrics page."""

import urllib.request

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


def scrape(url: str, *names: str) -> list[Sample]:
    """Every sample with one of these names on the page at ``url``."""
    with urllib.request.urlopen(url, timeout=30) as response:  # noqa: S310
        page = response.read().decode()
    return [
        sample for family in text_string_to_metric_families(page) for sample in family.samples if sample.name in names
    ]
