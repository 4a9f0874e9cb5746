"""Fuzzes one application that runs: sends, watches its processes, and looks what is left."""

import asyncio
import json
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from serve_app.fuzz_bodies import Body, bodies
from serve_app.fuzz_http import asks, bearer
from serve_app.fuzz_parts import DEADLINE_S, Part
from serve_app.fuzz_verdict import Tally, smaller, verdict
from serve_app.fuzz_wire import METRICS_PORT, Ask, Reply, post, send
from serve_app.process_memory import Growth, Memory, has_grown
from serve_app.processes import Processes, replaced_pids, server_pids

_BATCH = 100
_SAMPLE_S = 1.0
# What grows with the longest body, the largest batch or another shape of one, does so ever less for thousands of them.
_WARM_UP_FRAC = 0.5
_REST_S = 60.0
_SHRINKS = 80
# Shown of what came before a process ended: one of them ended it.
_SUSPECTS, _SUSPECT_BYTES = 16, 800

Send = Callable[[Ask], Awaitable[Reply]]


@dataclass(slots=True)
class Progress:
    """What has been sent so far: how many requests, and the last ones."""

    done: int = 0
    recent: deque[Ask] = field(default_factory=lambda: deque(maxlen=_SUSPECTS))


async def fuzz(app: Any, part: Part, number: int, tally: Tally, advance: Callable[[], None] = lambda: None) -> Growth:
    """Send everything to an application that runs, and look what is left of it.

    Args:
        app: the application, of ``part``'s document.
        part: what to send.
        number: the seed.
        tally: what is found is put here.
        advance: called after each request.

    Returns:
        How much memory grew, by kind of process.
    """
    from deployments.requests import request_schema

    model, memory = app.config.model.id, Memory(app.processes, _WARM_UP_FRAC)
    drawn_bodies = {
        name: bodies(name, request_schema(name), model, is_deep=part.is_deep) for name in ("chat", "completions")
    }
    strategy = asks(model, drawn_bodies, key=part.key, is_deep=part.is_deep, most_bulk_bytes=part.most_bulk_bytes)
    ask = _sender(app)

    async def watch(progress: Progress) -> None:
        known: set[int] = set()
        while True:
            memory.sample(progress.done / part.requests)
            now = app.processes()
            for pid in sorted(ended(known, now)):
                tally.crashes += 1
                sent = [b"".join(one.parts)[:_SUSPECT_BYTES].decode("latin-1") for one in progress.recent]
                tally.find("crash", part.name, f"process {pid} ({memory.kind(pid)}) has ended", suspects=sent)
            known = server_pids(now)
            await asyncio.sleep(_SAMPLE_S)

    before = await known_answers(ask, part, model, tally, salt="before")
    await send_all(_batches(strategy, part.requests, number), part, ask, watch, tally, advance)
    await _shrink(ask, [finding for finding in tally.findings.values() if finding["part"] == part.name])
    after = await known_answers(ask, part, model, tally, salt="after")
    if after != before:
        tally.find("after", part.name, f"normal requests were answered {before}, and are now answered {after}")
    await _look_at_rest(app.name, part, tally)
    growth = memory.growth()
    for kind in grown(growth, part):
        tally.find("memory", part.name, f"{kind}: {growth[kind]}")
    return growth


def grown(growth: Growth, part: Part) -> list[str]:
    """The kinds of processes whose memory grew though it may not in this part."""
    settled = part.settled_kinds or growth
    return [kind for kind, row in growth.items() if has_grown(row, may_rise=kind not in settled)]


def ended(known: set[int], now: Processes) -> set[int]:
    """Those of the processes that requests need which are gone, and not because Serve has reloaded HAProxy."""
    return known - server_pids(now) - replaced_pids(now)


