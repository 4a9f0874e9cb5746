"""Ends a replica whose engine has died or hangs: Serve starts another, and who waits here goes on elsewhere at once.

A replica with a dead engine fails within milliseconds and so looks the least loaded of all: between two of Serve's
health checks it would draw and fail every request. One with an engine that hangs passes those checks for ever.
"""

import asyncio
import logging
import os
import time
from typing import Any

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_ASK_S = 1.0
_STALL_S = 1.0
# Errors of requests that were in flight go out before the process does.
_LAST_WORDS_S = 0.3


async def watch_engine(client: Any, silence_s: float) -> None:
    """Return when the engine is of no more use.

    Args:
        client: the AsyncLLM.
        silence_s: an engine that answers nothing for so long hangs. It answers between two steps.
    """
    answer: asyncio.Task[Any] | None = None
    answered_s = asked_s = polled_s = time.monotonic()
    while True:
        await asyncio.sleep(_POLL_S)
        now_s = time.monotonic()
        if now_s - polled_s > _STALL_S:
            asked_s = now_s  # it was this process that stood still, and an answer may wait to be read
        polled_s = now_s
        if client.errored:
            logger.error("the engine has died: this replica ends")
            return
        if answer is None and now_s - asked_s >= _ASK_S:
            asked_s, answer = now_s, asyncio.create_task(client.is_paused())
        if answer is not None and answer.done():
            answer.exception()  # of an engine that dies
            answered_s, answer = now_s, None
        if answer is not None and now_s - max(answered_s, asked_s) > silence_s:
            logger.error("the engine has said nothing for %g s: this replica ends", silence_s)
            return


async def end_with_engine(client: Any, silence_s: float) -> None:
    """End this process when its engine is of no more use."""
    await watch_engine(client, silence_s)
    await asyncio.sleep(_LAST_WORDS_S)
    os._exit(1)
