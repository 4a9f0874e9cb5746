"""One request as bytes on a socket, and the answer that comes back."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import h11

# An answer is read up to this length, in bytes; the longest right ones have a few MiB.
_MAX_ANSWER_BYTES = 64 << 20
# Seconds between the last byte of malformed HTTP and the end of the client's side of the connection.
_EOF_DELAY_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request.

    Attributes:
        route: one of ``ROUTES`` (see ``routes``).
        kind: how it was made, for the report.
        parts: the bytes, written one part after the other.
        pause_s: pause after each part.
        is_abandoned: the client closes the connection without reading an answer.
        is_http: the HTTP is well-formed, so that Tandem must answer, with the errors of the route's API if it refuses.
        has_key: it carries an API key that the endpoint knows, or the endpoint needs none.
        seed: seed of the batch that it was drawn in.
    """

    route: str
    kind: str
    parts: tuple[bytes, ...]
    pause_s: float = 0.0
    is_abandoned: bool = False
    is_http: bool = True
    has_key: bool = True
    seed: int = 0

    @property
    def is_head(self) -> bool:
        """Its method is HEAD, whose answers have no body."""
        return self.parts[0].startswith(b"HEAD")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An answer: its status, or why it has none (``cut``, ``hang``, ``abandoned``); names of headers are lower case."""

    status: int | None = None
    text: str = ""
    why: str | None = None
    headers: dict[str, str] = field(default_factory=dict)


def post(
    route: str,
    raw: bytes,
    *,
    kind: str,
    header: str = "",
    content_type: str = "Content-Type: application/json\r\n",
    **fields: Any,
) -> Request:
    """A well-formed POST of these bytes; ``header``: whole header lines; ``fields``: of the request."""
    head = (
        f"POST {route} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n{content_type}"
        f"Content-Length: {len(raw)}\r\n{header}\r\n"
    )
    return Request(route=route, kind=kind, parts=(head.encode("latin-1") + raw,), **fields)


async def send(host: str, port: int, request: Request, deadline_s: float) -> Reply:
    """Send one request on a connection of its own, and read until the server closes it."""
    received = bytearray()
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(deadline_s):
            reader, writer = await asyncio.open_connection(host, port)
            reading = asyncio.create_task(_read(reader, received))  # ends at the latest with the connection
            await _write(writer, request)
            if request.is_abandoned:
                return Reply(why="abandoned")
            await reading
    except TimeoutError:
        return Reply(why="hang", text=received[:300].decode("latin-1"))
    except OSError as error:
        return Reply(why="cut", text=f"{type(error).__name__}: {error}")
    finally:
        if writer is not None:
            writer.transport.abort()
    return worst_answer(bytes(received), is_head=request.is_head)


async def _write(writer: asyncio.StreamWriter, request: Request) -> None:
    try:
        for part in request.parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(request.pause_s)
        if not (request.is_http or request.is_abandoned) and writer.can_write_eof():
            await asyncio.sleep(_EOF_DELAY_S)
            writer.write_eof()  # a server that waits for more of the request would wait for ever
    except ConnectionError:
        pass  # refused before all of it was sent: the answer can still be read


async def _read(reader: asyncio.StreamReader, received: bytearray) -> None:
    try:
        while len(received) < _MAX_ANSWER_BYTES and (piece := await reader.read(1 << 16)):
            received += piece
    except ConnectionError:
        pass


def worst_answer(received: bytes, *, is_head: bool) -> Reply:
    """The answer with the highest status: several come if several requests went over one connection."""
    worst = Reply(why="cut", text="closed without an answer")
    rest = received
    while rest:
        client = h11.Connection(h11.CLIENT)
        client.send(h11.Request(method="HEAD" if is_head else "GET", target="/", headers=[("Host", "x")]))
        client.send(h11.EndOfMessage())
        client.receive_data(rest)
        client.receive_data(b"")
        try:
            reply = _next_answer(client)
        except h11.RemoteProtocolError as error:
            if is_head:  # a server that could not read the method sends a body
                return worst_answer(received, is_head=False)
            return Reply(why="cut", text=f"{error}; {received[:200]!r}")
        rest = client.trailing_data[0]
        worst = max(worst, reply, key=lambda one: one.status or 0)
    return worst


def _next_answer(client: h11.Connection) -> Reply:
    status, headers, body = 0, dict[str, str](), bytearray()
    while not isinstance(event := client.next_event(), h11.EndOfMessage):
        if isinstance(event, h11.Response):
            status = event.status_code
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}
        elif isinstance(event, h11.Data):
            body += event.data
        elif not isinstance(event, h11.InformationalResponse):
            raise h11.RemoteProtocolError(f"the answer ends early: {event!r}")
    return Reply(status=status, text=body.decode(errors="replace"), headers=headers)
