"""Ten thousand bad requests to every route: ``make fuzz``.

Most of them to emulated engines, where everything above the engine is the real thing; the rest, of which most pass the
endpoint's own checks, to real ones. Nothing may answer with a server's error, hang, break, end or grow, and a normal
request is answered afterwards as before.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from hypothesis import HealthCheck, Phase, given, seed, settings
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from deployments.ports import free_ports
from serve_app.cluster import driver_environment
from serve_app.fuzz_bodies import Body, bodies
from serve_app.fuzz_http import Ask, asks, post, send
from serve_app.fuzz_memory import Memory, servers
from serve_app.fuzz_verdict import Tally, smaller, verdict
from serve_app.quickstart import without_keys
from serve_app.validate import load_serve_yaml

_ROOT = Path(__file__).parents[1]
_REAL_FRAC = 0.2
_BATCH = 100
_REQUEST_TIMEOUT_S = 30.0
_DEADLINE_S = 2 * _REQUEST_TIMEOUT_S
_SAMPLE_S = 1.0
# Beyond both is a finding: a twentieth of the smallest processes is less than their buffers.
_MOST_GROWTH_FRAC, _MOST_GROWTH_MIB = 0.05, 4.0
_REST_S = 60.0
_SHRINKS = 80
# Shown of what came before a process ended: one of them ended it.
_SUSPECTS, _SUSPECT_BYTES = 16, 800

Address = tuple[str, int]
Growth = dict[str, dict[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One application and what is sent to it.

    Attributes:
        name: ``emulated`` or ``real``.
        document: its Serve YAML, whose port is chosen at the start.
        requests: how many.
        at_once: how many of them at the same time.
        is_deep: nearly all JSON, of which most reaches the engine.
        most_bulk_bytes: the longest bodies.
    """

    name: str
    document: dict[str, Any]
    requests: int
    at_once: int
    is_deep: bool
    most_bulk_bytes: int


def parts(requests: int) -> list[Part]:
    """The bulk on emulated engines, a fifth on real ones."""
    real = round(_REAL_FRAC * requests)
    return [
        emulated_part(requests - real),
        Part(name="real", document=_real(), requests=real, at_once=6, is_deep=True, most_bulk_bytes=2 << 20),
    ]


def emulated_part(requests: int, most_bulk_bytes: int = 40 << 20) -> Part:
    """``configs/emulated.yaml`` at fixed counts, two replicas of everything, without the time of a start."""
    document = _local(_ROOT / "configs" / "emulated.yaml")
    application = document["applications"][0]
    del application["autoscaling_policy"], application["args"]["autoscale"]
    for role in ("prefill", "decode"):
        pool = application["args"]["groups"][0][role]
        del pool["max_replicas"]
        pool["replicas"] = 2
        pool["emulator"] |= {"start_s": 0.0, "time_factor": 20.0, "profile": str(_ROOT / pool["emulator"]["profile"])}
    application["args"]["ingress"]["replicas"] = 2
    return Part(
        name="emulated",
        document=document,
        requests=requests,
        at_once=8,
        is_deep=False,
        most_bulk_bytes=most_bulk_bytes,
    )


def _real() -> dict[str, Any]:
    """``configs/cpu_tiny.yaml`` with vLLM's parsers of tools and reasoning."""
    document = _local(_ROOT / "configs" / "cpu_tiny.yaml")
    args = document["applications"][0]["args"]
    args["model"]["source"] = str(_ROOT / args["model"]["source"])
    parsers = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes", "reasoning_parser": "deepseek_v3"}
    args["engine_kwargs"] |= parsers
    return document


def _local(config: Path) -> dict[str, Any]:
    document = without_keys(load_serve_yaml(config))
    document["applications"][0]["args"]["ingress"]["request_timeout_s"] = _REQUEST_TIMEOUT_S
    return document


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


