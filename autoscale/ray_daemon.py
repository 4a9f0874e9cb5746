"""Runs a function in a daemon thread: a function that never returns keeps no process from ending."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_daemon_thread(call: Callable[[], T], name: str) -> Future[T]:
    """Start a call in a thread of its own, which has this name; the future has its result or its error."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # whatever it is, it belongs to the future's reader
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
