"""Delay of a replica's start that grows with the crashes of its pool; Serve itself starts a new replica at once."""

import asyncio
import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ray import serve

from router import ray_kv
from router.ray_coordinator import is_alive

logger = logging.getLogger(__name__)

_WINDOW_S = 600.0  # seconds for which a crash counts
# Time of service, seconds. A replica that ends later was killed from outside: that is no crash, and the next replica
# is needed soon.
_SETTLED_S = 20.0
_FREE_CRASHES = 2  # crashes in the window that cause no delay
_MAX_BACKOFF_S = 60.0  # longest delay of a start, seconds


def backoff_s(crashes: int) -> float:
    """Delay of a pool's next start, seconds, after this number of crashes in the window: 0, 0, 0, 1, 2, 4, ... 60."""
    return 0.0 if crashes <= _FREE_CRASHES else min(_MAX_BACKOFF_S, 2.0 ** (crashes - _FREE_CRASHES - 1))


class StartBackoff:
    """One replica's start, from its constructor on.

    A killed replica cannot report its end. So each replica writes a note into Ray's key-value store after its delay. It
    deletes the note once it has served for 20 s or Serve ends it. A note without its replica is a crash.
    """

    def __init__(self) -> None:
        context = serve.get_replica_context()
        self._app, self._deployment = context.app_name, context.deployment
        self._prefix = f"tandem:starts:{self._app}:{self._deployment}:".encode()
        self._key = self._prefix + context.replica_id.unique_id.encode()
        self._settling: asyncio.Task[None] | None = None
        self._has_failed = False

    async def wait(self) -> None:
        """Delay the start if replicas of this pool have crashed in the window."""
        crashes = await asyncio.to_thread(self._crashes)
        if wait_s := backoff_s(crashes):
            logger.warning(
                "%d replicas of %s ended within %g s of service in the last %g minutes, so this one starts %g s later; "
                "their logs may have the cause",
                *(crashes, self._deployment, _SETTLED_S, _WINDOW_S / 60.0, wait_s),
            )
            await asyncio.sleep(wait_s)
        ray_kv.put(self._key, json.dumps(time.time()).encode())

    @contextmanager
    def failure_is_crash(self) -> Iterator[None]:
        """Context of the part of a start that may fail: an error in it counts as a crash."""
        try:
            yield
        except Exception:
            self._has_failed = True
            raise

    def ready(self) -> None:
        """Mark the start as complete: the replica serves."""
        self._settling = asyncio.create_task(self._settle())

    def leave(self) -> None:
        """Delete the note, unless the start has failed: Serve ends the replica."""
        if self._settling is not None:
            self._settling.cancel()
        if not self._has_failed:
            with suppress(Exception):  # if Ray's store does not answer, this counts as a crash
                ray_kv.delete(self._key)

    async def _settle(self) -> None:
        await asyncio.sleep(_SETTLED_S)
        ray_kv.delete(self._key)

    def _crashes(self) -> int:
        now_s, crashes = time.time(), 0
        for key in ray_kv.keys(self._prefix):
            started = ray_kv.get(key)
            if started is None or is_alive(self._app, self._deployment, key.removeprefix(self._prefix).decode()):
                continue
            if now_s - json.loads(started) < _WINDOW_S:
                crashes += 1
            else:
                ray_kv.delete(key)
        return crashes
