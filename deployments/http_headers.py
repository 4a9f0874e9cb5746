"""What of a client's headers reaches Serve: ASGI around each ingress replica, which Serve itself puts there."""

import re
from typing import Any

# How Serve finds ``middlewares`` (RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH).
IMPORT_PATH = "deployments.http_headers.middlewares"

# Serve's own switches, which let a client take away the endpoint's limits, or go and leave its work behind.
_SERVES_OWN = frozenset(
    {
        b"x-request-disconnect-disabled",
        b"x-request-timeout-seconds",
        b"serve_multiplexed_model_id",
        b"serve-multiplexed-model-id",
    }
)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def is_request_id(text: str) -> bool:
    """Whether a request may have this id, which stands in every log record of it."""
    return _REQUEST_ID.fullmatch(text) is not None


class ClientHeaders:
    """Takes Serve's own switches and ids that are none out of a request, and makes every value UTF-8.

    Serve takes UTF-8 for granted, puts a client's id on all of its log records as it is, and makes one where there is
    none.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """One connection."""
        if "headers" in scope:
            headers = [(name, _in_utf8(value)) for name, value in scope["headers"] if _passes(name.lower(), value)]
            scope = {**scope, "headers": headers}
        await self._app(scope, receive, send)


def middlewares() -> list[Any]:
    """What Serve asks for when an ingress replica starts."""
    from starlette.middleware import Middleware  # it comes with Ray Serve

    return [Middleware(ClientHeaders)]


def _passes(name: bytes, value: bytes) -> bool:
    if name == b"x-request-id":
        return is_request_id(value.decode("latin-1"))
    return name not in _SERVES_OWN


def _in_utf8(value: bytes) -> bytes:
    try:
        value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1").encode()  # what HTTP said of headers before it knew UTF-8
    return value
