"""An application's own actors (coordinator, health board): how they are announced, found and followed by clients.

Serve chooses the names of these actors. So each actor *announces* itself: it writes its name into Ray's key-value
store, under a key that depends on the application alone. To *follow* an actor means to ask it for its next answer again
and again. Each answer has a version; the actor answers once it has a newer one, or after some seconds.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import ray

from router import ray_kv

logger = logging.getLogger(__name__)

NAMESPACE = "serve"
# Time between two checks, seconds, by which each actor learns whether the announced actor still exists.
_ANNOUNCE_S = 5.0
# Time until a client looks again for an actor that does not exist or does not answer, seconds.
_RETRY_S = 1.0


def find_actor(key: bytes) -> Any:
    """The handle of the actor that is announced under a key; ``None``: it does not exist. Blocks for a millisecond."""
    name = ray_kv.get(key)
    if name is None:
        return None
    try:
        return ray.get_actor(name.decode(), namespace=NAMESPACE)
    except ValueError:  # the announced actor has ended
        return None


async def keep_announced(key: bytes, name: str) -> None:
    """Announce an actor, and go on for ever. The actor that started last has the key; if it ends, another takes it."""
    ray_kv.put(key, name.encode())
    while True:
        await asyncio.sleep(_ANNOUNCE_S)
        with suppress(Exception):  # Ray's store may not answer for a moment
            if await asyncio.to_thread(find_actor, key) is None:
                ray_kv.put(key, name.encode())


def is_another(found: Any, handle: Any) -> bool:
    """Whether a client must follow another actor from now on: its first one, or the one after a redeploy.

    ``found``: the announced actor. ``handle``: the client's present one, which may still answer after a redeploy.
    """
    return found is not None and found != handle


async def follow(key: bytes, ask: Callable[[Any, int], Awaitable[int]], lose: Callable[[], None]) -> None:
    """Follow the actor that is announced under a key, until this process leaves Ray.

    ``ask`` gets the handle and the version of the last answer (-1: none). It returns the version of the next answer.
    ``lose`` is called when the actor does not answer.
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
        except Exception as error:  # whatever the error is, the client must go on
            logger.debug("the actor %s does not answer: %s", key, error)
            handle, version = None, -1
            lose()
        await asyncio.sleep(_RETRY_S)


class Bell:
    """Wakes every task that waits for the next change."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ring(self) -> None:
        """Wake the tasks that wait now."""
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, at_most_s: float) -> None:
        """Wait for the next ring, or for this time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(at_most_s):
                await self._event.wait()
