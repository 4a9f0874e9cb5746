"""What the tests on real engines ask of an endpoint: prompts, requests, and what its metrics say."""

import asyncio
import random
import time
import urllib.request
from collections.abc import Callable
from typing import Any

from prometheus_client.parser import text_string_to_metric_families


def prompt_ids(length: int, seed: int) -> list[int]:
    """Random token ids that are no special tokens of the tiny model."""
    rng = random.Random(seed)
    return [rng.randrange(300, 1000) for _ in range(length)]


def total(app: Any, *names: str, **labels: str) -> float:
    """The sum over every sample with one of these names and these labels on the application's metrics page."""
    return sum(value for have, value in samples(app, *names) if labels.items() <= have.items())


def samples(app: Any, *names: str) -> list[tuple[dict[str, str], float]]:
    """Every sample with one of these names: its labels and its value."""
    with urllib.request.urlopen(f"{app.url}/metrics", timeout=30) as response:
        page = response.read().decode()
    return [
        (dict(sample.labels), sample.value)
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name in names
    ]


async def eventually(holds: Callable[[], bool], within_s: float = 10.0) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.2)
