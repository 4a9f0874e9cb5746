"""Laws of drawing, sending and judging bad requests."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.endpoint.api_keys import ApiKeys
from serve_app.checks.yaml_checks import parse_app_config
from tests.lab.fuzz.bodies import bodies, field_values
from tests.lab.fuzz.parts import Part, emulated_part, parts
from tests.lab.fuzz.requests import requests
from tests.lab.fuzz.routes import API_ROUTES, BODY_ROUTES, METRICS_PORT, ROUTES, route_of, valid_body
from tests.lab.fuzz.run import Progress, drawn, ended, grown, known_answers, send_all, smallest
from tests.lab.fuzz.schemas import body_schemas, vllm_description
from tests.lab.fuzz.verdict import Tally, verdict
from tests.lab.fuzz.wire import Reply, Request, post, send

SCHEMA: dict[str, Any] = {
    "properties": {"prompt": {"type": "string"}, "n": {"type": "integer"}, "part": {"$ref": "#/$defs/Part"}},
    "$defs": {"Part": {"properties": {"x": {"enum": [1, 2]}, "y": {"anyOf": [{"type": "null"}, {"type": "array"}]}}}},
}
REQUEST = post("/v1/completions", b"{}", kind="json")
KEY = "tk-abc"


def error(message: str = "no", **more: Any) -> str:
    return json.dumps(
        {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None, **more}}
    )


ERROR = error()
# The endpoint's own words (deployments/endpoint/relay.py).
LATE = error("the request took longer than 30 s (ingress.request_timeout_s)")


def stream(*events: str) -> str:
    return "".join(f"data: {event}\n\n" for event in events)


def get(path: str, **fields: Any) -> Request:
    return Request(route=path, kind="get", parts=(f"GET {path} HTTP/1.1\r\n\r\n".encode(),), **fields)


def strategy(key: str | None = KEY) -> Any:
    values = field_values(dict.fromkeys(BODY_ROUTES, SCHEMA))
    drawn_bodies = {route: bodies(route, fields, "m") for route, fields in values.items()}
    return requests("m", drawn_bodies, key=key, is_deep=False, max_bulk_bytes=20_000)


@pytest.fixture(name="part")
def _part(tmp_path: Path) -> Part:
    return emulated_part(20, tmp_path)


@pytest.fixture(scope="module", name="made")
def _made() -> list[Request]:
    return list(drawn(strategy(), 1300, 1))


def test_the_same_seed_draws_the_same_requests(made: list[Request]) -> None:
    assert list(drawn(strategy(), 50, 1)) == made[:50]
    assert list(drawn(strategy(), 50, 2)) != made[:50]


def test_every_route_and_every_kind_is_drawn(made: list[Request]) -> None:
    assert {request.route for request in made} == set(ROUTES)
    assert {request.kind for request in made} == {
        *("json", "bytes", "bulk", "media", "get", "preflight", "wire", "half", "gone", "slow")
    }


def test_a_body_is_drawn_for_every_route_that_has_one(made: list[Request]) -> None:
    assert {request.route for request in made if request.kind == "json"} == set(BODY_ROUTES)


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/v1/responses", "/v1/responses"),
        ("/v1/responses/resp_1?stream=true", "/v1/responses/{response_id}"),
        ("/v1/responses/../cancel", "/v1/responses/{response_id}/cancel"),
        ("/v1/responses/a/b", "other"),
        ("/v1/models/a/b", "/v1/models/{model}"),
        ("/v1/messages/x", "other"),
    ],
)
def test_a_path_belongs_to_its_route_whatever_id_it_has(path: str, route: str) -> None:
    assert route_of(path) == route


@pytest.mark.vllm
def test_every_body_has_a_schema_and_a_valid_one_has_its_fields() -> None:
    schemas = body_schemas(vllm_description())
    assert set(BODY_ROUTES) <= schemas.keys()
    for route in BODY_ROUTES:
        fields = valid_body(route, "m", "x", 4)
        assert fields.keys() <= schemas[route]["properties"].keys(), route


def test_most_requests_carry_the_key_and_some_none_or_another(made: list[Request]) -> None:
    right = f"Authorization: Bearer {KEY}\r\n".encode()
    of_post = [request for request in made if request.kind in ("json", "bytes", "bulk", "media")]
    let_in = [request for request in of_post if request.has_key]
    assert 0.8 < len(let_in) / len(of_post) < 0.97
    assert all(KEY.encode() in b"".join(request.parts) for request in let_in)
    refused = [b"".join(request.parts) for request in of_post if not request.has_key]
    assert not any(right in raw for raw in refused)
    assert any(f"X-Api-Key: {KEY}\r\n".encode() in request.parts[0] for request in let_in)
    assert any(b"Authorization" not in request.parts[0] for request in made if not request.has_key)
    assert all(request.has_key for request in drawn(strategy(None), 100, 1))


def test_priorities_are_drawn_good_and_bad(made: list[Request]) -> None:
    for line in (b"X-Tandem-Priority: high\r\n", b"X-Tandem-Priority: urgent\r\n"):
        assert any(line in request.parts[0] for request in made)


@pytest.mark.ray
def test_routes_are_those_of_the_endpoint() -> None:
    from deployments.endpoint.ingress import app

    assert {route.path.replace(":path", "") for route in app.routes} == set(API_ROUTES)


SLOW = Request(route="/v1/completions", kind="slow", parts=(b"POST ", b"/v1"), pause_s=0.05)
HALF = Request(route="/v1/completions", kind="half", parts=(b"POST ",), is_http=False)
PAGE = "# HELP tandem_x x\n# TYPE tandem_x gauge\ntandem_x 1.0\n"


@pytest.mark.parametrize(
    ("sent", "reply", "what"),
    [
        (REQUEST, Reply(status=200, text='{"id": "x"}'), None),
        (REQUEST, Reply(status=400, text=ERROR), None),
        (REQUEST, Reply(status=500, text=ERROR), "five_xx"),
        (REQUEST, Reply(status=503, text=ERROR), "five_xx"),
        (REQUEST, Reply(status=400, text="<html>"), "shape"),
        (REQUEST, Reply(status=404, text='{"detail": "Not Found"}'), "shape"),
        (REQUEST, Reply(status=400, text=error("")), "shape"),
        (REQUEST, Reply(status=400, text=error("x" * 20_000)), "shape"),
        (REQUEST, Reply(status=400, text='{"error": "no"}'), "shape"),
        (REQUEST, Reply(why="hang"), "hang"),
        (REQUEST, Reply(why="cut"), "cut"),
        (REQUEST, Reply(why="abandoned"), None),
        # A 408 to a request that was sent whole.
        (REQUEST, Reply(status=408, text=LATE), "hang"),
        (REQUEST, Reply(status=408, text="<html>"), "hang"),
        (SLOW, Reply(status=408, text=ERROR), "hang"),
        (get("/v1/models"), Reply(status=408, text=ERROR), "hang"),
        (HALF, Reply(status=408, text="<html>"), None),
        (HALF, Reply(status=408, text=LATE), "hang"),
        # A 200 without the right content.
        (REQUEST, Reply(status=200, text=""), "shape"),
        (REQUEST, Reply(status=200, text="{}"), "shape"),
        (REQUEST, Reply(status=200, text="[1]"), "shape"),
        (REQUEST, Reply(status=200, text='{"id": '), "shape"),
        (REQUEST, Reply(status=200, text=ERROR), "shape"),
        (get("/v1/models"), Reply(status=200, text=""), "shape"),
        (get("/v1/models"), Reply(status=200, text='{"data": []}'), None),
        (get("/v1/models/{model}"), Reply(status=200, text="<html>"), "shape"),
        (get("/health"), Reply(status=200, text=""), None),
        (get("/metrics"), Reply(status=200, text=PAGE), None),
        (get("/metrics"), Reply(status=200, text=""), "shape"),
        (Request(route="/v1/models", kind="get", parts=(b"HEAD /",)), Reply(status=200, text=""), None),
        # Other successes and redirects.
        (REQUEST, Reply(status=302, text=""), "shape"),
        (REQUEST, Reply(status=204, text=""), "shape"),
        (get("other"), Reply(status=302, text=""), "shape"),
        (get("other"), Reply(status=307, text=""), None),
        (get("/v1/models"), Reply(status=307, text=""), "shape"),
        # Refusals for lack of room.
        (REQUEST, Reply(status=429, text=error("too many (ingress.max_bodies_bytes)", code="overloaded")), None),
        (REQUEST, Reply(status=429, text=error("8 are here (admission.max_requests)", code="overloaded")), "refused"),
        (HALF, Reply(status=429, text=ERROR), "refused"),
        # Keys.
        (REQUEST, Reply(status=401, text=ERROR), "auth"),
        (replace(REQUEST, has_key=False), Reply(status=401, text=ERROR), None),
        (replace(REQUEST, has_key=False), Reply(status=401, text="<html>"), "shape"),
        (replace(REQUEST, has_key=False), Reply(status=200, text='{"id": "x"}'), "auth"),
        (replace(REQUEST, has_key=False), Reply(status=200, text=stream("{}", "[DONE]")), "auth"),
        (get("/v1/models", has_key=False), Reply(status=200, text='{"data": []}'), "auth"),
        (get("/metrics", has_key=False), Reply(status=200, text=PAGE), "auth"),
        (get("/health", has_key=False), Reply(status=200, text=""), None),
        # The metrics port needs no key, and its errors are not OpenAI's.
        (get(METRICS_PORT, has_key=False), Reply(status=200, text=PAGE), None),
        (get(METRICS_PORT), Reply(status=200, text="nothing"), "shape"),
        (get(METRICS_PORT), Reply(status=404, text="404: Not Found"), None),
        (get(METRICS_PORT), Reply(status=500, text=""), "five_xx"),
        (get(METRICS_PORT), Reply(why="cut"), "cut"),
        # Streams.
        (REQUEST, Reply(status=200, text=stream("{}", "[DONE]")), None),
        (REQUEST, Reply(status=200, text=stream("{}")), "shape"),
        (REQUEST, Reply(status=200, text=stream("{}", "garbage", "[DONE]")), "shape"),
        (REQUEST, Reply(status=200, text=stream("{}", '{"error": {"message": "no"}}', "[DONE]")), "shape"),
        (REQUEST, Reply(status=200, text=stream("{}", ERROR, "[DONE]")), None),
        (REQUEST, Reply(status=200, text=stream("{}", error(type="server_error"), "[DONE]")), "five_xx"),
        (REQUEST, Reply(status=200, text=stream("{}", error(type="server_error"))), "five_xx"),
        (REQUEST, Reply(status=200, text=stream(LATE, "[DONE]")), "hang"),
        (REQUEST, Reply(status=200, text=stream("{}", error(code="timeout"), "[DONE]")), "hang"),
        (REQUEST, Reply(status=200, text=stream(json.dumps({"x": '"server_error"'}), "[DONE]")), None),
    ],
)
def test_each_wrong_answer_has_its_verdict(sent: Request, reply: Reply, what: str | None) -> None:
    assert verdict(sent, reply) == what


def test_bytes_that_are_no_http_may_be_refused_in_any_words_but_not_with_a_servers_error() -> None:
    noise = Request(route="other", kind="wire", parts=(b"\x00",), is_http=False)
    assert verdict(noise, Reply(status=400, text="<html>")) is None
    assert verdict(noise, Reply(why="cut")) is None
    assert verdict(noise, Reply(status=500)) == "five_xx"
    assert verdict(noise, Reply(why="hang")) == "hang"


def test_equal_faults_are_one_finding() -> None:
    tally = Tally()
    for name in ("1", "6d55987d-e597-4cf1-aa97-2513b4a7b8f0", "dd0981f0a62d47f8a58f89bd223a30a8"):
        tally.count("real", REQUEST, Reply(status=500, text=f"request {name} failed"))
    tally.count("real", REQUEST, Reply(status=400, text=ERROR))
    (finding,) = tally.findings.values()
    assert (finding.count, finding.what, finding.part, finding.request) == (3, "five_xx", "real", REQUEST)
    assert finding.row()["sent"].endswith("\r\n\r\n{}")
    assert (tally.requests, tally.five_xx, tally.hangs) == (4, 3, 0)
    assert tally.by_status == {"500": 3, "400": 1}


def test_a_finding_is_shrunk_to_the_part_that_is_answered_as_badly(made: list[Request]) -> None:
    sends: list[Request] = []

    def is_bad(request: Request) -> bool:
        sends.append(request)
        return request.kind == "json" and b'"stop"' in request.parts[0]

    bad = max(filter(is_bad, made), key=lambda request: len(request.parts[0]))
    sends.clear()
    small = smallest(strategy(), bad, is_bad)
    assert is_bad(small)
    assert len(small.parts[0]) < len(bad.parts[0]) / 2
    assert sends[0] == bad
    assert len(sends) <= 81


def test_a_fault_that_does_not_come_again_keeps_its_request(made: list[Request]) -> None:
    assert smallest(strategy(), made[0], lambda request: False) == made[0]


@pytest.mark.parametrize("index", [0, 1])
def test_each_part_is_a_valid_application(index: int, tmp_path: Path) -> None:
    part = parts(100, tmp_path)[index]
    (application,) = yaml.safe_load(yaml.safe_dump(part.document))["applications"]
    config = parse_app_config(application["args"])
    assert "autoscaling_policy" not in application
    assert not config.is_autoscaled
    assert config.ingress.metrics_on_public_port
    assert Path(config.model.source).is_absolute() or config.model.source.startswith("emulated/")


def test_the_emulated_part_has_a_key_and_limits_that_refuse_no_request(part: Part) -> None:
    config = parse_app_config(part.document["applications"][0]["args"])
    assert config.ingress.api_keys_file is not None
    assert ApiKeys(config.ingress.api_keys_file).name_of(f"Bearer {part.key}") == "fuzz"
    assert config.ingress.admission.ttft_s == 250.0
    assert config.ingress.replicas == 2
    for pool in config.groups[0].pools().values():
        assert pool.emulator is not None
        assert (pool.replicas, pool.emulator.start_s, pool.emulator.time_factor) == (2, 0.0, 20.0)


def answers(*statuses: int) -> Callable[[Request], Coroutine[Any, Any, Reply]]:
    text = json.dumps({"choices": [{"text": "x"}], "usage": {}})
    remaining = list(statuses)

    async def answer(request: Request) -> Reply:
        assert f"Bearer {KEY}".encode() in request.parts[0]
        status = remaining.pop(0)
        return Reply(status=status, text=text if status == 200 else ERROR)

    return answer


async def test_an_unanswered_normal_request_is_found_even_if_it_was_never_answered(part: Part) -> None:
    tally, keyed = Tally(), replace(part, key=KEY)
    answered = await known_answers(answers(200, 200), keyed, "m", tally, salt="before")
    assert (list(answered.values()), tally.findings) == ([("x", {}), ("x", {})], {})
    for salt in ("before", "after"):
        await known_answers(answers(400, 200), keyed, "m", tally, salt=salt)
    assert [finding.what for finding in tally.findings.values()] == ["known", "known"]


async def ok(request: Request) -> Reply:
    return Reply(status=200, text='{"id": "x"}')


async def test_all_requests_are_sent_and_counted_while_processes_are_watched(part: Part) -> None:
    seen: list[Progress] = []

    async def watch(progress: Progress) -> None:
        seen.append(progress)
        await asyncio.Event().wait()

    tally = Tally()
    await send_all(iter([REQUEST] * 20), part, ok, watch, tally, lambda: None)
    assert (tally.requests, seen[0].done, len(seen[0].recent)) == (20, 20, 16)


async def test_an_error_of_the_watch_ends_the_sending(part: Part) -> None:
    async def watch(_: Progress) -> None:
        raise OSError("no /proc")

    async def never(_: Request) -> Reply:
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(ExceptionGroup) as raised:
        await asyncio.wait_for(send_all(iter([REQUEST] * 20), part, never, watch, Tally(), lambda: None), 5.0)
    assert raised.group_contains(OSError, match="no /proc")


class Process:
    def __init__(self, pid: int, title: str) -> None:
        self.pid = pid
        self.title = title

    def cmdline(self) -> list[str]:
        return [self.title]


@pytest.mark.parametrize(
    ("now", "gone"),
    [
        ({1: "ray::ServeReplica:tandem:decode:g0", 2: "haproxy -db -f x.cfg"}, set()),
        ({2: "haproxy -db -f x.cfg"}, {1}),
        ({1: "ray::IDLE", 2: "haproxy -db -f x.cfg"}, {1}),
        ({1: "ray::ServeReplica:tandem:decode:g0"}, {2}),
        ({1: "ray::ServeReplica:tandem:decode:g0", 3: "haproxy -db -f x.cfg"}, {2}),
        ({1: "ray::ServeReplica:tandem:decode:g0", 3: "haproxy -db -f x.cfg -sf 2 -x admin.sock"}, set()),
        ({1: "ray::ServeReplica:tandem:decode:g0", 3: "haproxy -db -f x.cfg -sf 9 -x 2"}, {2}),
        ({3: "haproxy -db -f x.cfg -sf 7 2"}, {1}),
    ],
)
def test_a_process_has_ended_unless_haproxy_was_reloaded(now: dict[int, str], gone: set[int]) -> None:
    processes: Any = [Process(pid, title) for pid, title in now.items()]
    assert ended({1, 2}, processes) == gone


@pytest.mark.parametrize(("index", "kinds"), [(0, ["ingress", "engine"]), (1, ["engine"])])
def test_memory_may_not_rise_in_the_longer_part_and_that_of_engines_not_in_the_real_one(
    index: int, kinds: list[str], tmp_path: Path
) -> None:
    rest = {"first_third_mib": 250.0, "last_third_mib": 255.0, "growth_frac": 0.02, "steady_mib": 0.0}
    rises = {**rest, "steady_mib": 14.5}
    much = {**rest, "last_third_mib": 270.0, "growth_frac": 0.08}
    growth = {"ingress": rises, "engine": rises, "decode replica": rest, "haproxy": much}
    assert grown(growth, parts(100, tmp_path)[index]) == [*kinds, "haproxy"]


Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def endpoint(sent: bytes, *, ends: bool = True) -> AsyncIterator[int]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(sent)
        await writer.drain()
        if ends:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


@pytest.mark.parametrize(
    ("sent", "ends", "status", "why"),
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
async def test_an_answer_is_read_to_its_end(sent: bytes, ends: bool, status: int | None, why: str | None) -> None:
    async with endpoint(sent, ends=ends) as port:
        reply = await send("127.0.0.1", port, REQUEST, 0.5)
    assert (reply.status, reply.why) == (status, why)


@pytest.mark.parametrize("sent", [OK, OK.removesuffix(b"{}")])
async def test_an_answer_to_head_may_have_a_body(sent: bytes) -> None:
    head = Request(route="/health", kind="get", parts=(b"HEAD /health HTTP/1.1\r\n\r\n",))
    async with endpoint(sent) as port:
        reply = await send("127.0.0.1", port, head, 0.5)
    assert (reply.status, reply.why) == (200, None)


async def test_a_client_that_leaves_waits_for_nothing() -> None:
    async with endpoint(b"", ends=False) as port, asyncio.timeout(1.0):
        reply = await send(
            "127.0.0.1", port, Request(route="/health", kind="gone", parts=(b"GET",), is_abandoned=True), 5.0
        )
    assert reply.why == "abandoned"