async def send_all(
    batches: Iterable[list[Ask]],
    part: Part,
    ask: Send,
    watch: Callable[[Progress], Awaitable[None]],
    tally: Tally,
    advance: Callable[[], None],
) -> None:
    """Send all requests, some at a time, while somebody watches; what ends the watching ends it all.

    Raises:
        ExceptionGroup: the watching has failed.
    """
    progress, waiting = Progress(), (one for batch in batches for one in batch)

    async def work() -> None:
        for one in waiting:
            progress.recent.append(one)
            tally.count(part.name, one, await ask(one))
            progress.done += 1
            advance()

    async def watched() -> None:
        await watch(progress)

    async with asyncio.TaskGroup() as group:
        watching = group.create_task(watched())
        await asyncio.gather(*(work() for _ in range(part.at_once)))
        await asyncio.sleep(2 * _SAMPLE_S)
        watching.cancel()


def drawn(strategy: Any, count: int, number: int) -> list[Ask]:
    """So many requests; the same for the same seed."""
    made: list[Ask] = []

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def draw(ask: Ask) -> None:
        made.append(ask)

    draw()
    return made


def _batches(strategy: Any, requests: int, number: int) -> Iterator[list[Ask]]:
    """All requests of a part, drawn as they are wanted."""
    made = 0
    while made < requests:
        batch = drawn(strategy, min(_BATCH, requests - made), number * 1_000_003 + made)
        made += len(batch)
        yield batch


def _sender(app: Any) -> Send:
    """Sends a request to the server that it is for."""
    host, _, port = app.url.partition("://")[2].rpartition(":")
    ingress = app.config.ingress

    async def ask(one: Ask) -> Reply:
        if one.route == METRICS_PORT:
            return await send(ingress.metrics_host, ingress.metrics_port, one, DEADLINE_S)
        return await send(host, int(port), one, DEADLINE_S)

    return ask


async def known_answers(ask: Send, part: Part, model: str, tally: Tally, *, salt: str) -> dict[str, Any]:
    """What normal requests are answered: a short and a long prompt, so that both paths are taken; 200, or it is found.

    Args:
        ask: sends a request.
        part: whose key goes with them.
        model: the name that the endpoint serves.
        tally: what is found is put here.
        salt: of their prefixes, so that none is in a cache.
    """
    said: dict[str, Any] = {}
    for sentences in (1, 60):
        prompt = "You may obtain a copy. " * sentences
        body: Body = {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0.0, "cache_salt": salt}
        known = post("/v1/completions", json.dumps(body).encode(), kind="known", header=bearer(part.key))
        reply = await ask(known)
        name = f"{sentences} sentences"
        said[name] = reply.text
        if reply.status == 200 and verdict(known, reply) is None:
            answer = json.loads(reply.text)
            said[name] = (answer["choices"][0]["text"], answer["usage"])
        else:
            what = f"{salt} all others, a normal request of {name} was answered {reply.status or reply.why}"
            tally.find("known", part.name, f"{what}: {reply.text}")
    return said


async def _look_at_rest(name: str, part: Part, tally: Tally) -> None:
    """Soon after the last request nobody may hold anything."""
    from serve_app.ray_held import held

    until_s, at_rest = time.monotonic() + _REST_S, await held(name)
    while any(at_rest.values()) and time.monotonic() < until_s:
        await asyncio.sleep(1.0)
        at_rest = await held(name)
    if any(at_rest.values()):
        tally.find("held", part.name, f"{_REST_S:g} s after the last request, replicas still hold {at_rest}")


async def _shrink(ask: Send, findings: Iterable[dict[str, Any]]) -> None:
    """Replace the body of each finding by the smallest part of it that is answered as badly."""
    for finding in findings:
        body, left = finding.get("body"), _SHRINKS
        if body is None or finding["what"] == "hang":
            continue
        head = {name: finding[name] for name in ("header", "has_key")}
        found = True
        while found and left:
            found = False
            for less in smaller(body):
                left -= 1
                one = post(finding["route"], json.dumps(less).encode(), kind="json", **head)
                if verdict(one, await ask(one)) == finding["what"]:
                    body, found = less, True
                    break
                if not left:
                    break
        finding["body"] = body
