"""Reads requests' bodies, no more of them than is allowed and each for no longer."""

import asyncio

from fastapi import Request

from deployments.config import IngressConfig
from deployments.openai_errors import OpenAIError


class Bodies:
    """The bytes of all bodies that one replica of the endpoint holds, those that are being read included."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.held_bytes = 0


class Body:
    """One of them, from its first byte until its request has ended."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self.held_bytes = 0

    def take(self, count: int) -> None:
        """So many more bytes have come.

        Raises:
            OpenAIError: 429, that is too much with those of all others.
        """
        if self._bodies.held_bytes + count > self._bodies.most_bytes:
            raise OpenAIError(
                429,
                f"requests of {self._bodies.held_bytes} bytes are here (ingress.max_bodies_bytes); send it again later",
                code="overloaded",
                retry_after_s=1.0,
            )
        self.held_bytes += count
        self._bodies.held_bytes += count

    def free(self) -> None:
        """Its request has ended; again is nothing."""
        self._bodies.held_bytes -= self.held_bytes
        self.held_bytes = 0


async def read_body(request: Request, config: IngressConfig, body: Body) -> bytes:
    """The whole body.

    Raises:
        OpenAIError: 413, it is too large; 408, it comes too slowly, however steadily; 429, others take all the room.
    """
    parts = []
    try:
        async with asyncio.timeout(config.body_timeout_s):
            async for part in request.stream():
                if body.held_bytes + len(part) > config.max_body_bytes:
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
