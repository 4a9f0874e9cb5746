"""What goes over the wire when Tandem is fuzzed, and what of it comes back."""

import asyncio
import io
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from typing import Any

# Not the endpoint's, but the server of ``ingress.metrics_port``.
METRICS_PORT = "metrics port"
OTHER_ROUTE = "other"
API_ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{model}", "/health", "/metrics")
ROUTES = (*API_ROUTES, METRICS_PORT, OTHER_ROUTE)
_HEAD = "Host: 127.0.0.1\r\nConnection: close\r\n"
_MOST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request.

    Attributes:
        route: of ``ROUTES``.
        kind: how it was made.
        parts: the bytes, written one after the other.
        pause_s: between parts.
        leaves: the client goes without reading an answer.
        is_http: well-formed, so that Tandem must answer, in OpenAI's shape where it refuses.
        has_key: it carries an API key that the endpoint knows, or none is asked for.
        body: the JSON that it carries, if it does.
        header: more header lines, of requests with a body.
    """

    route: str
    kind: str
    parts: tuple[bytes, ...]
    pause_s: float = 0.0
    leaves: bool = False
    is_http: bool = True
    has_key: bool = True
    body: dict[str, Any] | None = None
    header: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What came back: a status, or why there is none (``cut``, ``hang``, ``left``)."""

    status: int | None = None
    text: str = ""
    why: str | None = None


def post(route: str, raw: bytes, *, kind: str, header: str = "", **fields: Any) -> Ask:
    """A well-formed POST of these bytes."""
    head = (
        f"POST {route} HTTP/1.1\r\n{_HEAD}Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n{header}\r\n"
    )
    return Ask(route=route, kind=kind, parts=(head.encode("latin-1") + raw,), header=header, **fields)


async def send(host: str, port: int, ask: Ask, deadline_s: float) -> Reply:
    """Send one request on a connection of its own, and read all that comes."""
    got = bytearray()
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(deadline_s):
            reader, writer = await asyncio.open_connection(host, port)
            reading = asyncio.create_task(_read(reader, got))
            try:
                for part in ask.parts:
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(ask.pause_s)
                if ask.leaves:
                    return Reply(why="left")
                if not ask.is_http and writer.can_write_eof():
                    await asyncio.sleep(0.2)
                    writer.write_eof()  # whoever waits for more of it would wait for ever
            except ConnectionError:
                pass  # refused before all of it was sent: the answer is there to be read
            finally:
                if ask.leaves:
                    reading.cancel()
            await reading
    except TimeoutError:
        return Reply(why="hang", text=got[:300].decode("latin-1"))
    except OSError as error:
        return Reply(why="cut", text=f"{type(error).__name__}: {error}")
    finally:
        if writer is not None:
            writer.transport.abort()
    return _parsed(bytes(got), ask.parts[0].partition(b" ")[0].decode("latin-1"))


async def _read(reader: asyncio.StreamReader, got: bytearray) -> None:
    try:
        while len(got) < _MOST_BYTES and (piece := await reader.read(1 << 16)):
            got += piece
    except ConnectionError:
        pass


class _Wire(io.BytesIO):
    """What came, as ``http.client`` wants to read it."""

    def makefile(self, *_: object) -> "_Wire":
        return self

    def close(self) -> None:
        """More answers may follow."""


def _parsed(got: bytes, method: str) -> Reply:
    """The worst of the answers that came: several, where several requests went over one connection."""
    wire = _Wire(got)
    worst: Reply | None = None
    while wire.tell() < len(got):
        response = HTTPResponse(wire, method=method)  # type: ignore[arg-type]
        try:
            response.begin()
            text = response.read().decode(errors="replace")
        except (HTTPException, ValueError, OSError) as error:
            if method == "HEAD":  # that of who cannot read the first line has a body
                return _parsed(got, "GET")
            return Reply(why="cut", text=f"{type(error).__name__}: {error}; {got[:200]!r}")
        if worst is None or response.status > (worst.status or 0):
            worst = Reply(status=response.status, text=text)
    return worst or Reply(why="cut", text="closed without an answer")
