"""An endpoint of which far too much is asked, on emulated engines: who is served, who is refused, and how."""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import suppress
from typing import Any

import aiohttp
import pytest
import requests

from deployments.api_keys import key_line
from tests.engines.endpoint import emulated_document, prompt_ids, total

pytestmark = [pytest.mark.ray, pytest.mark.vllm]

ADMISSION = {"ttft_s": 1.0, "keys": {"limited": {"requests_per_minute": 6}}}


@pytest.fixture(scope="module", name="app")
def _app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from serve_app.sdk import deploy

    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("".join(key_line(name, name) + "\n" for name in ("mine", "limited")))
    with deploy(emulated_document(api_keys_file=str(file), admission=ADMISSION)) as app:
        assert ask(app).status_code == 200
        yield app


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


def test_what_is_too_much_is_refused_and_the_rest_is_served_in_time(app: Any) -> None:
    before = total(app, "tandem_refused_total")
    answers = asyncio.run(flood(app, 400, 40.0, "normal"))
    served = [took_s for status, took_s, _ in answers if status == 200]
    refused = [(took_s, headers) for status, took_s, headers in answers if status == 429]
    assert len(served) + len(refused) == 400
    assert len(served) >= 40
    assert len(refused) >= 100
    # What came before anybody knew what the engines can take is in time no more.
    assert sorted(served)[len(served) // 2] < 1.5
    assert sorted(took_s for took_s, _ in refused)[len(refused) // 2] < 0.5
    assert all(1 <= int(headers["Retry-After"]) <= 60 for _, headers in refused)
    assert total(app, "tandem_refused_total") - before == len(refused)
    time.sleep(2.0)
    assert ask(app).status_code == 200
    assert total(app, "tandem_waiting_requests") == 0


def test_who_has_priority_is_served_first(app: Any) -> None:
    async def both() -> tuple[list[Any], list[Any]]:
        low = asyncio.create_task(flood(app, 400, 40.0, "low"))
        await asyncio.sleep(4.0)
        high = await flood(app, 10, 2.0, "high")
        return await low, high

    low, high = asyncio.run(both())
    assert sum(status == 429 for status, _, _ in low) > 100
    assert sum(status == 200 for status, _, _ in high) >= 9


def test_a_priority_that_is_none_is_named(app: Any) -> None:
    answer = ask(app, **{"X-Tandem-Priority": "urgent"})
    assert answer.status_code == 400
    assert "'urgent': give one of high, normal, low" in answer.json()["error"]["message"]


def test_one_key_takes_no_more_than_its_share_of_a_minute(app: Any) -> None:
    assert ask(app, "limited").status_code == 200
    refused = ask(app, "limited")
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(refused.headers["Retry-After"]) <= 10
    assert ask(app).status_code == 200


def test_with_no_decode_replica_the_answer_is_503_at_once(app: Any) -> None:
    (replica,) = (one for one in app.processes() if ":decode:g0" in " ".join(one.cmdline()))
    replica.kill()
    until_s = time.monotonic() + 20.0
    answer = None
    while answer is None or answer.status_code != 503:
        assert time.monotonic() < until_s
        with suppress(requests.Timeout):  # who came before it was known waits for another replica
            answer = ask(app, timeout_s=1.0)
    assert int(answer.headers["Retry-After"]) >= 1
    assert "no decode replica runs" in answer.json()["error"]["message"]
    until_s = time.monotonic() + 120.0
    while ask(app).status_code != 200:
        assert time.monotonic() < until_s
        time.sleep(0.5)


def test_an_answer_in_one_piece_tells_that_its_first_token_has_come() -> None:
    from deployments.decode import _told

    async def answer(has_first: asyncio.Event, wait_s: float) -> AsyncGenerator[str, None]:
        await asyncio.sleep(wait_s)
        yield "whole"

    async def run() -> None:
        soon = asyncio.Event()
        soon.set()
        assert [chunk async for chunk in _told(answer(soon, 0.1), soon)] == [None, "whole"]
        assert [chunk async for chunk in _told(answer(soon, 0.1), asyncio.Event())] == ["whole"]
        left = _told(answer(soon, 60.0), soon)
        assert await anext(left) is None
        await left.aclose()  # the client has gone: nothing may be left behind
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())
