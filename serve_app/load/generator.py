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

# Longest time of a request, seconds.
_TIMEOUT_S = 300.0
# Range of the token ids of prompts: ordinary tokens of any tokenizer with at least 1,000 entries.
_TOKEN_RANGE = (300, 1000)
# The last event of a stream has the usage. It is the only one without choices.
_USAGE = re.compile(rb'"choices": ?\[\]')

# Called with each request and its record when the request has ended.
OnRecord = Callable[[TraceRequest, RequestRecord], None]


def _ignore(request: TraceRequest, record: RequestRecord) -> None:
    """Do nothing."""


class LoadGenerator:
    """Sends streamed completions. Prompts are random token ids: their length is exact, and no two share a prefix."""

    def __init__(self, base_url: str, model: str, *, seed: int | None = 0, api_key: str | None = None) -> None:
        """Prepare a load on ``base_url``, an address without ``/v1``.

        ``seed``: equal seeds give equal prompts; ``None``: each run has new prompts.
        """
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._url = f"{base_url.rstrip('/')}/v1/completions"
        self._model = model
        self._rng = random.Random(seed)

    async def replay(self, trace: Sequence[TraceRequest], on_record: OnRecord = _ignore) -> list[RequestRecord]:
        """Open loop: each request is sent at its time, whether earlier ones were answered or not.

        If this is cancelled, its requests are too.
        """
        async with self._session() as session, asyncio.TaskGroup() as group:
            start_s = time.perf_counter()
            tasks = []
            for request in trace:
                await asyncio.sleep(max(0.0, request.at_s - (time.perf_counter() - start_s)))
                tasks.append(group.create_task(self._send(session, request, start_s, on_record)))
        return [task.result() for task in tasks]

    async def keep_in_flight(self, requests: Sequence[TraceRequest], concurrency: int) -> list[RequestRecord]:
        """Closed loop: ``concurrency`` requests at a time; arrival times are ignored."""
        unsent = iter(requests)  # shared by all workers
        records: list[RequestRecord] = []

        async def worker(session: aiohttp.ClientSession, start_s: float) -> None:
            for request in unsent:
                records.append(await self._send(session, request, start_s))

        async with self._session() as session:
            start_s = time.perf_counter()
            await asyncio.gather(*(worker(session, start_s) for _ in range(concurrency)))
        return records

    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S),
            connector=aiohttp.TCPConnector(limit=0),  # no limit: at aiohttp's 100, requests would wait
            headers=self._headers,
        )

    async def _send(
        self, session: aiohttp.ClientSession, request: TraceRequest, start_s: float, on_record: OnRecord = _ignore
    ) -> RequestRecord:
        """Send one request. ``start_s``: start of the load, from which the times of the record count."""
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
        sent_s = time.perf_counter() - start_s
        answered_s = first_s = last_s = None
        error = None
        try:
            async with session.post(self._url, json=body) as response:
                answered_s = time.perf_counter() - start_s
                if response.status != 200:
                    error = f"HTTP {response.status}"
                has_ended = False
                async for line in response.content:
                    if not line.startswith(b"data:"):
                        continue
                    event = line[5:].strip()  # the space after the colon is optional
                    if event == b"[DONE]":
                        has_ended = True
                    elif event.startswith(b'{"error"'):
                        error = _stream_error(event)
                    elif _USAGE.search(event):
                        if usage := json.loads(event).get("usage"):
                            output_tokens = usage["completion_tokens"]
                    else:
                        last_s = time.perf_counter() - start_s
                        first_s = first_s or last_s
                if error is None and not has_ended:
                    error = "stream ended without [DONE]"
        # Besides lost connections: an event that is cut off (ValueError) or has an unexpected form (LookupError,
        # TypeError), and a line that is too long (HttpProcessingError).
        except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError, HttpProcessingError) as failure:
            error = type(failure).__name__
        record = RequestRecord(
            sent_s=sent_s,
            first_token_s=first_s,
            last_token_s=last_s,
            input_tokens=request.input_tokens,
            output_tokens=output_tokens,
            error=error,
            answered_s=answered_s,
        )
        on_record(request, record)
        return record


def _stream_error(event: bytes) -> str:
    error = json.loads(event)["error"]
    return f"stream error: {error.get('type') if isinstance(error, dict) else error}"
