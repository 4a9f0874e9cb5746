"""An endpoint with keys and far too much load, on emulated engines: which requests it admits and serves."""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import requests

from deployments.endpoint.api_keys import key_line, new_key
from deployments.wire.messages import Frame
from serve_app.load.metrics_page import scrape
from tests.engines.endpoint import WAIT_S, emulated_document, prompt_ids

pytestmark = [pytest.mark.ray, pytest.mark.vllm]

ADMISSION = {"ttft_s": 1.0, "keys": {"limited": {"requests_per_minute": 6}}}


@pytest.fixture(scope="module", name="file")
def _file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys"


@pytest.fixture(scope="module", name="app")
def _app(file: Path) -> Iterator[Any]:
    from serve_app.sdk import deploy

    let_in(file, {"mine": "mine", "limited": "limited"})
    document = emulated_document(api_keys_file=str(file), admission=ADMISSION, metrics_on_public_port=True)
    with deploy(document) as app:
        assert ask(app).status_code == 200
        yield app


def let_in(file: Path, keys: dict[str, str]) -> None:
    """Write the key file; ``keys``: each key by its name."""
    file.write_text("".join(key_line(name, key) + "\n" for name, key in keys.items()))


def asked(app: Any, path: str, key: str | None) -> requests.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    if path.startswith("/v1/") and not path.startswith("/v1/models"):
        body = {"model": "llama-70b", "prompt": [100] * 50, "max_tokens": 4}
        return requests.post(app.url + path, json=body, headers=headers, timeout=60)
    return requests.get(app.url + path, headers=headers, timeout=60)


def total(app: Any, name: str) -> float:
    """The sum of a metric, from the metrics port, which needs no key."""
    return sum(sample.value for sample in scrape(f"http://127.0.0.1:{app.config.ingress.metrics_port}/metrics", name))


def until(app: Any, key: str, status: int) -> None:
    """Wait until requests with this key get this status: a change of the key file takes effect after a second."""
    deadline = time.monotonic() + WAIT_S
    while asked(app, "/v1/models", key).status_code != status:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def ask(app: Any, key: str = "mine", timeout_s: float = 60.0, **headers: str) -> requests.Response:
    return requests.post(
        f"{app.url}/v1/completions",
        json={"model": "llama-70b", "prompt": prompt_ids(50, 0), "max_tokens": 4},
        headers={"Authorization": f"Bearer {key}", **headers},
        timeout=timeout_s,
    )


async def flood(app: Any, number: int, per_s: float, priority: str) -> list[tuple[int, float, dict[str, str]]]:
    """Streams of 1,000 prompt tokens: status, seconds to the first event or to the refusal, and headers of each."""

    async def one(session: aiohttp.ClientSession, seed: int) -> tuple[int, float, dict[str, str]]:
        await asyncio.sleep(seed / per_s)
        body = {"model": "llama-70b", "prompt": prompt_ids(1000, seed), "max_tokens": 20, "stream": True}
        headers = {"Authorization": "Bearer mine", "X-Tandem-Priority": priority}
        began_s = time.monotonic()
        async with session.post(f"{app.url}/v1/completions", json=body, headers=headers) as answer:
            await answer.content.readline()
            took_s = time.monotonic() - began_s
            await answer.read()
            return answer.status, took_s, dict(answer.headers)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        return await asyncio.gather(*(one(session, seed) for seed in range(number)))


