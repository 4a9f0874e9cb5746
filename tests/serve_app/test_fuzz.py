"""How bad requests are drawn, sent and judged."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from serve_app.fuzz import drawn
from serve_app.fuzz_bodies import bodies
from serve_app.fuzz_http import ROUTES, Ask, Reply, asks, post, send
from serve_app.fuzz_memory import Memory
from serve_app.fuzz_verdict import Tally, smaller, verdict

SCHEMA: dict[str, Any] = {
    "properties": {"prompt": {"type": "string"}, "n": {"type": "integer"}, "part": {"$ref": "#/$defs/Part"}},
    "$defs": {"Part": {"properties": {"x": {"enum": [1, 2]}, "y": {"anyOf": [{"type": "null"}, {"type": "array"}]}}}},
}
ERROR = json.dumps({"error": {"message": "no", "type": "invalid_request_error", "param": None, "code": None}})
ASK = post("/v1/completions", b"{}", kind="json", body={})


def strategy() -> Any:
    both = {name: bodies(name, SCHEMA, "m") for name in ("chat", "completions")}
    return asks("m", both, is_deep=False, most_bulk_bytes=20_000)


def test_the_same_seed_draws_the_same_requests() -> None:
    assert drawn(strategy(), 60, 1) == drawn(strategy(), 60, 1)
    assert drawn(strategy(), 60, 1) != drawn(strategy(), 60, 2)


def test_every_route_and_every_kind_is_drawn() -> None:
    made = [ask for number in range(8) for ask in drawn(strategy(), 100, number)]
    assert {ask.route for ask in made} == set(ROUTES)
    assert {ask.kind for ask in made} == {"json", "bytes", "bulk", "get", "wire", "half", "gone", "slow"}


@pytest.mark.parametrize(
    ("reply", "what"),
    [
        (Reply(status=200, text="{}"), None),
        (Reply(status=400, text=ERROR), None),
        (Reply(status=500, text=ERROR), "five_xx"),
        (Reply(status=503, text=ERROR), "five_xx"),
        (Reply(status=400, text="<html>"), "shape"),
        (Reply(status=404, text='{"detail": "Not Found"}'), "shape"),
        (Reply(status=400, text=ERROR.replace('"no"', '""')), "shape"),
        (Reply(status=400, text='{"error": "no"}'), "shape"),
        (Reply(status=200, text="data: {}\n\ndata: [DONE]\n\n"), None),
        (Reply(status=200, text="data: {}\n\n"), "shape"),
        (Reply(status=200, text='data: {"error": {"type": "server_error"}}\n\ndata: [DONE]\n\n'), "five_xx"),
        (Reply(why="hang"), "hang"),
        (Reply(why="cut"), "cut"),
        (Reply(why="left"), None),
    ],
)
def test_verdict(reply: Reply, what: str | None) -> None:
    assert verdict(ASK, reply) == what


def test_what_is_no_http_may_be_refused_in_any_words_but_not_with_a_servers_error() -> None:
    noise = Ask(route="other", kind="wire", parts=(b"\x00",), is_http=False)
    assert verdict(noise, Reply(status=400, text="<html>")) is None
    assert verdict(noise, Reply(why="cut")) is None
    assert verdict(noise, Reply(status=500)) == "five_xx"
    assert verdict(noise, Reply(why="hang")) == "hang"


def test_equal_faults_are_one_finding() -> None:
    tally = Tally()
    for number in range(3):
        tally.count("real", ASK, Reply(status=500, text=f"request {number} failed"))
    tally.count("real", ASK, Reply(status=400, text=ERROR))
    (finding,) = tally.findings.values()
    assert (finding["count"], finding["what"], finding["part"], finding["body"]) == (3, "five_xx", "real", {})
    assert (tally.requests, tally.five_xx, tally.hangs) == (4, 3, 0)
    assert tally.by_status == {"500": 3, "400": 1}


def test_smaller_leaves_out_one_thing_at_a_time() -> None:
    assert list(smaller({"a": 1, "b": [2, {"c": 3}]})) == [
        {"b": [2, {"c": 3}]},
        {"a": 1},
        {"a": 1, "b": [{"c": 3}]},
        {"a": 1, "b": [2]},
        {"a": 1, "b": [2, {}]},
    ]


def test_memory_is_compared_between_the_thirds_after_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class One:
        pid, rss = 7, 0

        def cmdline(self) -> list[str]:
            return ["ray::ServeReplica:tandem:decode:g0"]

        def memory_info(self) -> Any:
            return self

    one: Any = One()
    memory = Memory(lambda: [one])
    for done, mib in ((0.0, 900), (0.1, 900), (0.2, 100), (0.4, 100), (0.6, 500), (0.8, 104), (1.0, 104)):
        one.rss = mib << 20
        memory.sample(done)
    assert memory.growth() == {
        "decode replica": {"first_third_mib": 100.0, "last_third_mib": 104.0, "growth_frac": pytest.approx(0.04)}
    }


Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def endpoint(said: bytes, *, ends: bool = True) -> AsyncIterator[int]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(said)
        await writer.drain()
        if ends:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


@pytest.mark.parametrize(
    ("said", "ends", "status", "why"),
    [
        (OK, True, 200, None),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", True, 200, None),
        (OK + OK.replace(b"200", b"500"), True, 500, None),
        (OK.replace(b"{}", b"{"), True, None, "cut"),
        (b"", True, None, "cut"),
        (b"nonsense\r\n\r\n", True, None, "cut"),
        (OK, False, None, "hang"),
        (b"", False, None, "hang"),
    ],
)
async def test_an_answer_is_read_to_its_end(said: bytes, ends: bool, status: int | None, why: str | None) -> None:
    async with endpoint(said, ends=ends) as port:
        reply = await send("127.0.0.1", port, ASK, 0.5)
    assert (reply.status, reply.why) == (status, why)


async def test_a_client_that_leaves_waits_for_nothing() -> None:
    async with endpoint(b"", ends=False) as port:
        reply = await send("127.0.0.1", port, Ask(route="/health", kind="gone", parts=(b"GET",), leaves=True), 5.0)
    assert reply.why == "left"
    assert reply.took_s < 1.0
