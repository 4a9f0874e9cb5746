"""Bad requests to an application on emulated engines; ``make fuzz`` sends many more, and some to real ones."""

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from deployments.machine.claims import free_ports
from tests.lab.fuzz.parts import Part, emulated_part
from tests.lab.fuzz.requests import bearer
from tests.lab.fuzz.routes import BODY_ROUTES
from tests.lab.fuzz.run import fuzz
from tests.lab.fuzz.verdict import Tally
from tests.lab.stand.forked_worker import forked

pytestmark = [pytest.mark.ray, pytest.mark.vllm]


@pytest.fixture(scope="module", name="part")
def _part(tmp_path_factory: pytest.TempPathFactory) -> Part:
    return emulated_part(200, tmp_path_factory.mktemp("fuzz"), max_bulk_bytes=200_000)


@pytest.fixture(scope="module", name="app")
def _app(part: Part) -> Iterator[Any]:
    from serve_app.sdk import deploy

    with deploy(forked({**part.document, "http_options": {"port": free_ports(1)[0]}})) as running:
        yield running


def test_two_hundred_bad_requests_find_no_fault(app: Any, part: Part) -> None:
    tally = Tally()
    asyncio.run(fuzz(app, part, 4, tally))
    # Two hundred requests say nothing about memory.
    assert [finding for finding in tally.findings.values() if finding.what != "memory"] == []
    assert tally.requests == 200
    assert tally.by_status["200"] > 12
    assert tally.by_status["400"] > 60
    assert tally.by_status["401"] > 3
    # A few hundred requests, drawn at random, may leave out a rare route.
    assert len(set(BODY_ROUTES) - tally.by_route.keys()) <= 4


POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"


def raw(url: str, request: bytes) -> bytes:
    host, _, port = url.partition("://")[2].rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.parametrize(
    "header", [b"X-Request-Id: \xe9\xff", b"X-Session-ID: \xff", b"X-Request-Timeout-Seconds: 0.001"]
)
def test_no_header_breaks_a_request_or_shortens_its_time_limit(app: Any, part: Part, header: bytes) -> None:
    body = b'{"model": "llama-70b", "prompt": "x", "max_tokens": 200}'
    head = POST + b"Content-Length: %d\r\n" % len(body)
    head += bearer(part.key).encode()
    assert raw(app.url, head + header + b"\r\n\r\n" + body).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("value", [b'"\xed\xa0\x80"', b'"\xff"'])
def test_a_body_that_is_not_utf8_is_refused(app: Any, part: Part, value: bytes) -> None:
    body = b'{"model": "llama-70b", "prompt": "x", "stop": ' + value + b"}"
    head = POST + b"Content-Length: %d\r\n" % len(body)
    answer = raw(app.url, head + bearer(part.key).encode() + b"\r\n" + body)
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"not UTF-8" in answer
