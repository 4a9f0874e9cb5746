"""Prompts go where their beginning is cached, whichever replica of the endpoint has them, and after a lost board."""

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import aiohttp
import psutil
import pytest

from tests.engines.endpoint import WAIT_S, emulated_document, eventually, samples, total
from tests.lab.stand.processes import title

pytestmark = [pytest.mark.ray, pytest.mark.vllm]

PIECE_TOKENS = 32
WORDS = ("red", "blue", "green", "stone", "river", "cloud", "house", "light", "seven", "window")


@pytest.fixture(scope="module", name="app")
def _app(make_document: Any) -> Iterator[Any]:
    """A service on real engines and one on emulated ones, with two decode replicas each, and two endpoint replicas."""
    from serve_app.sdk import deploy

    document, emulated = make_document(), emulated_document()["applications"][0]["args"]
    args = document["applications"][0]["args"]
    services = []
    for fields in (args, emulated):
        service = {key: fields.pop(key) for key in ("model", "engine_kwargs", "groups")}
        service["groups"][0]["decode"]["replicas"] = 2
        service["router"] = {"policy": "prefix", "prefix": {"piece_tokens": PIECE_TOKENS}}
        services.append(service)
    services[1]["groups"][0]["name"] = "emulated"
    args["services"] = services
    args["ingress"] |= {"replicas": 2, "explains_routing": True}
    with deploy(document) as running:
        yield running


def said(words: int, rng: random.Random) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


async def chat(
    app: Any, model: str, messages: list[dict[str, str]], session: str | None = None, **fields: Any
) -> tuple[str, dict[str, Any]]:
    """The text of an answer, and how its request was routed."""
    headers = {"X-Tandem-Explain": "1"} | ({} if session is None else {"X-Session-ID": session})
    body = {"model": model, "messages": messages, "max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **fields}
    # A connection of its own, to any replica of the endpoint.
    async with (
        aiohttp.ClientSession(headers=headers) as client,
        client.post(f"{app.url}/v1/chat/completions", json=body) as response,
    ):
        answer = await response.json()
        assert response.status == 200, answer
        return answer["choices"][0]["message"]["content"], json.loads(response.headers["x-tandem-routing"])


async def reported(app: Any, model: str, messages: list[dict[str, str]]) -> str:
    """The decode replica of a prompt, once the endpoint knows from a report that it holds the prompt."""
    _, route = await chat(app, model, messages)
    await asyncio.sleep(1.0)
    return str(route["decode"]["replica"])


def boards(app: Any) -> list[psutil.Process]:
    """The processes of prefix boards."""
    return [one for one in app.processes() if "PrefixBoard" in title(one)]


async def repeats_are_known(app: Any, model: str, seed: int) -> None:
    """Whatever replica of the endpoint has the second and later requests: it knows what the first one left behind."""
    messages = [{"role": "user", "content": said(150, random.Random(seed))}]
    first = await reported(app, model, messages)
    for _ in range(8):
        _, route = await chat(app, model, messages)
        assert route["decode"]["replica"] == first
        assert route["decode"]["overlap_tokens"] >= 4 * PIECE_TOKENS
        assert route["decode"]["by"] == "prefix"
        assert len(route["decode"]["runners_up"]) == 1


async def test_every_replica_of_the_endpoint_knows_what_the_others_have_sent(app: Any) -> None:
    for seed in range(3):
        await repeats_are_known(app, "llama-70b", seed)
    counts: dict[str, float] = {}
    for labels, value in samples(app, "tandem_requests_total"):
        counts[labels["replica"]] = counts.get(labels["replica"], 0.0) + value
    assert len(counts) == 2
    assert min(counts.values()) > 0  # each had some of these requests


async def test_a_session_has_one_replica(app: Any) -> None:
    rng = random.Random(50)
    places = {}
    for number in range(6):
        routes = [
            await chat(app, "llama-70b", [{"role": "user", "content": said(5, rng)}], session=f"s{number}")
            for _ in range(4)
        ]
        assert {route["decode"]["by"] for _, route in routes} == {"session"}
        (places[number],) = {route["decode"]["replica"] for _, route in routes}
    assert len(set(places.values())) == 2


async def test_after_a_lost_board_requests_are_answered_and_prefixes_are_known_again(app: Any) -> None:
    (board,) = boards(app)
    board.kill()
    for seed in range(100, 110):
        await chat(app, "llama-70b", [{"role": "user", "content": said(150, random.Random(seed))}])
    await eventually(lambda: bool({one.pid for one in boards(app)} - {board.pid}), within_s=WAIT_S)
    for _ in range(30):  # until all have found the new board
        try:
            await repeats_are_known(app, "llama-70b", 200)
            break
        except AssertionError:
            await asyncio.sleep(1.0)
    await repeats_are_known(app, "llama-70b", 201)


async def test_the_next_turn_goes_where_the_conversation_is_cached_and_finds_it(app: Any) -> None:
    places, before = set(), hits(app, "decode")
    for seed in range(4):
        rng = random.Random(300 + seed)
        messages = [{"role": "user", "content": said(120, rng)}]
        answer, route = await chat(app, "tiny", messages)
        first = route["decode"]["replica"]
        places.add(first)
        assert route["decode"]["overlap_tokens"] < PIECE_TOKENS
        for _ in range(2):
            await asyncio.sleep(1.0)
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": said(20, rng)}]
            answer, route = await chat(app, "tiny", messages)
            assert (route["decode"]["replica"], route["decode"]["by"]) == (first, "prefix")
            # Most of the prompt is the earlier turns, and the engine has them.
            assert route["cached_tokens"] > 0.5 * route["input_tokens"]
            assert route["path"] == "local"
            assert route["reason"] in ("cached", "short")
        _, salted = await chat(app, "tiny", messages, cache_salt="blue")
        assert (salted["decode"]["overlap_tokens"], salted["cached_tokens"]) == (0, 0)
    assert len(places) == 2
    assert found_frac(app, "decode", before) >= 0.95
    assert total(app, "tandem_cache_events_lost_total", how="restart") == 0


async def test_prefill_is_chosen_by_what_its_engine_holds(app: Any) -> None:
    rng = random.Random(400)
    shared = said(300, rng)
    overlaps, before = [], hits(app, "prefill")
    for _ in range(2):
        _, route = await chat(app, "tiny", [{"role": "user", "content": f"{shared} {said(300, rng)}"}])
        assert (route["path"], route["reason"]) == ("remote", "long")
        overlaps.append(route["prefill"]["overlap_tokens"])
        await asyncio.sleep(1.0)
    assert overlaps[0] == 0
    assert overlaps[1] >= 200
    assert found_frac(app, "prefill", before) >= 0.95


def hits(app: Any, role: str) -> tuple[float, float]:
    """Tokens that were expected in the caches of a role's engines so far, and those of them that they had."""
    expected, found = (total(app, f"tandem_prefix_{name}_tokens_total", to=role) for name in ("expected", "found"))
    return expected, found


def found_frac(app: Any, role: str, before: tuple[float, float]) -> float:
    """Share of the expected tokens that the engines had; ``before``: what was counted before."""
    expected, found = (now - then for now, then in zip(hits(app, role), before, strict=True))
    assert expected > 0
    return found / expected
