"""An event loop whose clock jumps to the next timer, so that emulated engines keep exact time on a busy machine."""

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

# Modules that read a clock while an emulated engine is measured.
_CLOCKS = ("deployments.emulated.client", "deployments.profiler.engines", "deployments.profiler.rounds")


class VirtualLoop(asyncio.SelectorEventLoop):
    """Waits for nothing: when all tasks wait, the time is that of the next timer."""

    now_s = 0.0

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self.now_s

    def _run_once(self) -> None:
        # The timers are a heap by time. Needs asyncio's own fields, as every loop with another clock.
        ready, scheduled = self._ready, self._scheduled  # type: ignore[attr-defined]
        if not ready and scheduled:
            self.now_s = max(self.now_s, scheduled[0].when())
        super()._run_once()  # type: ignore[misc]


@contextmanager
def virtual_time(monkeypatch: pytest.MonkeyPatch, modules: Sequence[str] = _CLOCKS) -> Iterator[Any]:
    """A function that runs a coroutine in virtual time; ``modules`` keep the loop's time."""
    loop = VirtualLoop()
    clock = SimpleNamespace(time=loop.time, monotonic=loop.time, perf_counter=loop.time)
    for module in modules:
        monkeypatch.setattr(f"{module}.time", clock)

    def run(main: Coroutine[Any, Any, None]) -> None:
        loop.run_until_complete(main)

    try:
        yield run
    finally:
        loop.close()
