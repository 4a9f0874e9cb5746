"""Fuzzes one running application: sends requests, watches its processes, and looks at what they hold afterwards."""

import asyncio
import json
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, field, replace
from itertools import count, islice
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as with_seed

from tests.lab.fuzz.bodies import bodies, field_values
from tests.lab.fuzz.parts import DEADLINE_S, Part
from tests.lab.fuzz.requests import Requests, bearer, requests
from tests.lab.fuzz.routes import BODY_ROUTES, METRICS_PORT, OPENAPI_ROUTE, POOLING_ROUTES
from tests.lab.fuzz.schemas import Schema, body_schemas, vllm_description
from tests.lab.fuzz.verdict import Finding, Tally, shown, verdict
from tests.lab.fuzz.wire import Reply, Request, post, send
from tests.lab.stand.process_memory import Growth, Memory, has_grown
from tests.lab.stand.processes import Processes, replaced_pids, server_pids

# Requests drawn at once, from one seed.
_BATCH = 100
# Seconds between two looks at the processes.
_SAMPLE_S = 1.0
# Share of the requests before memory is compared. Memory that grows with the longest body, or with another shape of a
# batch, grows more and more slowly over thousands of requests.
_WARM_UP_FRAC = 0.5
# Replicas must have freed everything this long after the last request, in seconds.
_REST_S = 60.0
# Most requests that are sent to shrink one finding.
_MAX_SHRINKS = 80
# Requests shown as suspects when a process ends.
_SUSPECTS = 16

Send = Callable[[Request], Coroutine[Any, Any, Reply]]


@dataclass(slots=True)
class Progress:
    """How many requests have been answered, and the last ones that were sent."""

    done: int = 0
    recent: deque[Request] = field(default_factory=lambda: deque(maxlen=_SUSPECTS))


async def fuzz(app: Any, part: Part, seed: int, tally: Tally, advance: Callable[[], None] = lambda: None) -> Growth:
    """Send all requests of a part to a running application, and look at what is left of it.

    Args:
        app: the application, of ``part``'s document.
        part: the requests to send.
        seed: draws the requests.
        tally: counts answers and findings.
        advance: called after each request.

    Returns:
        How much memory grew, by kind of process.
    """
    model, memory = app.config.model.id, Memory(app.processes, _WARM_UP_FRAC)
    send_one = _sender(app)
    schemas = body_schemas(vllm_description()) | await _own_schemas(send_one, part, tally)
    values = field_values({route: schemas[route] for route in BODY_ROUTES})
    drawn_bodies = {route: bodies(route, fields, model, is_deep=part.is_deep) for route, fields in values.items()}
    strategy = requests(model, drawn_bodies, key=part.key, is_deep=part.is_deep, max_bulk_bytes=part.max_bulk_bytes)

    async def watch(progress: Progress) -> None:
        running: set[int] = set()
        while True:
            memory.sample(progress.done / part.requests)
            now = app.processes()
            for pid in sorted(ended(running, now)):
                tally.crashes += 1
                text = f"process {pid} ({memory.kind(pid)}) has ended"
                suspects = [shown(request) for request in progress.recent]
                tally.find(Finding(what="crash", part=part.name, text=text, suspects=suspects))
            running = server_pids(now)
            await asyncio.sleep(_SAMPLE_S)

    before = await known_answers(send_one, part, model, tally, salt="before")
    await send_all(drawn(strategy, part.requests, seed), part, send_one, watch, tally, advance)
    for finding in tally.findings.values():
        if finding.part == part.name and finding.request is not None and finding.what != "hang":
            finding.request = await _smallest(strategy, finding, send_one)
    after = await known_answers(send_one, part, model, tally, salt="after")
    if after != before:
        text = f"normal requests were answered {before}, and are now answered {after}"
        tally.find(Finding(what="after", part=part.name, text=text))
    await _look_at_rest(app.name, part, tally)
    growth = memory.growth()
    for kind in grown(growth, part):
        tally.find(Finding(what="memory", part=part.name, text=f"{kind}: {growth[kind]}"))
    return growth


async def _own_schemas(send_one: Send, part: Part, tally: Tally) -> dict[str, Schema]:
    """The schemas of bodies that the endpoint itself gives; emulated engines have none.

    A route with a body that is missing there is a finding.
    """
    line = f"GET {OPENAPI_ROUTE} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
    reply = await send_one(Request(route=OPENAPI_ROUTE, kind="known", parts=(line.encode(),)))
    if reply.status == 404 and not part.has_description:
        return {}
    schemas = body_schemas(json.loads(reply.text)) if reply.status == 200 else {}
    missing = sorted(set(BODY_ROUTES) - schemas.keys() - set(POOLING_ROUTES))
    if missing:
        text = f"GET {OPENAPI_ROUTE} was answered {reply.status or reply.why}, without {missing}"
        tally.find(Finding(what="known", part=part.name, text=text))
    return schemas


def grown(growth: Growth, part: Part) -> list[str]:
    """The kinds of processes whose memory grew more than it may in this part."""
    settled = part.settled_kinds or growth
    return [kind for kind, row in growth.items() if has_grown(row, may_rise=kind not in settled)]


