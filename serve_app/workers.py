"""Processes that simulations run in."""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager


@contextmanager
def worker_pool(jobs: int | None) -> Iterator[ProcessPoolExecutor]:
    """A pool of so many processes, as many as cores without a number; an interrupt ends them.

    They ignore the interrupt itself, which a terminal sends to all, or each would print where it was.
    """
    pool = ProcessPoolExecutor(
        max_workers=jobs or os.cpu_count(),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=signal.signal,
        initargs=(signal.SIGINT, signal.SIG_IGN),
    )
    try:
        yield pool
    except KeyboardInterrupt:
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