def run_part(part: Part, number: int, tally: Tally, say: Callable[[str], None], advance: Callable[[], None]) -> Growth:
    """Start the application, send everything, and look what is left of it.

    Args:
        part: what to start and to send.
        number: the seed.
        tally: what is found is put here.
        say: told what happens.
        advance: called after each request.

    Returns:
        How much memory grew, by kind of process.
    """
    from serve_app.sdk import deploy

    document = {**part.document, "http_options": {"host": "127.0.0.1", "port": free_ports(1)[0]}}
    with deploy(document, on_status=lambda status: say(f"{part.name}: starting: {status.state}")) as app:
        return asyncio.run(fuzz(app, part, number, tally, advance))


async def fuzz(app: Any, part: Part, number: int, tally: Tally, advance: Callable[[], None] = lambda: None) -> Growth:
    """As ``run_part``, of an application that runs."""
    from deployments.requests import request_schema
    from serve_app.ray_held import held

    model, address = app.config.model.id, _address(app.url)
    drawn_bodies = {
        name: bodies(name, request_schema(name), model, is_deep=part.is_deep) for name in ("chat", "completions")
    }
    strategy = asks(model, drawn_bodies, is_deep=part.is_deep, most_bulk_bytes=part.most_bulk_bytes)
    before = await _known_answers(address, model, salt="before")
    memory, done, batches = Memory(app.processes), 0, _batches(strategy, part.requests, number)
    waiting: list[Ask] = []
    recent: list[Ask] = []

    async def work() -> None:
        nonlocal done
        while True:
            if not waiting:
                batch = next(batches, None)
                if batch is None:
                    return
                waiting.extend(batch)
            ask = waiting.pop()
            recent.append(ask)
            del recent[:-_SUSPECTS]
            tally.count(part.name, ask, await send(*address, ask, _DEADLINE_S))
            done += 1
            advance()

    async def watch() -> None:
        known = servers(app.processes())
        while True:
            await asyncio.sleep(_SAMPLE_S)
            memory.sample(done / part.requests)
            now = servers(app.processes())
            for pid in sorted(known - now):
                tally.crashes += 1
                sent = [b"".join(ask.parts)[:_SUSPECT_BYTES].decode("latin-1") for ask in recent]
                tally.find("crash", part.name, f"process {pid} ({memory.kind(pid)}) has ended", suspects=sent)
            known = now

    watching = asyncio.create_task(watch())
    await asyncio.gather(*(work() for _ in range(part.at_once)))
    await asyncio.sleep(2 * _SAMPLE_S)
    watching.cancel()
    await _shrink(address, tally)
    after = await _known_answers(address, model, salt="after")
    if after != before:
        tally.find("after", part.name, f"normal requests were answered {before}, and are now answered {after}")
    until_s, at_rest = time.monotonic() + _REST_S, await held(app.name)
    while any(at_rest.values()) and time.monotonic() < until_s:
        await asyncio.sleep(1.0)
        at_rest = await held(app.name)
    if any(at_rest.values()):
        tally.find("held", part.name, f"{_REST_S:g} s after the last request, replicas still hold {at_rest}")
    growth = memory.growth()
    for kind, row in growth.items():
        grown_mib = row["last_third_mib"] - row["first_third_mib"]
        if row["growth_frac"] > _MOST_GROWTH_FRAC and grown_mib > _MOST_GROWTH_MIB:
            tally.find("memory", part.name, f"{kind}: {row}")
    return growth


def _batches(strategy: Any, requests: int, number: int) -> Iterator[list[Ask]]:
    """All requests of a part, drawn as they are wanted."""
    made = 0
    while made < requests:
        batch = drawn(strategy, min(_BATCH, requests - made), number * 1_000_003 + made)
        made += len(batch)
        yield batch


