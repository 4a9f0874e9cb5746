"""An application's own actors: found under a key, since Serve chooses their names, and followed by their clients."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import ray

from router import ray_kv

logger = logging.getLogger(__name__)

NAMESPACE = "serve"
# Time between two looks whether an actor is still the announced one.
_ANNOUNCE_S = 5.0
# Time until a client looks again for an actor that is not there or does not answer.
_RETRY_S = 1.0


def find_actor(key: bytes) -> Any:
    """The handle of the actor that is announced under a key; ``None``: it does not exist. Blocks for a millisecond."""
    name = ray_kv.get(key)
    if name is None:
        return None
    try:
        return ray.get_actor(name.decode(), namespace=NAMESPACE)
    except ValueError:  # being restarted
        return None


async def keep_announced(key: bytes, name: str) -> None:
    """Announce an actor: the one started last holds the key, and if it ends the one that remains takes the key over."""
    ray_kv.put(key, name.encode())
    while True:
        await asyncio.sleep(_ANNOUNCE_S)
        with suppress(Exception):  # Ray's store is away for a moment
            if await asyncio.to_thread(find_actor, key) is None:
                ray_kv.put(key, name.encode())


def is_another(found: Any, handle: Any) -> bool:
    """Whether an actor was found that a client does not have yet: the first, or that of a redeployed application.

    The actor of the earlier deployment may still answer.
    """
    return found is not None and found != handle


async def follow(key: bytes, ask: Callable[[Any, int], Awaitable[int]], lose: Callable[[], None]) -> None:
    """Ask the actor that is announced under a key again and again, until this process leaves Ray.

    ``ask`` gets the handle and the version of the answer before, or -1, and returns the version of its answer; ``lose``
    is called when the actor does not answer.
    """
    handle: Any = None
    version = -1
    while ray.is_initialized():
        try:
            found = await asyncio.to_thread(find_actor, key)
            if is_another(found, handle):
                handle, version = found, -1
            if handle is not None:
                version = await ask(handle, version)
                continue
        except Exception as error:  # whatever it is, this must go on
            logger.debug("the actor %s does not answer: %s", key, error)
            handle, version = None, -1
            lose()
        await asyncio.sleep(_RETRY_S)


class Bell:
    """Wakes every task that waits for the next change."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ring(self) -> None:
        """Something has changed."""
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, at_most_s: float) -> None:
        """Until the next change, or for this time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(at_most_s):
                await self._event.wait()
