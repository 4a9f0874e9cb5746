"""Handlers of signals for the time of a block."""

import signal
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager


@contextmanager
def signals_handled(numbers: Collection[int], handle: Callable[[int], None]) -> Iterator[None]:
    """Call ``handle`` with each of these signals that comes during the block; only for the main thread."""
    before = {number: signal.signal(number, lambda received, _: handle(received)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