def ended(running: set[int], now: Processes) -> set[int]:
    """Pids of the processes that requests need and that have ended; HAProxy may be replaced when Serve reloads it."""
    return running - server_pids(now) - replaced_pids(now)


async def send_all(
    drawn_requests: Iterator[Request],
    part: Part,
    send_one: Send,
    watch: Callable[[Progress], Awaitable[None]],
    tally: Tally,
    advance: Callable[[], None],
) -> None:
    """Send all requests, ``part.at_once`` at a time, while ``watch`` runs; if it fails, sending ends.

    Raises:
        ExceptionGroup: ``watch`` has failed.
    """
    progress = Progress()

    async def work() -> None:
        for request in drawn_requests:
            progress.recent.append(request)
            tally.count(part.name, request, await send_one(request))
            progress.done += 1
            advance()

    async def watched() -> None:
        await watch(progress)

    async with asyncio.TaskGroup() as group:
        watching = group.create_task(watched())
        await asyncio.gather(*(work() for _ in range(part.at_once)))
        await asyncio.sleep(2 * _SAMPLE_S)
        watching.cancel()


def drawn(strategy: Requests, requests: int, seed: int) -> Iterator[Request]:
    """This number of requests, drawn as they are needed; the same for the same seed."""

    def batches() -> Iterator[list[Request]]:
        for number in count(seed * 1_000_003, _BATCH):
            batch: list[Request] = []
            _draw(strategy, number, batch.append, [Phase.generate])
            yield batch

    return islice((request for batch in batches() for request in batch), requests)


def _draw(strategy: Requests, seed: int, use: Callable[[Request], None], phases: list[Phase]) -> None:
    """Hand each request of a batch to ``use``; one that raises is shrunk, if ``phases`` say so."""

    @with_seed(seed)
    @settings(
        max_examples=_BATCH,
        database=None,
        deadline=None,
        phases=phases,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def each(request: Request) -> None:
        use(replace(request, seed=seed))

    each()


class _FaultError(Exception):
    """Tells hypothesis that a request shows the fault."""


def smallest(strategy: Requests, request: Request, is_bad: Callable[[Request], bool]) -> Request:
    """The smallest request that hypothesis finds to be answered as badly as this one.

    Its batch is drawn again from its seed, without sending, until the request comes; hypothesis then shrinks it.
    ``is_bad``: sends a request and judges the answer.
    """
    best, is_reached, results = request, False, dict[Request, bool]()

    def check(one: Request) -> None:
        nonlocal best, is_reached
        is_reached = is_reached or one == request
        if not is_reached:
            return
        if one not in results:  # after the last shrink every new request counts as well answered
            results[one] = len(results) < _MAX_SHRINKS and is_bad(one)
        if results[one]:
            best = one
            raise _FaultError

    try:
        _draw(strategy, request.seed, check, [Phase.generate, Phase.shrink])
    except _FaultError:
        return best  # hypothesis ends with the smallest
    return request


async def _smallest(strategy: Requests, finding: Finding, send_one: Send) -> Request:
    assert finding.request is not None

    def is_bad(request: Request) -> bool:
        return verdict(request, asyncio.run(send_one(request))) == finding.what

    return await asyncio.to_thread(smallest, strategy, finding.request, is_bad)


def _sender(app: Any) -> Send:
    """Sends a request to the server that it is for."""
    host, _, port = app.url.partition("://")[2].rpartition(":")
    ingress = app.config.ingress

    async def send_one(request: Request) -> Reply:
        if request.route == METRICS_PORT:
            return await send(ingress.metrics_host, ingress.metrics_port, request, DEADLINE_S)
        return await send(host, int(port), request, DEADLINE_S)

    return send_one


async def known_answers(send_one: Send, part: Part, model: str, tally: Tally, *, salt: str) -> dict[str, Any]:
    """The answers to two normal requests; one that is not answered with 200 is a finding.

    The prompts are a short and a long one, so that prefill is tried on both sides. ``salt`` keeps their prefixes out
    of the caches.
    """
    answers: dict[str, Any] = {}
    for sentences in (1, 60):
        prompt = "You may obtain a copy. " * sentences
        body = {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0.0, "cache_salt": salt}
        request = post("/v1/completions", json.dumps(body).encode(), kind="known", header=bearer(part.key))
        reply = await send_one(request)
        name = f"{sentences} sentences"
        answers[name] = reply.text
        if reply.status == 200 and verdict(request, reply) is None:
            answer = json.loads(reply.text)
            answers[name] = (answer["choices"][0]["text"], answer["usage"])
        else:
            text = f"{salt} all others, a normal request of {name} was answered {reply.status or reply.why}"
            tally.find(Finding(what="known", part=part.name, text=f"{text}: {reply.text}"))
    return answers


async def _look_at_rest(name: str, part: Part, tally: Tally) -> None:
    """Soon after the last request no replica may hold anything."""
    from tests.lab.stand.ray_held import held

    until_s, at_rest = time.monotonic() + _REST_S, await held(name)
    while any(at_rest.values()) and time.monotonic() < until_s:
        await asyncio.sleep(1.0)
        at_rest = await held(name)
    if any(at_rest.values()):
        text = f"{_REST_S:g} s after the last request, replicas still hold {at_rest}"
        tally.find(Finding(what="held", part=part.name, text=text))
