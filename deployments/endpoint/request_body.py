"""Memory of request bodies: bodies are read within limits, so that no API key takes the memory of the others."""

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

_KEY_FRAC = 0.5  # share of the bodies' memory that one key may take, even if it sends large bodies slowly
_RETRY_S = 1.0  # Retry-After, seconds, of a request that found no room
_LARGE_BYTES = 8 << 20  # size from which a freed body is worth a trim
# Seconds from a freed body to the trim, which takes tens of milliseconds in a thread and blocks large allocations.
_TRIM_DELAY_S = 5.0


class Trim:
    """Returns this process's free memory to the machine some time after large memory was freed.

    glibc keeps freed memory between pieces that are in use. Without the trim, an endpoint that once had 32 bodies of
    32 MiB at a time would keep part of their memory for ever.
    """

    def __init__(self, delay_s: float = _TRIM_DELAY_S) -> None:
        self._delay_s = delay_s
        self._trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)  # ``None``: another C library than glibc
        self._task: asyncio.Task[None] | None = None  # the latest trim, which may still wait

    def note_freed(self, size_bytes: int) -> None:
        """Trim later if ``size_bytes`` is large; that memory is free now, or will be in a moment."""
        if size_bytes >= _LARGE_BYTES and self._trim is not None and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._trim_later())

    async def _trim_later(self) -> None:
        await asyncio.sleep(self._delay_s)
        await asyncio.to_thread(self._trim, 0)


class Bodies:
    """Memory of all bodies at one replica of the endpoint, including those that are being read."""

    def __init__(self, config: IngressConfig) -> None:
        self.most_bytes = config.max_bodies_bytes
        self.limits = config.admission.limits  # a method: the limits of a key
        self.trim = Trim()
        self.used_bytes = 0
        self.bytes_by_key: Counter[str | None] = Counter()
        self.requests_by_key: Counter[str | None] = Counter()


class Body:
    """Memory of one body, from before its first byte until its request has ended."""

    def __init__(self, bodies: Bodies, key: str | None, priority: Priority = Priority.NORMAL) -> None:
        """``key``: ``None`` if the endpoint has no keys. Raises OpenAIError: 429, the key has too many requests."""
        self._priority = priority
        requests, most = bodies.requests_by_key[key], bodies.limits(key).max_requests
        if most is not None and requests >= most:
            what = f"this replica of the endpoint has {requests} requests of this key (max_requests)"
            refusal = Refusal(reason="key", message=f"{what}; send it again later", retry_after_s=_RETRY_S)
            raise refusal_error(refusal, priority)
        self._bodies = bodies
        self._key = key
        # Bound of this body's memory, and of all bodies of its key.
        self._most_bytes = bodies.most_bytes if key is None else int(bodies.most_bytes * _KEY_FRAC)
        self._is_counted = True
        self._used_bytes = 0
        bodies.requests_by_key[key] += 1

    def take(self, size_bytes: int) -> None:
        """Count further memory. Raises OpenAIError: 413, too much for one body; 429, for its key's or all bodies."""
        bodies, key_bytes = self._bodies, self._bodies.bytes_by_key[self._key]
        if self._used_bytes + size_bytes > self._most_bytes:
            raise OpenAIError(
                413,
                f"the body takes {self._used_bytes + size_bytes} bytes of memory, and one may take {self._most_bytes} "
                "(ingress.max_bodies_bytes): send less in one request",
            )
        is_key_full = key_bytes + size_bytes > self._most_bytes
        if is_key_full or bodies.used_bytes + size_bytes > bodies.most_bytes:
            owner, used_bytes = (" of this key", key_bytes) if is_key_full else ("", bodies.used_bytes)
            what = f"requests{owner} at this replica of the endpoint take {used_bytes} bytes (ingress.max_bodies_bytes)"
            refusal = Refusal(reason="bodies", message=f"{what}; send it again later", retry_after_s=_RETRY_S)
            raise refusal_error(refusal, self._priority)
        self._used_bytes += size_bytes
        bodies.used_bytes += size_bytes
        bodies.bytes_by_key[self._key] += size_bytes

    def free(self) -> None:
        """End the count of this body; a second call changes nothing."""
        if self._is_counted:
            self._is_counted = False
            self._bodies.used_bytes -= self._used_bytes
            self._bodies.bytes_by_key[self._key] -= self._used_bytes
            self._bodies.requests_by_key[self._key] -= 1
            self._bodies.trim.note_freed(self._used_bytes)


async def read_body(request: Request, config: IngressConfig, body: Body) -> bytes:
    """Read the whole body. Raises OpenAIError: 413, it is too large; 408, it comes too slowly; 429, no room."""
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
