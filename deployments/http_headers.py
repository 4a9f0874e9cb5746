"""What of a client's headers reaches Serve: ASGI around each ingress replica, which Serve itself puts there."""

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


class ClientHeaders:
    """Takes Serve's own switches out of a request, and makes every value UTF-8, which Serve takes for granted."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """One connection."""
        if "headers" in scope:
            headers = [(name, _in_utf8(value)) for name, value in scope["headers"] if name.lower() not in _SERVES_OWN]
            scope = {**scope, "headers": headers}
        await self._app(scope, receive, send)


def middlewares() -> list[Any]:
    """What Serve asks for when an ingress replica starts."""
    from starlette.middleware import Middleware  # it comes with Ray Serve

    return [Middleware(ClientHeaders)]


def _in_utf8(value: bytes) -> bytes:
    try:
        value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1").encode()  # what HTTP said of headers before it knew UTF-8
    return value
