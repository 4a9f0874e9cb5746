"""A pool whose replicas crash again and again starts them ever more slowly; Serve alone starts a new one at once."""

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

_WINDOW_S = 600.0  # crashes older than this do not count
# A replica that was ready for this long did not crash, however it ended: a replica killed from outside is needed soon.
_SETTLED_S = 20.0
_FREE_CRASHES = 2  # crashes in the window that delay nothing: mishaps
_MAX_BACKOFF_S = 60.0  # longest delay of a start


def backoff_s(crashes: int) -> float:
    """Delay of a pool's next start after this number of crashes in the window."""
    return 0.0 if crashes <= _FREE_CRASHES else min(_MAX_BACKOFF_S, 2.0 ** (crashes - _FREE_CRASHES - 1))


class StartBackoff:
    """One replica's start, from its constructor on.

    A replica that is killed cannot report it. So each replica writes a note into Ray's key-value store after its delay,
    and deletes the note once it has served for 20 s or Serve ends it. A note of a replica that no longer exists is a
    crash.
    """

    def __init__(self) -> None:
        context = serve.get_replica_context()
        self._app, self._deployment = context.app_name, context.deployment
        self._prefix = f"tandem:starts:{self._app}:{self._deployment}:".encode()
        self._key = self._prefix + context.replica_id.unique_id.encode()
        self._settling: asyncio.Task[None] | None = None
        self._has_failed = False

    async def wait(self) -> None:
        """Delay the start, before anything costly, if replicas of this pool have crashed in the window."""
        crashes = await asyncio.to_thread(self._crashes)
        wait_s = backoff_s(crashes)
        if wait_s:
            logger.warning(
                "%d replicas of %s ended before they had served for %g s, in the last %g minutes, so this one starts "
                "%g s later; their logs may say why",
                *(crashes, self._deployment, _SETTLED_S, _WINDOW_S / 60.0, wait_s),
            )
            await asyncio.sleep(wait_s)
        ray_kv.put(self._key, json.dumps(time.time()).encode())

    @contextmanager
    def judged(self) -> Iterator[None]:
        """Around the part of a start that may fail: a failure counts as a crash."""
        try:
            yield
        except Exception:
            self._has_failed = True
            raise

    def ready(self) -> None:
        """The replica serves from now on."""
        self._settling = asyncio.create_task(self._settle())

    def leave(self) -> None:
        """Serve ends the replica, ready or not."""
        if self._settling is not None:
            self._settling.cancel()
        if not self._has_failed:
            with suppress(Exception):  # Ray's store does not answer: this counts as a crash
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
