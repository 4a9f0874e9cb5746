"""Repeated faults under load on emulated engines: ``make soak``; a release gets an hour (``MINUTES=60``).

Three faults a minute end replicas, replicas of the endpoint and Serve's controller, at about 70 % of the load that the
engines can serve. Every token of every answer is compared with the emulated engine's. At the end replicas may hold
nothing, and no memory may have grown: of processes that lived all the time, and on average of each kind.
"""

import asyncio
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from serve_app.local.cluster import driver_environment
from serve_app.output import write_file
from tests.lab.drill.apis import OUTPUT_TOKENS, Answer
from tests.lab.drill.faults import FAULTS, FRONT_FAULTS, DrillError
from tests.lab.drill.load import prompts, run_load
from tests.lab.drill.verdict import VERDICTS, verdict
from tests.lab.stand.fixed_counts import fixed_counts
from tests.lab.stand.process_memory import Growth, Memory, has_grown
from tests.lab.stand.processes import OTHER, count_kinds, listening, title

# Replicas of each role and of the endpoint.
_REPLICAS = 2
_FAULTS = ("kill-prefill", "kill-decode", "kill-ingress", "kill-controller")
_FAULTS_PER_MINUTE = 3
# Streams of one engine.
_MAX_RUNNING = 24
# Requests/s; two decode replicas of 24 streams each finish 6.6 of these answers per second.
_RATE = 4.5
# Memory of a process may grow by this share.
_MAX_GROWTH_FRAC = 0.05
# Kinds of processes that must have been sampled.
_KINDS = (
    *("ingress", "decode replica", "prefill replica", "serve controller", "serve proxy", "haproxy", "health board"),
    *("ray gcs", "raylet"),
)
# Time between two samples of memory, in seconds.
_SAMPLE_S = 2.0
# Replicas must have freed everything this long after the load, in seconds.
_REST_S = 90.0
# Time before a fault is tried again, in seconds: a part that starts cannot be ended yet.
_AGAIN_S = 1.0
# Tries of a fault.
_TRIES = 10


def document() -> dict[str, Any]:
    """The emulated application with two replicas of everything and no autoscaler."""
    served = fixed_counts("emulated", _REPLICAS, start_s=2.0, max_running=_MAX_RUNNING, chunk_s=0.25)
    served["applications"][0]["args"]["ingress"] |= {"replicas": _REPLICAS}
    return served


