"""What the endpoint does with a request before and after the relay; Serve's handles are fakes."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from tests.deployments.endpoint.pools import Clock, Pools, done, event, whole

pytestmark = pytest.mark.ray


@pytest.fixture(name="clock")
def _clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def endpoint(clock: Clock, **limits: Any) -> tuple[Any, Pools]:
    """An endpoint without Serve, and its pools. All requests have the key ``k``, which has these limits."""
    from deployments.endpoint.config import IngressConfig
    from deployments.endpoint.gate import Gate, Intake
    from deployments.endpoint.ingress import Ingress
    from deployments.endpoint.request_body import Bodies
    from router.request_limits import RequestLimits

    class Endpoint(Ingress):  # type: ignore[misc]
        def __del__(self) -> None:
            """Do nothing: Serve awaits this method, and the garbage collector does not."""

    pools, made = Pools(clock), Endpoint.__new__(Endpoint)
    config = IngressConfig.model_validate({"api_keys_file": "/keys", "admission": {"key": limits}})
    request_limits = RequestLimits(config.admission, 1)
    pools.model.gate = Gate(config.admission, request_limits, replicas=1, prefill_replicas=lambda: 1)
    keys: Any = SimpleNamespace(name_of=lambda header: "k")
    made._config, made._models, made._app_name = config, {"m": pools.model}, "nobody"
    made._intake = Intake(request_limits, keys, [pools.model.gate])
    made._bodies, made._relay = Bodies(config), pools.relay
    return made, pools


async def serve(made: Any, body: bytes | Exception, priority: str = "normal", route: Any = None, **more: str) -> Any:
    from fastapi import Request

    from deployments.endpoint.routes import COMPLETIONS

    headers = [(b"x-tandem-priority", priority.encode()), (b"content-type", b"application/json")]
    headers += [(name.replace("_", "-").encode(), value.encode()) for name, value in more.items()]

    async def receive() -> dict[str, Any]:
        if isinstance(body, Exception):
            raise body
        return {"type": "http.request", "body": body, "more_body": False}

    route = route or COMPLETIONS
    place = {"path": route.path, "query_string": b"", "root_path": "", "scheme": "http", "server": ("h", 80)}
    return await made._serve(route, Request({"type": "http", "method": "POST", "headers": headers, **place}, receive))


async def test_too_many_answers_are_refused_on_routes_of_vllms_application(clock: Clock) -> None:
    from deployments.endpoint.routes import NATIVE

    made, _ = endpoint(clock)
    (route,) = [route for route in NATIVE if route.name == "invocations"]
    response = await serve(made, b'{"model": "m", "prompt": ["a", "b"], "n": 513}', route=route)
    assert response.status_code == 400
    assert "1026 answers were asked for" in json.loads(response.body)["error"]["message"]


async def test_a_model_that_is_no_text_is_refused_by_its_type(clock: Clock) -> None:
    from deployments.endpoint.routes import NATIVE

    made, _ = endpoint(clock)
    made._adapters = SimpleNamespace(names=tuple)
    (route,) = [route for route in NATIVE if route.name == "responses"]
    response = await serve(made, b'{"model": {"wrong": [1.5]}, "input": "x"}', route=route)
    assert (response.status_code, message(response)) == (
        400,
        "model must be a string, got dict; this endpoint serves 'm'",
    )


def message(response: Any) -> str:
    return str(json.loads(response.body)["error"]["message"])


async def test_a_client_that_leaves_while_its_body_is_read_has_used_up_a_request(clock: Clock) -> None:
    from starlette.requests import ClientDisconnect

    made, _ = endpoint(clock, requests_per_minute=12)  # a burst of two
    for _ in range(2):
        with pytest.raises(ClientDisconnect):
            await serve(made, ClientDisconnect())
    assert "requests of this key come faster than 12 a minute" in message(await serve(made, b"{}"))
    assert not made._bodies.requests_by_key["k"] and not made._intake.request_count


async def test_a_body_without_room_is_counted_with_the_priority_that_its_request_asks_for(clock: Clock) -> None:
    from deployments import metrics

    made, _ = endpoint(clock, max_requests=1)
    made._bodies.requests_by_key["k"] = 1
    counted = metrics.REFUSED.labels("key", "low")
    before = counted._value.get()
    assert "has 1 requests of this key" in message(await serve(made, b"{}", priority="low"))
    assert counted._value.get() - before == 1


async def test_a_refusal_for_a_full_engine_says_when_to_try_again_and_is_counted(clock: Clock) -> None:
    from deployments import metrics
    from deployments.wire.messages import full

    made, pools = endpoint(clock)
    pools.handles["a"].next = [("a0", [full("no room")])]
    counted = metrics.REFUSED.labels("engine", "normal")
    before = counted._value.get()
    raw = b'{"model": "m", "prompt": "x"}'
    response = await serve(made, raw)
    assert (response.status_code, response.headers["Retry-After"]) == (429, "1")
    assert json.loads(response.body)["error"]["code"] == "overloaded"
    assert counted._value.get() - before == 1
    assert pools.handles["a"].requests[0].body == raw
    assert not made._bodies.used_bytes and not made._intake.request_count


async def ask(method: str, path: str) -> Any:
    """The response of the app outside of Serve; there a route cannot find its replica."""
    import httpx

    from deployments.endpoint.http_app import ConfiguredCors
    from deployments.endpoint.ingress import app

    app.user_middleware[0].kwargs["settings"] = lambda: None  # in Serve, the replica has them
    assert app.user_middleware[0].cls is ConfiguredCors

    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://endpoint") as client:
        return await client.request(method, path)


async def test_a_wrong_method_is_an_openai_error_that_names_the_right_one() -> None:
    response = await ask("POST", "/v1/models")
    assert (response.status_code, response.headers["Allow"]) == (405, "GET")  # RFC 9110 section 15.5.6
    assert response.json()["error"]["message"] == "POST /v1/models: Method Not Allowed"
    error = (await ask("GET", "/v1/messages")).json()  # in the form of the API that has the path
    assert (error["type"], error["error"]["message"]) == ("error", "GET /v1/messages: Method Not Allowed")


async def test_an_error_of_the_endpoint_itself_is_an_openai_error() -> None:
    response = await ask("GET", "/v1/models")
    assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")


async def test_an_endpoint_without_a_healthy_pool_says_when_to_try_again(clock: Clock) -> None:
    made, _ = endpoint(clock)  # its pools answer no health check
    error = await made._check_health()
    assert (error.status, error.headers()["Retry-After"]) == (503, "5")


async def test_one_health_check_serves_all_clients_of_a_second(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:

    made, _ = endpoint(clock)
    looks = []

    async def look() -> None:
        looks.append(None)
        await asyncio.sleep(0.05)

    monkeypatch.setattr(made, "_check_health", look)
    made._health_error, made._health_checked_s, made._health_lock = None, -1e9, asyncio.Lock()
    assert [one.status_code for one in await asyncio.gather(*(made.health() for _ in range(5)))] == [200] * 5
    assert len(looks) == 1
    made._health_checked_s -= 2.0  # more than a second has passed since then
    await made.health()
    assert len(looks) == 2


def http(**headers: str) -> Any:
    from fastapi import Request

    raw = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    return Request({"type": "http", "method": "POST", "headers": raw})


def test_a_session_is_named_by_the_configured_header() -> None:
    from deployments.endpoint.client_request import named_session

    assert named_session(http(x_session_id="user-7/chat=3"), "X-Session-ID") == "user-7/chat=3"
    assert named_session(http(x_session_id="7"), "X-Chat") is None


@pytest.mark.parametrize("name", ["two words", "x" * 5000, "caf\xe9"])
def test_any_text_names_a_session(name: str) -> None:
    from deployments.endpoint.client_request import named_session
    from router.session import SessionPlaces

    places = SessionPlaces()
    places.set_replicas(["a", "b"])
    session = named_session(http(x_session_id=name), "X-Session-ID")
    assert session == name
    assert places.replica_of(session, ["a", "b"]) in ("a", "b")


def test_an_empty_header_names_no_session() -> None:
    from deployments.endpoint.client_request import named_session

    assert named_session(http(x_session_id=""), "X-Session-ID") is None


@pytest.mark.parametrize(
    ("is_stream", "asks", "is_allowed"), [(True, "1", True), (False, "1", True), (True, "0", True), (True, "1", False)]
)
async def test_a_request_is_explained_if_it_asks_and_the_configuration_allows_it(
    clock: Clock, is_stream: bool, asks: str, is_allowed: bool
) -> None:
    from deployments.wire.messages import PromptRoute

    made, pools = endpoint(clock)
    made._config = made._config.model_copy(update={"explains_routing": is_allowed})
    route = PromptRoute(path="local", reason="short", input_tokens=9, cached_tokens=0, block_tokens=32)
    frames = [event(1)._replace(route=route), done()] if is_stream else [whole()._replace(route=route)]
    pools.handles["a"].next = [("a0", frames)]
    response = await serve(made, b'{"model": "m", "prompt": "a"}', x_tandem_explain=asks)
    header = response.headers.get("x-tandem-routing")
    assert pools.handles["a"].requests[0].reports_route == (header is not None) == (asks == "1" and is_allowed)
    if header is not None:
        assert json.loads(header)["path"] == "local"


@pytest.mark.parametrize("given", [b"", b'"model": null, ', b'"model": "", ', b'"model": "m", '])
async def test_without_a_name_the_only_model_answers(clock: Clock, given: bytes) -> None:
    made, pools = endpoint(clock)
    pools.handles["a"].next = [("a0", [whole()])]
    response = await serve(made, b"{" + given + b'"prompt": "a"}')
    assert response.status_code == 200


@pytest.mark.parametrize("given", [b"", b'"model": null, ', b'"model": "", '])
async def test_without_a_name_several_models_are_listed(clock: Clock, given: bytes) -> None:
    made, pools = endpoint(clock)
    made._models = {"m": pools.model, "n": pools.model}
    response = await serve(made, b"{" + given + b'"prompt": "a"}')
    error = json.loads(response.body)["error"]
    assert (response.status_code, error["param"]) == (400, "model")
    assert "this endpoint serves 'm', 'n'" in error["message"]


@pytest.mark.parametrize(
    ("given", "status", "code"), [(b'"other"', 404, "model_not_found"), (b"3", 400, None), (b'["m"]', 400, None)]
)
async def test_a_name_of_no_model_is_refused(clock: Clock, given: bytes, status: int, code: str | None) -> None:
    made, _ = endpoint(clock)
    response = await serve(made, b'{"prompt": "a", "model": ' + given + b"}")
    error = json.loads(response.body)["error"]
    assert (response.status_code, error["param"], error["code"]) == (status, "model", code)


async def test_the_first_frames_headers_are_the_responses_and_the_clients_reach_decode(clock: Clock) -> None:
    made, pools = endpoint(clock)
    for frames in ([whole()], [event(1), done()]):
        pools.handles["a"].next = [("a0", [frames[0]._replace(headers=(("x-load", "7"),)), *frames[1:]])]
        headers = {"endpoint_load_metrics_format": "JSON", "x_other": "y"}
        response = await serve(made, b'{"model": "m", "prompt": "a"}', **headers)
        assert response.headers["x-load"] == "7"
        assert pools.handles["a"].requests[-1].http_headers == (("endpoint-load-metrics-format", "JSON"),)


async def test_a_list_of_models_and_one_of_them_have_vllms_fields(clock: Clock) -> None:
    made, _ = endpoint(clock)
    made._created_s = 7
    (card,) = json.loads((await made.models(http())).body)["data"]
    assert (card["id"], card["root"], card["parent"], card["created"]) == ("m", "./models/m", None, 7)
    assert json.loads((await made.model(http(), "m")).body) == card
    assert json.loads((await made.model(http(), "")).body) == {"object": "list", "data": [card]}


async def test_head_of_the_health_check_answers_as_get_does() -> None:
    for method in ("HEAD", "GET"):
        assert (await ask(method, "/health")).status_code == 500  # outside of Serve it finds no replica
    assert (await ask("POST", "/health")).status_code == 405
