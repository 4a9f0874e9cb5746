"""Requests whose whole output is known: the load of ``make drill``."""

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import aiohttp

from tests.lab.drill.apis import APIS, Answer, Api
from tests.lab.stand.precedence import ahead_of_others

# A request ends after this time, in seconds.
_TIMEOUT_S = 120.0
# A request is sent again this often if its connection breaks before the headers of an answer.
_RETRIES = 5
# Time before it is sent again, in seconds.
_RETRY_S = 0.3
# A request whose connection is refused is sent again for this long, in seconds: the node's only proxy may be starting.
_CONNECT_S = 30.0
# Lengths of the prompts, in turn; the second is above the default bound of local prefill.
INPUT_TOKENS = (40, 400)
# Length of a long prompt: too long for decode to take it over from prefill's queue; a CPU computes it for 1 to 2 s.
LONG_TOKENS = 3000
# Token ids that the tiny model has and that are no special ones.
_TOKEN_RANGE = (300, 1000)
# Added to the seed for the further prompts.
_OTHER_SEED = 1_000_003

Request = tuple[Api, dict[str, Any]]


def prompts(seed: int, count: int) -> list[list[int]]:
    """The token ids of ``count`` prompts, short and long ones in turn."""
    rng = random.Random(seed)
    return [
        [rng.randrange(*_TOKEN_RANGE) for _ in range(INPUT_TOKENS[number % len(INPUT_TOKENS)])]
        for number in range(count)
    ]


async def run_load(
    url: str,
    model: str,
    *,
    rate: float,
    seconds: float,
    seed: int,
    salt: str,
    apis: Sequence[str] = ("completions",),
    more: Sequence[tuple[float, int]] = (),
    faults: Sequence[tuple[float, Callable[[], None]]] = (),
    on_answer: Callable[[], None] = lambda: None,
) -> list[Answer]:
    """Send greedy streams at a steady rate; equal seeds give equal prompts.

    Args:
        url: the endpoint, without ``/v1``.
        model: the name that the endpoint serves.
        rate: requests/s.
        seconds: duration of the load.
        seed: draws the prompts.
        salt: keeps the prefixes apart from those of other runs in caches.
        apis: names of the APIs that the requests take in turn.
        more: further prompts: when each is sent, in seconds after the start, and its length in tokens.
        faults: when each fault is called, in seconds after the start, and the function that breaks something.
        on_answer: called after each answer.

    Returns:
        One answer per request, in the order of sending, and then the answers to ``more``.
    """
    count = max(1, round(rate * seconds))
    rng = random.Random(seed + _OTHER_SEED)
    further = [[rng.randrange(*_TOKEN_RANGE) for _ in range(input_tokens)] for _, input_tokens in more]
    requests = [
        (api, {"model": model, "stream": True, "cache_salt": salt, **api.body(prompt)})
        for api, prompt in _in_turn(apis, [*prompts(seed, count), *further])
    ]
    sent_at_s = [*(number / rate for number in range(count)), *(at_s for at_s, _ in more)]
    with ahead_of_others():
        return await _run(url, requests, sent_at_s, faults, on_answer)


def _in_turn(apis: Sequence[str], drawn: Sequence[list[int]]) -> Iterator[tuple[Api, list[int]]]:
    """Each prompt with its API. Every API gets prompts of each length."""
    for number, prompt in enumerate(drawn):
        yield APIS[apis[number // len(INPUT_TOKENS) % len(apis)]], prompt


async def _run(
    url: str,
    requests: Sequence[Request],
    sent_at_s: Sequence[float],
    faults: Sequence[tuple[float, Callable[[], None]]],
    on_answer: Callable[[], None],
) -> list[Answer]:
    timeout, connector = aiohttp.ClientTimeout(total=_TIMEOUT_S), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        started_s = time.monotonic()

        async def one(number: int) -> Answer:
            await asyncio.sleep(max(0.0, started_s + sent_at_s[number] - time.monotonic()))
            sent_s = time.monotonic()
            answer = await _send(session, url, *requests[number])
            answer.span_s = sent_s, time.monotonic()
            on_answer()
            return answer

        async def break_it(at_s: float, fault: Callable[[], None]) -> None:
            await asyncio.sleep(at_s)
            await asyncio.to_thread(_break, fault)

        broken = [asyncio.create_task(break_it(at_s, fault)) for at_s, fault in faults]
        answers = await asyncio.gather(*(one(number) for number in range(len(requests))))
        await asyncio.gather(*broken)
    return answers


def _break(fault: Callable[[], None]) -> None:
    with ahead_of_others():
        fault()


async def _send(session: aiohttp.ClientSession, url: str, api: Api, body: dict[str, Any]) -> Answer:
    answer = Answer()
    sent_s = time.monotonic()
    while True:
        has_headers = False
        try:
            async with session.post(f"{url}{api.path}", json=body) as response:
                has_headers = True
                if response.status != 200:
                    answer.error = f"HTTP {response.status}: {(await response.text())[:300]}"
                    return answer
                await _read(response, api, answer, sent_s)
                return answer
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            answer.error = f"{type(error).__name__}: {error}"
            is_refused = isinstance(error, aiohttp.ClientConnectorError)
            may_retry = time.monotonic() - sent_s < _CONNECT_S if is_refused else answer.retries < _RETRIES
            if has_headers or isinstance(error, TimeoutError) or not may_retry:
                answer.is_cut = has_headers and not isinstance(error, TimeoutError)
                return answer
            answer.retries += not is_refused
            answer.error = None
            await asyncio.sleep(_RETRY_S)


async def _read(response: aiohttp.ClientResponse, api: Api, answer: Answer, sent_s: float) -> None:
    last_s = None
    async for line in response.content:
        text = line.strip()
        if text == b"data: [DONE]":
            answer.end()
            continue
        if not text.startswith(b"data: "):
            continue
        api.read(answer, json.loads(text.removeprefix(b"data: ")))
        answer.events += 1
        now_s = time.monotonic()
        if answer.output and answer.ttft_s is None:
            answer.ttft_s = now_s - sent_s
        if last_s is not None:
            answer.gap_s = max(answer.gap_s, now_s - last_s)
        last_s = now_s
