"""Samples of a running application, taken beside a load."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def sampling(sample: Callable[[float], T], every_s: float) -> Iterator[list[T]]:
    """A sample at regular times while the block runs, in a list that grows; the first is there when the block begins.

    ``sample``: gets the time since the start, seconds. Its errors are raised at the end of the block: figures from a
    part of the samples would look too good.
    """
    started_s = time.monotonic()
    samples = [sample(0.0)]
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(every_s - (time.monotonic() - started_s) % every_s):
            samples.append(sample(time.monotonic() - started_s))

    with ThreadPoolExecutor(1) as thread:
        sampled = thread.submit(run)
        try:
            yield samples
        finally:
            ended.set()
        sampled.result()
