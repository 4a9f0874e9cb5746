"""The load generator: replays a trace, or holds a number of requests in flight, on any OpenAI endpoint."""

import asyncio
import json
import random
import re
import time
from collections.abc import Callable, Sequence

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError

from autoscale.report import RequestRecord
from autoscale.traces.trace import TraceRequest

# Longest request.
_TIMEOUT_S = 300.0
# Token ids of prompts: ordinary tokens of any tokenizer with at least 1,000 entries.
_TOKEN_RANGE = (300, 1000)
# How the last event of a stream, which has the usage, is recognised: it has no choices.
_USAGE = re.compile(rb'"choices": ?\[\]')

Progress = Callable[[int], None]


def _ignore(requests: int) -> None:
    """Show no progress."""


class LoadGenerator:
    """Streams completions with prompts of an exact length: random token ids, so that no two prompts share a prefix."""

    def __init__(self, base_url: str, model: str, *, seed: int | None = 0, api_key: str | None = None) -> None:
        """Prepare a load on ``base_url``, without ``/v1``; equal seeds give equal prompts, ``None`` new ones."""
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._url = f"{base_url.rstrip('/')}/v1/completions"
        self._model = model
        self._rng = random.Random(seed)

    async def replay(self, trace: Sequence[TraceRequest], progress: Progress = _ignore) -> list[RequestRecord]:
        """Open loop: each request is sent at its time, whether earlier ones were answered or not."""
        async with self._session() as session:
            start = time.perf_counter()
            tasks = []
            for request in trace:
                await asyncio.sleep(max(0.0, request.at_s - (time.perf_counter() - start)))
                tasks.append(asyncio.create_task(self._send(session, request, start, progress)))
            return await asyncio.gather(*tasks)

    async def keep_in_flight(self, requests: Sequence[TraceRequest], concurrency: int) -> list[RequestRecord]:
        """Closed loop: ``concurrency`` requests at a time; arrival times are ignored."""
        waiting = iter(requests)
        records: list[RequestRecord] = []

        async def worker(session: aiohttp.ClientSession, start: float) -> None:
            for request in waiting:
                records.append(await self._send(session, request, start))

        async with self._session() as session:
            start = time.perf_counter()
            await asyncio.gather(*(worker(session, start) for _ in range(concurrency)))
        return records

    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S),
            connector=aiohttp.TCPConnector(limit=0),
            headers=self._headers,
        )

    async def _send(
        self, session: aiohttp.ClientSession, request: TraceRequest, start: float, progress: Progress = _ignore
    ) -> RequestRecord:
        body = {
            "model": self._model,
            "prompt": [self._rng.randrange(*_TOKEN_RANGE) for _ in range(request.input_tokens)],
            "max_tokens": request.output_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        output_tokens = request.output_tokens
        sent = time.perf_counter()
        answered = first = last = None
        error = None
        try:
            async with session.post(self._url, json=body) as response:
                answered = time.perf_counter() - start
                if response.status != 200:
                    error = f"HTTP {response.status}"
                ended = False
                async for line in response.content:
                    if not line.startswith(b"data:"):
                        continue
                    event = line[5:].strip()  # the space after the colon is optional
                    if event == b"[DONE]":
                        ended = True
                    elif event.startswith(b'{"error"'):
                        error = _stream_error(event)
                    elif _USAGE.search(event):
                        if usage := json.loads(event).get("usage"):
                            output_tokens = usage["completion_tokens"]
                    else:
                        last = time.perf_counter()
                        first = first or last
                if error is None and not ended:
                    error = "stream ended without [DONE]"
        # Beside lost connections: half an event (ValueError), a line without end (HttpProcessingError).
        except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError, HttpProcessingError) as failure:
            error = type(failure).__name__
        progress(1)
        return RequestRecord(
            sent_s=sent - start,
            first_token_s=None if first is None else first - start,
            last_token_s=None if last is None else last - start,
            input_tokens=request.input_tokens,
            output_tokens=output_tokens,
            error=error,
            answered_s=answered,
        )


def _stream_error(event: bytes) -> str:
    error = json.loads(event)["error"]
    return f"stream error: {error.get('type') if isinstance(error, dict) else error}"
