"""An ASGI middleware that Serve puts around each ingress replica: it filters the headers that clients send."""

import re
from typing import Any

# Value of RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH, by which Serve finds ``middlewares``.
IMPORT_PATH = "deployments.serve_seam.http_headers.middlewares"

# Headers that Serve obeys. With them a client could lift the endpoint's limits, or let work go on after it disconnects.
_SERVE_HEADERS = frozenset(
    {
        b"x-request-disconnect-disabled",
        b"x-request-timeout-seconds",
        b"serve_multiplexed_model_id",
        b"serve-multiplexed-model-id",
    }
)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def is_request_id(text: str) -> bool:
    """Whether a request may have this id, which is in each of its log records."""
    return _REQUEST_ID.fullmatch(text) is not None


class ClientHeaders:
    """Removes headers that Serve obeys and malformed request ids, and makes every header value UTF-8 for Serve.

    Serve writes a client's request id unchanged into its log records, and makes an id for a request without one.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Serve one ASGI connection."""
        if "headers" in scope:
            headers = [(name, _in_utf8(value)) for name, value in scope["headers"] if _passes(name.lower(), value)]
            scope = {**scope, "headers": headers}
        await self._app(scope, receive, send)


def middlewares() -> list[Any]:
    """The middleware of an ingress replica; Serve calls this at its start.

    Needs: the variable ``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH``, and the names of the headers that Serve obeys.
    Without it: a header that is not UTF-8 is answered with 500, and Serve obeys headers of clients.
    """
    from starlette.middleware import Middleware  # it comes with Ray Serve

    return [Middleware(ClientHeaders)]


def _passes(name: bytes, value: bytes) -> bool:
    if name == b"x-request-id":
        return is_request_id(value.decode("latin-1"))
    return name not in _SERVE_HEADERS


def _in_utf8(value: bytes) -> bytes:
    try:
        value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1").encode()  # HTTP's original encoding of headers
    return value
