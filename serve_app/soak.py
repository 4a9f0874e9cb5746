"""Faults without end under load, on emulated engines: ``make soak``, an hour with ``MINUTES=60`` for a release.

Three faults each minute end replicas, the endpoint's among them, and Serve's controller, at about 70 % of what the
engines can do. Every token of every answer is held against what an emulated engine says, and at the end nothing may be
left behind or have grown: of each kind the processes that live through it all, and the mean of those that replace each
other.
"""

import asyncio
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from serve_app.cluster import driver_environment
from serve_app.drill_faults import FAULTS, FRONT_FAULTS, DrillError
from serve_app.drill_load import OUTPUT_TOKENS, Answer, prompts, run_load
from serve_app.drill_verdict import VERDICTS, verdict
from serve_app.fixed_counts import fixed_counts
from serve_app.output import write_file
from serve_app.process_memory import Growth, Memory, has_grown
from serve_app.processes import OTHER, count_kinds, listening, title

_REPLICAS = 2
_FAULTS = ("kill-prefill", "kill-decode", "kill-ingress", "kill-controller")
_FAULTS_PER_MINUTE = 3
# Two decode replicas of 24 streams each finish 6.6 of these answers per second.
_MAX_RUNNING, _RATE = 24, 4.5
_MOST_GROWTH_FRAC = 0.05
_KINDS = (
    *("ingress", "decode replica", "prefill replica", "serve controller", "serve proxy", "haproxy", "health board"),
    *("ray gcs", "raylet"),
)
_SAMPLE_S = 2.0
_REST_S = 90.0
# A part that is just starting again cannot be ended yet.
_AGAIN_S, _TRIES = 1.0, 10


def document() -> dict[str, Any]:
    """The emulated application with two replicas of everything and no autoscaler."""
    served = fixed_counts("emulated", _REPLICAS, start_s=2.0, max_running=_MAX_RUNNING, chunk_s=0.25)
    served["applications"][0]["args"]["ingress"] |= {"replicas": _REPLICAS}
    return served


def run(minutes: float, seed: int, say: Callable[[str], None]) -> dict[str, Any]:
    """The load with its faults, and what they left.

    Args:
        minutes: how long.
        seed: of the faults, the prompts and when.
        say: told what is broken.
    """
    from serve_app.sdk import deploy

    rng = random.Random(seed)
    seconds = 60.0 * minutes
    count = max(1, round(minutes * _FAULTS_PER_MINUTE))
    done: Counter[str] = Counter()
    fronts_s: list[tuple[float, float]] = []

    with deploy(document(), on_status=lambda status: say(f"starting: {status.state}")) as app:
        asyncio.run(run_load(app.url, app.config.model.id, rate=_RATE, seconds=20.0, seed=seed + 1, salt="warm-up"))
        at_rest = _left(app)
        memory, started_s, is_over = Memory(app.processes), time.monotonic(), threading.Event()

        def watch() -> None:
            while not is_over.wait(_SAMPLE_S):
                memory.sample((time.monotonic() - started_s) / seconds)

        def fault() -> None:
            for number, name in enumerate(rng.sample(_FAULTS, len(_FAULTS)) * _TRIES):
                if number and number % len(_FAULTS) == 0:
                    time.sleep(_AGAIN_S)
                at_s = time.monotonic()
                try:
                    said = FAULTS[name](app.processes())
                except DrillError:
                    continue
                done[name] += 1
                if name in FRONT_FAULTS:
                    fronts_s.append((at_s, time.monotonic()))
                say(f"{sum(done.values())} of {count}, {name}: {said}")
                return

        watching = ThreadPoolExecutor(1).submit(watch)
        faults = [((number + rng.random()) * seconds / count, fault) for number in range(count)]
        load = run_load(
            app.url, app.config.model.id, rate=_RATE, seconds=seconds, seed=seed, salt="soak", faults=faults
        )
        try:
            answers = asyncio.run(load)
        finally:
            is_over.set()
        watching.result()
        say("what is left is counted")
        left = _left(app)
        until_s = time.monotonic() + _REST_S
        while left != at_rest and time.monotonic() < until_s:
            time.sleep(2.0)
            left = _left(app)
        held = _held(app.name)
    alive, average = memory.growth(), memory.means()
    return {
        "minutes": minutes,
        "seed": seed,
        "faults": dict(done),
        **judged(answers, seed, fronts_s),
        "memory": {"of the process that grew most": alive, "on average of a kind": average},
        "left": {name: {"before": at_rest.get(name, 0), "after": left.get(name, 0)} for name in {**at_rest, **left}},
        "held": held,
        "findings": [
            *([] if sum(done.values()) == count else [f"{sum(done.values())} faults of {count}"]),
            *grown(alive, average),
            *(f"{name}: {at_rest.get(name, 0)} before, {left.get(name, 0)} after" for name in _differ(at_rest, left)),
            *(f"{name} is {value:g} at rest" for name, value in held.items()),
        ],
    }


def grown(alive: Growth, average: Growth) -> list[str]:
    """What has grown, of processes that lived through it and of kinds; and what nobody has seen."""
    unseen = [name for name in _KINDS if name not in {**alive, **average}]
    return [
        *(f"nothing is known of the memory of {name}" for name in unseen),
        *(f"one {name} grew {_by(row)}" for name, row in alive.items() if _grew(row)),
        *(f"{name}, on average, grew {_by(row)}" for name, row in average.items() if _grew(row)),
    ]


def _grew(row: dict[str, float]) -> bool:
    # However small the process: here, unlike beside a fuzz, each does the same work all the time.
    return row["growth_frac"] > _MOST_GROWTH_FRAC or has_grown(row)


def _by(row: dict[str, float]) -> str:
    steadily = f", steadily by {row['steady_mib']:.1f} MiB" if row["steady_mib"] else ""
    return f"by {row['growth_frac']:.1%} ({row['last_third_mib'] - row['first_third_mib']:.1f} MiB){steadily}"


def judged(answers: Sequence[Answer], seed: int, fronts_s: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """What became of the requests, whose answers an emulated engine gives in one way only.

    Args:
        answers: of the whole load, in order.
        seed: of their prompts.
        fronts_s: from when to when a part ended that may cut streams off; at other times that is a loss.
    """
    from deployments.emulator import next_tokens  # it imports ray

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


def _differ(before: dict[str, int], after: dict[str, int]) -> list[str]:
    return [name for name in {**before, **after} if before.get(name, 0) != after.get(name, 0)]


def _left(app: Any) -> dict[str, int]:
    """Placement groups, processes by kind, and ports that replicas listen on."""
    from serve_app.ray_held import placement_groups

    processes = app.processes()
    found = Counter({"placement groups": placement_groups()}) + count_kinds(processes)
    found[OTHER] = 0  # Ray's idle workers, which come and go
    for process in processes:
        if "ServeReplica" in title(process):
            found["ports of replicas"] += listening(process)
    return dict(found)


def _held(application: str) -> dict[str, float]:
    from serve_app.ray_held import left_after

    return left_after(application, _REST_S)


def main(
    minutes: Annotated[float, typer.Option(min=0.5, help="How long.")] = 20.0,
    seed: Annotated[int, typer.Option(help="Of the faults and the prompts.")] = 0,
    out: Path = Path("reports/soak.json"),
) -> None:
    """Break, watch, show and write; 1 where anything was lost, has grown or is left behind."""
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
