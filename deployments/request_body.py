"""Reads requests' bodies, no more of them than is allowed, each for no longer, and no key's at the others' cost."""

import asyncio
from collections import Counter

from fastapi import Request

from deployments import metrics
from deployments.config import IngressConfig
from deployments.openai_errors import OpenAIError
from router.admission import Priority

# Of all that bodies may take, where there are keys: one that sends slowly, or much, leaves the others as much again.
_KEY_FRAC = 0.5
_RETRY_S = 1.0


class Bodies:
    """All bodies of one replica of the endpoint, those that are being read too: what they take, in all and by key."""

    def __init__(self, config: IngressConfig) -> None:
        self.most_bytes = config.max_bodies_bytes
        self.limits = config.admission.limits
        self.held_bytes = 0
        self.bytes_by_key: Counter[str | None] = Counter()
        self.requests_by_key: Counter[str | None] = Counter()


class Body:
    """One of them, from before its first byte until its request has ended."""

    def __init__(self, bodies: Bodies, key: str | None, priority: Priority = Priority.NORMAL) -> None:
        """Count a request of a key, or of anybody where there are none; ``priority``: for the metrics.

        Raises:
            OpenAIError: 429, the key has as many here as it may.
        """
        self._priority = priority.name.lower()
        here, most = bodies.requests_by_key[key], bodies.limits(key).max_requests
        if most is not None and here >= most:
            metrics.REFUSED.labels("key", self._priority).inc()
            raise OpenAIError(
                429,
                f"{here} requests of this key are here (max_requests); send it again later",
                code="rate_limit_exceeded",
                retry_after_s=_RETRY_S,
            )
        self._bodies = bodies
        self._key = key
        self._most_bytes = bodies.most_bytes if key is None else int(bodies.most_bytes * _KEY_FRAC)
        self._is_here = True
        self.held_bytes = 0
        bodies.requests_by_key[key] += 1

    def take(self, count: int) -> None:
        """It takes so many bytes more.

        Raises:
            OpenAIError: 413, that is more than any may; 429, it is too much with those of its key, or with all others.
        """
        bodies, of_key = self._bodies, self._bodies.bytes_by_key[self._key]
        if self.held_bytes + count > self._most_bytes:
            raise OpenAIError(
                413,
                f"the body takes {self.held_bytes + count} bytes of memory, and one may take {self._most_bytes} "
                "(ingress.max_bodies_bytes): send less in one request",
            )
        if of_key + count > self._most_bytes or bodies.held_bytes + count > bodies.most_bytes:
            metrics.REFUSED.labels("bodies", self._priority).inc()
            whose, held = (" of this key", of_key) if of_key + count > self._most_bytes else ("", bodies.held_bytes)
            raise OpenAIError(
                429,
                f"requests{whose} that take {held} bytes are here (ingress.max_bodies_bytes); send it again later",
                code="overloaded",
                retry_after_s=_RETRY_S,
            )
        self.held_bytes += count
        bodies.held_bytes += count
        bodies.bytes_by_key[self._key] += count

    def free(self) -> None:
        """Its request has ended; again is nothing."""
        if self._is_here:
            self._is_here = False
            self._bodies.held_bytes -= self.held_bytes
            self._bodies.bytes_by_key[self._key] -= self.held_bytes
            self._bodies.requests_by_key[self._key] -= 1


async def read_body(request: Request, config: IngressConfig, body: Body) -> bytes:
    """The whole body.

    Raises:
        OpenAIError: 413, it is too large; 408, it comes too slowly, however steadily; 429, others take all the room.
    """
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
