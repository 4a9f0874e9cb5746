"""Which of a client's headers reach Serve."""

from typing import Any

import pytest

from deployments.serve_seam.http_headers import ClientHeaders, middlewares


async def seen(*headers: tuple[bytes, bytes], kind: str = "http") -> Any:
    scopes: list[dict[str, Any]] = []

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        scopes.append(scope)

    scope = {"type": kind, "path": "/x", "headers": list(headers)}
    await ClientHeaders(app)(scope, None, None)
    assert scope["headers"] == list(headers)
    (got,) = scopes
    assert got["path"] == "/x"
    return got["headers"]


@pytest.mark.parametrize("value", [b"", b"plain", "käse".encode(), b"a\tb"])
async def test_a_header_in_utf8_stays(value: bytes) -> None:
    assert await seen((b"x-session-id", value)) == [(b"x-session-id", value)]


async def test_a_header_that_is_not_utf8_is_read_as_latin1() -> None:
    assert await seen((b"x-session-id", b"k\xe4se\xff")) == [(b"x-session-id", "käseÿ".encode())]


@pytest.mark.parametrize("value", [b"my-id-1", b"chatcmpl-A.b:c_9", b"i" * 128])
async def test_a_request_keeps_its_id(value: bytes) -> None:
    assert await seen((b"X-Request-Id", value)) == [(b"X-Request-Id", value)]


@pytest.mark.parametrize("value", [b"", b"a b", b"a\n", b"../x", "käse".encode(), b"\xff", b"i" * 129, b"said so"])
async def test_an_invalid_request_id_is_dropped(value: bytes) -> None:
    assert await seen((b"X-Request-Id", value), (b"host", b"x"), (b"x-request-id", b"ok")) == [
        (b"host", b"x"),
        (b"x-request-id", b"ok"),
    ]


@pytest.mark.parametrize(
    "name",
    [b"x-request-disconnect-disabled", b"X-Request-Timeout-Seconds", b"serve_multiplexed_model_id"],
)
async def test_headers_that_switch_serve_are_dropped(name: bytes) -> None:
    assert await seen((name, b"?1"), (b"host", b"x")) == [(b"host", b"x")]


async def test_a_message_without_headers_passes() -> None:
    scopes: list[dict[str, Any]] = []

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        scopes.append(scope)

    await ClientHeaders(app)({"type": "lifespan"}, None, None)
    assert scopes == [{"type": "lifespan"}]


def test_serve_gets_the_filter_as_a_middleware() -> None:
    (one,) = middlewares()
    assert one.cls is ClientHeaders
