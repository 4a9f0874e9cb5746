"""Requests whose every output token is known: the load of ``make drill``."""

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

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
# Length of every answer.
OUTPUT_TOKENS = 300
# Length of a long prompt: too long for decode to take it over from prefill's queue; a CPU computes it for 1 to 2 s.
LONG_TOKENS = 3000
# Token ids that the tiny model has and that are no special ones.
_TOKEN_RANGE = (300, 1000)
# Added to the seed for the further prompts.
_OTHER_SEED = 1_000_003


@dataclass(slots=True, kw_only=True)
class Answer:
    """One answer as its client saw it.

    Attributes:
        token_ids: the output.
        is_ended: it ended with ``[DONE]`` and without an error.
        is_cut: the connection broke after the response's headers; a timeout does not count.
        error: message of the endpoint or the connection.
        retries: how often the request was sent again after the connection broke before the headers. Refused
            connections do not count.
        ttft_s: time from the first sending to the first token.
        gap_s: the longest time between two events.
        span_s: when it was sent and when it ended, by the monotonic clock.
    """

    token_ids: list[int] = field(default_factory=list)
    is_ended: bool = False
    is_cut: bool = False
    error: str | None = None
    retries: int = 0
    ttft_s: float | None = None
    gap_s: float = 0.0
    span_s: tuple[float, float] = (0.0, 0.0)


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
        more: further prompts: when each is sent, in seconds after the start, and its length in tokens.
        faults: when each fault is called, in seconds after the start, and the function that breaks something.
        on_answer: called after each answer.

    Returns:
        One answer per request, in the order of sending, and then the answers to ``more``.
    """
    count = max(1, round(rate * seconds))
    rng = random.Random(seed + _OTHER_SEED)
    further = [[rng.randrange(*_TOKEN_RANGE) for _ in range(input_tokens)] for _, input_tokens in more]
    bodies = [
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": OUTPUT_TOKENS,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            "cache_salt": salt,
        }
        for prompt in [*prompts(seed, count), *further]
    ]
    sent_at_s = [*(number / rate for number in range(count)), *(at_s for at_s, _ in more)]
    with ahead_of_others():
        return await _run(url, bodies, sent_at_s, faults, on_answer)


async def _run(
    url: str,
    bodies: Sequence[dict[str, Any]],
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
            answer = await _send(session, f"{url}/v1/completions", bodies[number])
            answer.span_s = sent_s, time.monotonic()
            on_answer()
            return answer

        async def break_it(at_s: float, fault: Callable[[], None]) -> None:
            await asyncio.sleep(at_s)
            await asyncio.to_thread(_break, fault)

        broken = [asyncio.create_task(break_it(at_s, fault)) for at_s, fault in faults]
        answers = await asyncio.gather(*(one(number) for number in range(len(bodies))))
        await asyncio.gather(*broken)
    return answers


def _break(fault: Callable[[], None]) -> None:
    with ahead_of_others():
        fault()


async def _send(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Answer:
    answer = Answer()
    sent_s = time.monotonic()
    while True:
        has_headers = False
        try:
            async with session.post(url, json=body) as response:
                has_headers = True
                if response.status != 200:
                    answer.error = f"HTTP {response.status}: {(await response.text())[:300]}"
                    return answer
                await _read(response, answer, sent_s)
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


async def _read(response: aiohttp.ClientResponse, answer: Answer, sent_s: float) -> None:
    last_s = None
    async for line in response.content:
        text = line.strip()
        if text == b"data: [DONE]":
            answer.is_ended = answer.error is None
            continue
        if not text.startswith(b"data: "):
            continue
        event = json.loads(text.removeprefix(b"data: "))
        if "error" in event:
            answer.error = str(event["error"].get("message", event["error"]))[:300]
            continue
        now_s = time.monotonic()
        new = [token for choice in event["choices"] for token in choice.get("token_ids") or ()]
        if new and answer.ttft_s is None:
            answer.ttft_s = now_s - sent_s
        if last_s is not None:
            answer.gap_s = max(answer.gap_s, now_s - last_s)
        last_s = now_s
        answer.token_ids += new
