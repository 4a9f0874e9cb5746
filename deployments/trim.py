"""Memory of large bodies goes back to the machine: glibc keeps what is freed around pieces that stay.

Without it an endpoint that had thirty-two bodies of 32 MiB at a time once keeps some of that for ever.
"""

import asyncio
import ctypes
from typing import Any

_LARGE_BYTES = 8 << 20
# It takes tens of milliseconds, in a thread, during which the process gets no other large piece.
_AFTER_S = 5.0


class Trim:
    """One process's."""

    def __init__(self, after_s: float = _AFTER_S) -> None:
        self._after_s = after_s
        # Other C libraries have no such function, and some of them no need for it.
        self._trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._due: asyncio.Task[None] | None = None

    def freed(self, count: int) -> None:
        """So many bytes are needed no more, or will not be in a moment."""
        if count >= _LARGE_BYTES and self._trim is not None and (self._due is None or self._due.done()):
            self._due = asyncio.create_task(self._later())

    async def _later(self) -> None:
        await asyncio.sleep(self._after_s)
        await asyncio.to_thread(self._trim, 0)
