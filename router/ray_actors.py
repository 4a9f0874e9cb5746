"""An application's own actors, by name: Serve chooses the names, so each actor tells its own under a known key."""

import asyncio
from contextlib import suppress
from typing import Any

import ray
from ray.experimental import internal_kv

NAMESPACE = "serve"
_ANNOUNCE_S = 5.0


def find_actor(key: bytes) -> Any:
    """The handle of the actor that is announced under a key; ``None`` while there is none. Blocks for a millisecond."""
    name = internal_kv._internal_kv_get(key)
    if name is None:
        return None
    try:
        return ray.get_actor(name.decode(), namespace=NAMESPACE)
    except ValueError:  # being restarted
        return None


async def keep_announced(key: bytes, name: str) -> None:
    """Announce an actor: the one started last is the one to ask, and the one that is left of two speaks up."""
    internal_kv._internal_kv_put(key, name.encode(), overwrite=True)
    while True:
        await asyncio.sleep(_ANNOUNCE_S)
        with suppress(Exception):  # Ray's store is away for a moment
            if await asyncio.to_thread(find_actor, key) is None:
                internal_kv._internal_kv_put(key, name.encode(), overwrite=True)