def run(minutes: float, seed: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Run the load with its faults, and report answers, memory and what is still held.

    Args:
        minutes: duration.
        seed: draws the faults, their times and the prompts.
        say: called with a line for each step.
    """
    from serve_app.sdk import deploy

    rng = random.Random(seed)
    seconds = 60.0 * minutes
    count = max(1, round(minutes * _FAULTS_PER_MINUTE))
    done: Counter[str] = Counter()
    fronts_s: list[tuple[float, float]] = []

    with deploy(document(), on_status=lambda status: say(f"starting: {status.state}")) as app:
        load = partial(run_load, app.url, app.config.model.id, rate=_RATE)
        asyncio.run(load(seconds=20.0, seed=seed + 1, salt="warm-up"))
        at_rest = _left(app)
        memory, started_s, is_over = Memory(app.processes), time.monotonic(), threading.Event()

        def watch() -> None:
            while not is_over.wait(_SAMPLE_S):
                memory.sample((time.monotonic() - started_s) / seconds)

        def inject() -> None:
            names = rng.sample(_FAULTS, len(_FAULTS)) * _TRIES
            if (fault := _break_first(names, app)) is not None:
                name, span_s, broken = fault
                done[name] += 1
                fronts_s.extend([span_s] if name in FRONT_FAULTS else [])
                say(f"{sum(done.values())} of {count}, {name}: {broken}")

        watching = ThreadPoolExecutor(1).submit(watch)
        faults = [((number + rng.random()) * seconds / count, inject) for number in range(count)]
        try:
            answers = asyncio.run(load(seconds=seconds, seed=seed, salt="soak", faults=faults))
        finally:
            is_over.set()
        watching.result()
        say("counting what is still held")
        left = _left_at_rest(app, at_rest)
        held = _held(app.name)
    counts = {name: {"before": at_rest.get(name, 0), "after": left.get(name, 0)} for name in {**at_rest, **left}}
    missing = [] if sum(done.values()) == count else [f"{sum(done.values())} faults of {count}"]
    row = {"minutes": minutes, "seed": seed, "faults": dict(done), **judged(answers, seed, fronts_s)}
    return row | _aftermath(memory, counts, held, missing)


def _aftermath(
    memory: Memory, counts: dict[str, dict[str, int]], held: dict[str, float], missing: list[str]
) -> dict[str, Any]:
    """Memory, counts and findings after the load; ``missing``: findings about the faults themselves."""
    alive, average = memory.growth(), memory.means()
    return {
        "memory": {"of the process that grew most": alive, "on average of a kind": average},
        "left": counts,
        "held": held,
        "findings": [
            *missing,
            *grown(alive, average),
            *(
                f"{name}: {n['before']} before, {n['after']} after"
                for name, n in counts.items()
                if len({*n.values()}) > 1
            ),
            *(f"{name} is {value:g} at rest" for name, value in held.items()),
        ],
    }


def _break_first(names: Sequence[str], app: Any) -> tuple[str, tuple[float, float], str] | None:
    """Inject the first of these faults that is possible: its name, when it began and was done, and what it broke."""
    for number, name in enumerate(names):
        if number and number % len(_FAULTS) == 0:
            time.sleep(_AGAIN_S)
        began_s = time.monotonic()
        with suppress(DrillError):
            broken = FAULTS[name](app.processes())
            return name, (began_s, time.monotonic()), broken
    return None


def grown(alive: Growth, average: Growth) -> list[str]:
    """Lines for processes that lived all the time and grew, kinds that grew on average, and kinds without samples."""
    unseen = [name for name in _KINDS if name not in {**alive, **average}]
    return [
        *(f"nothing is known of the memory of {name}" for name in unseen),
        *(f"one {name} grew {_by(row)}" for name, row in alive.items() if _grew(row)),
        *(f"{name}, on average, grew {_by(row)}" for name, row in average.items() if _grew(row)),
    ]


def _grew(row: dict[str, float]) -> bool:
    # A process of any size: unlike in a fuzz, each does the same work all the time.
    return row["growth_frac"] > _MAX_GROWTH_FRAC or has_grown(row)


def _by(row: dict[str, float]) -> str:
    steadily = f", steadily by {row['steady_mib']:.1f} MiB" if row["steady_mib"] else ""
    return f"by {row['growth_frac']:.1%} ({row['last_third_mib'] - row['first_third_mib']:.1f} MiB){steadily}"


def judged(answers: Sequence[Answer], seed: int, fronts_s: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Count right and wrong answers; an emulated engine has one right answer to a prompt.

    Args:
        answers: answers to the whole load, in order.
        seed: drew their prompts.
        fronts_s: when each front began and finished to end; a stream that breaks at another time is lost.
    """
    from deployments.emulated.text import next_tokens  # it imports ray

    row: dict[str, Any] = {"requests": len(answers), **dict.fromkeys((*VERDICTS, "retried"), 0)}
    errors: Counter[str] = Counter()
    for prompt, answer in zip(prompts(seed, len(answers)), answers, strict=True):
        row["retried"] += answer.retries
        if what := verdict(answer, next_tokens(prompt[-1], OUTPUT_TOKENS), fronts_s):
            row[what] += 1
            errors[f"{what}: {answer.error or len(answer.token_ids)}"] += 1
    waits = sorted(answer.ttft_s for answer in answers if answer.ttft_s is not None)
    row["ttft_p99_s"] = waits[int(0.99 * len(waits))] if waits else None
    row["errors"] = dict(errors)
    return row


def _left_at_rest(app: Any, at_rest: dict[str, int]) -> dict[str, int]:
    """As ``_left``, once it equals ``at_rest``, or after ``_REST_S``."""
    until_s = time.monotonic() + _REST_S
    while (left := _left(app)) != at_rest and time.monotonic() < until_s:
        time.sleep(2.0)
    return left


def _left(app: Any) -> dict[str, int]:
    """Placement groups, processes by kind, and ports that replicas listen on."""
    from tests.lab.stand.ray_held import placement_groups

    processes = app.processes()
    found = Counter({"placement groups": placement_groups()}) + count_kinds(processes)
    found[OTHER] = 0  # Ray's idle workers, which come and go
    for process in processes:
        if "ServeReplica" in title(process):
            found["ports of replicas"] += listening(process)
    return dict(found)


def _held(application: str) -> dict[str, float]:
    from tests.lab.stand.ray_held import left_after

    return left_after(application, _REST_S)


def main(
    minutes: Annotated[float, typer.Option(min=0.5, help="Duration.")] = 20.0,
    seed: Annotated[int, typer.Option(help="Draws the faults and the prompts.")] = 0,
    out: Path = Path("reports/soak.json"),
) -> None:
    """Break, watch, show and write; exits with 1 if an answer was lost, memory has grown or anything is still held."""
    driver_environment()  # before anything imports ray
    console = Console()
    result = run(minutes, seed, lambda line: console.print(line, highlight=False, markup=False))
    write_file(out, json.dumps(result, indent=1) + "\n", "--out")
    shown = ("requests", *VERDICTS, "retried")
    console.print(", ".join(f"{name.replace('_', ' ')} {result[name]}" for name in shown), highlight=False)
    for line in result["findings"]:
        console.print(line, highlight=False, markup=False)
    console.print(f"written to {out}")
    if result["findings"] or any(result[name] for name in VERDICTS if name != "cut_at_front"):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
