"""A pool whose replicas end young, again and again, starts them ever more slowly; Serve starts a new one at once."""

import asyncio
import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ray import serve
from ray.experimental import internal_kv

from router.ray_coordinator import is_alive

logger = logging.getLogger(__name__)

_WINDOW_S = 600.0
# A replica that has been ready for so long is no crash, however it ends: who was killed from outside is needed soon.
_GROWN_UP_S = 20.0
# Within the window: mishaps.
_FREE_CRASHES = 2
_MOST_S = 60.0


def backoff_s(crashes: int) -> float:
    """How long the next replica of a pool waits, after so many of its replicas have ended young of late."""
    return 0.0 if crashes <= _FREE_CRASHES else min(_MOST_S, 2.0 ** (crashes - _FREE_CRASHES - 1))


class StartBackoff:
    """One replica's start, from its constructor on.

    A replica that is killed cannot say so. So each leaves a note in Ray's key-value store when it begins, after its
    wait, and takes it back once it has grown up or is told to go: the notes of those that are no more are crashes.
    """

    def __init__(self) -> None:
        context = serve.get_replica_context()
        self._app, self._deployment = context.app_name, context.deployment
        self._prefix = f"tandem:starts:{self._app}:{self._deployment}:".encode()
        self._key = self._prefix + context.replica_id.unique_id.encode()
        self._growing: asyncio.Task[None] | None = None
        self._has_failed = False

    async def wait(self) -> None:
        """Wait before anything dear is started, if this pool's replicas have crashed of late."""
        crashes = await asyncio.to_thread(self._crashes)
        wait_s = backoff_s(crashes)
        if wait_s:
            logger.warning(
                "%d replicas of %s ended before they had served for %g s, in the last %g minutes, so this one waits "
                "%g s; their logs may say why",
                crashes,
                self._deployment,
                _GROWN_UP_S,
                _WINDOW_S / 60.0,
                wait_s,
            )
            await asyncio.sleep(wait_s)
        internal_kv._internal_kv_put(self._key, json.dumps(time.time()).encode())

    @contextmanager
    def judged(self) -> Iterator[None]:
        """Around what may fail of a start: that is a crash, though Serve ends the replica in peace then."""
        try:
            yield
        except Exception:
            self._has_failed = True
            raise

    def ready(self) -> None:
        """It serves from now on."""
        self._growing = asyncio.create_task(self._grow_up())

    def leave(self) -> None:
        """It is told to go, whether it was ready or not."""
        if self._growing is not None:
            self._growing.cancel()
        if not self._has_failed:
            with suppress(Exception):  # Ray's store is away: this counts as a crash
                internal_kv._internal_kv_del(self._key)

    async def _grow_up(self) -> None:
        await asyncio.sleep(_GROWN_UP_S)
        internal_kv._internal_kv_del(self._key)

    def _crashes(self) -> int:
        now_s, crashes = time.time(), 0
        for key in internal_kv._internal_kv_list(self._prefix):
            kept = internal_kv._internal_kv_get(key)
            if kept is None or is_alive(self._app, self._deployment, key.removeprefix(self._prefix).decode()):
                continue
            if now_s - json.loads(kept) < _WINDOW_S:
                crashes += 1
            else:
                internal_kv._internal_kv_del(key)
        return crashes