def test_requests_beyond_capacity_are_refused_and_the_others_are_served_soon(app: Any) -> None:
    before = total(app, "tandem_refused_total")
    answers = asyncio.run(flood(app, 400, 40.0, "normal"))
    served = [took_s for status, took_s, _ in answers if status == 200]
    refused = [(took_s, headers) for status, took_s, headers in answers if status == 429]
    assert len(served) + len(refused) == 400
    # An idle machine serves 100 or more. A busy one serves fewer, since emulated engines are late there.
    assert len(served) >= 10
    assert len(refused) >= 100
    # Requests that came before the endpoint knew the engines' capacity are late. Without a bound, half of all requests
    # would wait for more than ten seconds.
    served_s, refused_s = (sorted(times)[len(times) // 2] for times in (served, [took_s for took_s, _ in refused]))
    assert refused_s < served_s < 5.0
    assert all(1 <= int(headers["Retry-After"]) <= 60 for _, headers in refused)
    assert total(app, "tandem_refused_total") - before == len(refused)
    time.sleep(2.0)
    assert ask(app).status_code == 200
    assert total(app, "tandem_waiting_requests") == 0


def test_requests_with_priority_are_served_first(app: Any) -> None:
    async def both() -> tuple[list[Any], list[Any]]:
        low = asyncio.create_task(flood(app, 400, 40.0, "low"))
        await asyncio.sleep(4.0)
        high = await flood(app, 10, 2.0, "high")
        return await low, high

    low, high = asyncio.run(both())
    assert sum(status == 429 for status, _, _ in low) > 100
    # Nearly all on an idle machine, fewer on a busy one: emulated engines are late there.
    low_frac, high_frac = (sum(status == 200 for status, _, _ in each) / len(each) for each in (low, high))
    assert high_frac > 2.0 * low_frac


def test_an_unknown_priority_is_refused_by_name(app: Any) -> None:
    answer = ask(app, **{"X-Tandem-Priority": "urgent"})
    assert answer.status_code == 400
    assert "'urgent': give one of high, normal, low" in answer.json()["error"]["message"]


def test_a_key_gets_no_more_requests_in_a_minute_than_its_limit(app: Any) -> None:
    assert ask(app, "limited").status_code == 200
    refused = ask(app, "limited")
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(refused.headers["Retry-After"]) <= 10
    assert ask(app).status_code == 200


def test_without_a_decode_replica_the_answer_is_503_at_once(app: Any) -> None:
    (replica,) = (one for one in app.processes() if ":decode:g0" in " ".join(one.cmdline()))
    replica.kill()
    until_s = time.monotonic() + WAIT_S
    answer = None
    while answer is None or answer.status_code != 503:
        assert time.monotonic() < until_s
        with suppress(requests.Timeout):  # a request that came before the loss was known waits for another replica
            answer = ask(app, timeout_s=1.0)
    assert int(answer.headers["Retry-After"]) >= 1
    assert "no decode replica runs" in answer.json()["error"]["message"]
    until_s = time.monotonic() + WAIT_S
    while ask(app).status_code != 200:
        assert time.monotonic() < until_s
        time.sleep(0.5)


def test_an_answer_in_one_piece_reports_its_first_token() -> None:
    from deployments.replicas.decode import _with_first

    whole = Frame('{"whole": true}')

    async def answer(has_first: asyncio.Event, wait_s: float) -> AsyncGenerator[Frame, None]:
        await asyncio.sleep(wait_s)
        yield whole

    async def run() -> None:
        soon = asyncio.Event()
        soon.set()
        assert [chunk async for chunk in _with_first(answer(soon, 0.1), soon)] == [Frame(""), whole]
        assert [chunk async for chunk in _with_first(answer(soon, 0.1), asyncio.Event())] == [whole]
        left = _with_first(answer(soon, 60.0), soon)
        assert await anext(left) == Frame("")
        await left.aclose()  # the client has gone: no task may remain
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


def test_without_a_key_only_health_answers(app: Any, file: Path) -> None:
    key = new_key()
    let_in(file, {"mine": key})
    until(app, key, 200)
    for path in ("/v1/completions", "/v1/models", "/v1/models/llama-70b", "/metrics"):
        assert asked(app, path, key).status_code == 200
        for wrong in (None, "mine", new_key()):
            answer = asked(app, path, wrong)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert asked(app, "/v1/chat/completions", None).status_code == 401
    assert asked(app, "/health", None).status_code == 200


def test_a_withdrawn_key_is_refused_without_a_restart(app: Any, file: Path) -> None:
    key, other = new_key(), new_key()
    let_in(file, {"a": key, "b": other})
    until(app, key, 200)
    let_in(file, {"b": other})
    until(app, key, 401)
    assert asked(app, "/v1/models", other).status_code == 200


def test_openais_python_client_sends_its_key(app: Any, file: Path) -> None:
    from openai import AuthenticationError, OpenAI

    key = new_key()
    let_in(file, {"a": key})
    until(app, key, 200)
    client: Any = OpenAI(base_url=f"{app.url}/v1", api_key=key)
    assert client.completions.create(model="llama-70b", prompt=[100] * 50, max_tokens=4).usage.completion_tokens == 4
    with pytest.raises(AuthenticationError):
        OpenAI(base_url=f"{app.url}/v1", api_key="wrong").models.list()
