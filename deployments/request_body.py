"""Reads a request's body, no more of it than is allowed and for no longer."""

import asyncio

from fastapi import Request

from deployments.config import IngressConfig
from deployments.openai_errors import OpenAIError


async def read_body(request: Request, config: IngressConfig) -> bytes:
    """The whole body.

    Raises:
        OpenAIError: 413, it is too large; 408, it comes too slowly, however steadily.
    """
    parts, size = [], 0
    try:
        async with asyncio.timeout(config.body_timeout_s):
            async for part in request.stream():
                size += len(part)
                if size > config.max_body_bytes:
                    raise OpenAIError(
                        413, f"the body is larger than {config.max_body_bytes} bytes (ingress.max_body_bytes)"
                    )
                parts.append(part)
    except TimeoutError:
        raise OpenAIError(
            408, f"the body did not come as a whole in {config.body_timeout_s:g} s (ingress.body_timeout_s)"
        ) from None
    return b"".join(parts)