async def _known_answers(address: Address, model: str, salt: str) -> dict[str, Any]:
    """What normal requests are answered: a short and a long prompt, so that both paths are taken."""
    said: dict[str, Any] = {}
    for sentences in (1, 60):
        prompt = "You may obtain a copy. " * sentences
        body: Body = {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0.0, "cache_salt": salt}
        reply = await send(*address, post("/v1/completions", json.dumps(body).encode(), kind="known"), _DEADLINE_S)
        said[f"{sentences} sentences"] = reply.text
        if reply.status == 200:
            answer = json.loads(reply.text)
            said[f"{sentences} sentences"] = (answer["choices"][0]["text"], answer["usage"])
    return said


async def _shrink(address: Address, tally: Tally) -> None:
    """Replace the body of each finding by the smallest part of it that is answered as badly."""
    for finding in tally.findings.values():
        body, left = finding.get("body"), _SHRINKS
        if body is None or finding["what"] == "hang":
            continue
        found = True
        while found and left:
            found = False
            for less in smaller(body):
                left -= 1
                ask = post(finding["route"], json.dumps(less).encode(), kind="json", header=finding["header"])
                if verdict(ask, await send(*address, ask, _DEADLINE_S)) == finding["what"]:
                    body, found = less, True
                    break
                if not left:
                    break
        finding["body"] = body


def _address(url: str) -> Address:
    host, _, port = url.partition("://")[2].rpartition(":")
    return host, int(port)


def main(
    requests: Annotated[int, typer.Option(min=10, help="How many requests.")] = 10_000,
    number: Annotated[int, typer.Option("--seed", help="Draws the same requests again.")] = 1,
    only: Annotated[str | None, typer.Option(help="emulated or real: that part alone.")] = None,
    json_out: Annotated[Path, typer.Option("--json", help="Write the figures here.")] = Path("reports/fuzz.json"),
) -> None:
    """Send bad requests, judge every answer, print and write."""
    driver_environment()  # before anything imports ray
    console, tally, began_s = Console(), Tally(), time.monotonic()
    memory: Growth = {}
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    chosen = [part for part in parts(requests) if only in (None, part.name)]
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("bad requests", total=sum(part.requests for part in chosen))
        for part in chosen:
            growth = run_part(part, number, tally, console.print, lambda: progress.advance(task))
            memory |= {f"{kind}, {part.name}": row for kind, row in growth.items()}
    figures = {
        "requests": tally.requests,
        "seconds": time.monotonic() - began_s,
        "seed": number,
        "by_route": dict(tally.by_route.most_common()),
        "by_status": dict(tally.by_status.most_common()),
        "by_kind": dict(tally.by_kind.most_common()),
        "five_xx": tally.five_xx,
        "hangs": tally.hangs,
        "crashes": tally.crashes,
        "memory": memory,
        "findings": list(tally.findings.values()),
    }
    _show(figures, console)
    json_out.parent.mkdir(parents=True, exist_ok=True)
    json_out.write_text(json.dumps(figures, indent=1) + "\n")
    if tally.findings:
        raise typer.Exit(1)


def _show(figures: dict[str, Any], console: Console) -> None:
    table = Table("what", "count", title=f"{figures['requests']:,} bad requests", title_justify="left")
    for name in ("by_route", "by_status"):
        for key, count in figures[name].items():
            table.add_row(key, f"{count:,}")
        table.add_section()
    for name in ("five_xx", "hangs", "crashes"):
        table.add_row(name.replace("_", " "), str(figures[name]))
    console.print(table)
    grown = Table("process", "first third MiB", "last third MiB", "growth", title="Memory", title_justify="left")
    for kind, row in figures["memory"].items():
        thirds = (f"{row[name]:.1f}" for name in ("first_third_mib", "last_third_mib"))
        grown.add_row(kind, *thirds, f"{row['growth_frac']:+.1%}")
    console.print(grown)
    for finding in figures["findings"]:
        console.print(f"{finding['count']} x {finding['what']}: {finding['said']}", highlight=False, markup=False)


if __name__ == "__main__":
    typer.run(main)
