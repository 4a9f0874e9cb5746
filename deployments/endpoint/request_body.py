"""The memory that bodies of requests take: they are read within limits, so that no key takes the room of the others.

What large bodies took is returned to the machine, since glibc keeps freed memory around pieces that are in use. Without
that an endpoint that once had 32 bodies of 32 MiB at a time keeps some of that memory for ever.
"""

import asyncio
import ctypes
from collections import Counter
from typing import Any

from fastapi import Request

from deployments.endpoint.config import IngressConfig
from deployments.endpoint.gate import refusal_error
from deployments.wire.openai_errors import OpenAIError
from router.admission_config import Priority
from router.request_limits import Refusal

# Share of the bodies' memory that one key may take: a key that sends slowly, or much, leaves the others the rest.
_KEY_FRAC = 0.5
_RETRY_S = 1.0  # seconds after which a client may repeat a request that found no room
_LARGE_BYTES = 8 << 20  # bodies below this leave no gaps that matter
# Seconds from a freed body to the trim, which takes tens of milliseconds in a thread and blocks large allocations.
_AFTER_S = 5.0


class Trim:
    """Trims the heap of this process a while after large memory was freed."""

    def __init__(self, after_s: float = _AFTER_S) -> None:
        self._after_s = after_s
        # Other C libraries have no such function, and some do not need it.
        self._trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._due: asyncio.Task[None] | None = None

    def freed(self, count: int) -> None:
        """``count`` bytes have been freed, or will be in a moment."""
        if count >= _LARGE_BYTES and self._trim is not None and (self._due is None or self._due.done()):
            self._due = asyncio.create_task(self._later())

    async def _later(self) -> None:
        await asyncio.sleep(self._after_s)
        await asyncio.to_thread(self._trim, 0)


class Bodies:
    """Memory of all bodies of one replica of the endpoint, in all and by key; also of bodies that are being read."""

    def __init__(self, config: IngressConfig) -> None:
        self.most_bytes = config.max_bodies_bytes
        self.limits = config.admission.limits
        self.trim = Trim()
        self.held_bytes = 0
        self.bytes_by_key: Counter[str | None] = Counter()
        self.requests_by_key: Counter[str | None] = Counter()


class Body:
    """Memory of one body, from before its first byte until its request has ended."""

    def __init__(self, bodies: Bodies, key: str | None, priority: Priority = Priority.NORMAL) -> None:
        """``key``: ``None`` without keys. Raises OpenAIError: 429, the key has as many requests here as it may."""
        self._priority = priority
        requests, most = bodies.requests_by_key[key], bodies.limits(key).max_requests
        if most is not None and requests >= most:
            message = f"{requests} requests of this key are here (max_requests); send it again later"
            raise refusal_error(Refusal(reason="key", message=message, retry_after_s=_RETRY_S), priority)
        self._bodies = bodies
        self._key = key
        self._most_bytes = bodies.most_bytes if key is None else int(bodies.most_bytes * _KEY_FRAC)
        self._is_counted = True
        self.held_bytes = 0
        bodies.requests_by_key[key] += 1

    def take(self, count: int) -> None:
        """Count bytes more. Raises OpenAIError: 413, one body may not take them; 429, all, or its key's, may not."""
        bodies, key_bytes = self._bodies, self._bodies.bytes_by_key[self._key]
        if self.held_bytes + count > self._most_bytes:
            raise OpenAIError(
                413,
                f"the body takes {self.held_bytes + count} bytes of memory, and one may take {self._most_bytes} "
                "(ingress.max_bodies_bytes): send less in one request",
            )
        if key_bytes + count > self._most_bytes or bodies.held_bytes + count > bodies.most_bytes:
            is_keys = key_bytes + count > self._most_bytes
            whose, used = (" of this key", key_bytes) if is_keys else ("", bodies.held_bytes)
            message = f"requests{whose} that take {used} bytes are here (ingress.max_bodies_bytes); send it again later"
            raise refusal_error(Refusal(reason="bodies", message=message, retry_after_s=_RETRY_S), self._priority)
        self.held_bytes += count
        bodies.held_bytes += count
        bodies.bytes_by_key[self._key] += count

    def free(self) -> None:
        """Its request has ended; a second call changes nothing."""
        if self._is_counted:
            self._is_counted = False
            self._bodies.held_bytes -= self.held_bytes
            self._bodies.bytes_by_key[self._key] -= self.held_bytes
            self._bodies.requests_by_key[self._key] -= 1
            self._bodies.trim.freed(self.held_bytes)


async def read_body(request: Request, config: IngressConfig, body: Body) -> bytes:
    """The whole body. Raises OpenAIError: 413, it is too large; 408, it comes too slowly; 429, there is no room."""
    parts, size_bytes = [], 0
    try:
        async with asyncio.timeout(config.body_timeout_s):
            async for part in request.stream():
                size_bytes += len(part)
                if size_bytes > config.max_body_bytes:
                    raise OpenAIError(
                        413, f"the body is larger than {config.max_body_bytes} bytes (ingress.max_body_bytes)"
                    )
                body.take(len(part))
                parts.append(part)
    except TimeoutError:
        raise OpenAIError(
            408, f"the body did not come as a whole in {config.body_timeout_s:g} s (ingress.body_timeout_s)"
        ) from None
    return b"".join(parts)
