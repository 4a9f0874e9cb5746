"""A pool whose replicas end again and again starts them ever more slowly; Serve starts a new one at once."""

import asyncio
import json
import logging
import time
from collections.abc import Sequence

from ray import serve
from ray.experimental import internal_kv

logger = logging.getLogger(__name__)

_WINDOW_S = 600.0
# Starts per replica within the window that need no explanation: one, an update, two mishaps.
_FREE_STARTS = 4
_MOST_S = 60.0


def backoff_s(started_s: Sequence[float], replicas: int, now_s: float) -> float:
    """How long the next replica of a pool waits before it starts its engine.

    Args:
        started_s: when its replicas were started.
        replicas: how many it is to have.
        now_s: by the same clock.
    """
    recent = sum(now_s - at_s < _WINDOW_S for at_s in started_s)
    beyond = recent / max(1, replicas) - _FREE_STARTS
    return 0.0 if beyond < 0.0 else min(_MOST_S, 2.0**beyond)


async def back_off() -> None:
    """Wait in a replica's constructor, and note that it has been started."""
    context, now_s = serve.get_replica_context(), time.time()
    pool = f"tandem:starts:{context.app_name}:{context.deployment}:".encode()
    started_s = []
    for key in internal_kv._internal_kv_list(pool):
        kept = internal_kv._internal_kv_get(key)
        at_s = json.loads(kept) if kept else 0.0
        if now_s - at_s < _WINDOW_S:
            started_s.append(at_s)
        else:
            internal_kv._internal_kv_del(key)
    internal_kv._internal_kv_put(pool + context.replica_id.unique_id.encode(), json.dumps(now_s).encode())
    wait_s = backoff_s(started_s, context.world_size, now_s)
    if wait_s:
        logger.warning(
            "%s has started %d replicas in %g minutes and is to have %d: this one waits %.0f s; their logs say why "
            "they ended",
            context.deployment,
            len(started_s),
            _WINDOW_S / 60.0,
            context.world_size,
            wait_s,
        )
        await asyncio.sleep(wait_s)
