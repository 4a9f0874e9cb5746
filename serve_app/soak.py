"""Faults without end under load, on emulated engines: ``make soak``, an hour with ``MINUTES=60`` for a release.

Three faults each minute end replicas, the endpoint's among them, and Serve's controller, at about 70 % of what the
engines can do. Every token of every answer is held against what an emulated engine says, and at the end nothing may be
left behind or have grown.
"""

import asyncio
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich.console import Console

from serve_app.cluster import driver_environment
from serve_app.drill_faults import FAULTS, FRONT_FAULTS, DrillError
from serve_app.drill_load import OUTPUT_TOKENS, Answer, prompts, run_load
from serve_app.fuzz_memory import Memory
from serve_app.validate import load_serve_yaml

_CONFIG = Path(__file__).parents[1] / "configs" / "emulated.yaml"
_REPLICAS = 2
_FAULTS = ("kill-prefill", "kill-decode", "kill-ingress", "kill-controller")
_FAULTS_PER_MINUTE = 3
# Two decode replicas of 24 streams each finish 6.4 of these answers per second.
_MAX_RUNNING, _RATE = 24, 4.5
_MOST_GROWTH_FRAC = 0.05
_SAMPLE_S = 2.0
_REST_S = 90.0
# To find a part's process and end it.
_FAULT_TAKES_S = 3.0


def document() -> dict[str, Any]:
    """The emulated application with two replicas of everything and no autoscaler."""
    served = load_serve_yaml(_CONFIG)
    application = served["applications"][0]
    del application["autoscaling_policy"]
    args = application["args"]
    del args["autoscale"]
    for role in ("prefill", "decode"):
        pool = args["groups"][0][role]
        del pool["max_replicas"]
        pool["replicas"] = _REPLICAS
        pool["emulator"] |= {"start_s": 2.0, "max_running": _MAX_RUNNING, "chunk_s": 0.25}
    args["ingress"] |= {"replicas": _REPLICAS}
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
    fronts_s: list[float] = []

    with deploy(document(), on_status=lambda status: say(f"starting: {status.state}")) as app:
        asyncio.run(run_load(app.url, app.config.model.id, rate=_RATE, seconds=20.0, seed=seed + 1, salt="warm-up"))
        at_rest = _left(app)
        memory, started_s, is_over = Memory(app.processes), time.monotonic(), threading.Event()

        def watch() -> None:
            while not is_over.wait(_SAMPLE_S):
                memory.sample((time.monotonic() - started_s) / seconds)

        def fault() -> None:
            for name in rng.sample(_FAULTS, len(_FAULTS)):
                at_s = time.monotonic()
                try:
                    said = FAULTS[name](app.processes())
                except DrillError:  # that part is just starting again
                    continue
                done[name] += 1
                if name in FRONT_FAULTS:
                    fronts_s.append(at_s)
                say(f"{sum(done.values())} of {count}, {name}: {said}")
                return

        watching = threading.Thread(target=watch, daemon=True)
        watching.start()
        faults = [((number + rng.random()) * seconds / count, fault) for number in range(count)]
        answers = asyncio.run(
            run_load(app.url, app.config.model.id, rate=_RATE, seconds=seconds, seed=seed, salt="soak", faults=faults)
        )
        is_over.set()
        watching.join()
        say("what is left is counted")
        left = _left(app)
        until_s = time.monotonic() + _REST_S
        while left != at_rest and time.monotonic() < until_s:
            time.sleep(2.0)
            left = _left(app)
        held = asyncio.run(_held(app.name))
    growth = memory.totals()
    return {
        "minutes": minutes,
        "seed": seed,
        "faults": dict(done),
        **judged(answers, seed, fronts_s),
        "memory": growth,
        "left": {name: {"before": at_rest.get(name, 0), "after": left.get(name, 0)} for name in {**at_rest, **left}},
        "held": held,
        "findings": [
            *(f"{kind} grew by {row['growth_frac']:.1%}" for kind, row in growth.items() if _grew(row)),
            *(f"{name}: {at_rest.get(name, 0)} before, {left.get(name, 0)} after" for name in _differ(at_rest, left)),
            *(f"{name} is {value:g} at rest" for name, value in held.items() if value),
        ],
    }


def judged(answers: Sequence[Answer], seed: int, fronts_s: Sequence[float]) -> dict[str, Any]:
    """What became of the requests, whose answers an emulated engine gives in one way only.

    Args:
        answers: of the whole load, in order.
        seed: of their prompts.
        fronts_s: when a part ended that may cut streams off; at other times that is a loss.
    """
    from deployments.emulator import next_tokens  # it imports ray

    row: dict[str, Any] = {"requests": len(answers)}
    row |= dict.fromkeys(("lost", "duplicated", "truncated", "wrong_tokens", "cut_at_front", "retried"), 0)
    errors: Counter[str] = Counter()
    for prompt, answer in zip(prompts(seed, len(answers)), answers, strict=True):
        row["retried"] += answer.retries
        got, wanted = answer.token_ids, next_tokens(prompt[-1], OUTPUT_TOKENS)
        shared = min(len(got), len(wanted))
        if got[:shared] != wanted[:shared]:
            row["wrong_tokens"] += 1
        elif answer.is_cut and any(_is_within(at_s, answer.span_s) for at_s in fronts_s):
            row["cut_at_front"] += 1
        elif not answer.is_ended:
            row["lost"] += 1
            errors[str(answer.error)] += 1
        elif len(got) != len(wanted):
            row["duplicated" if len(got) > len(wanted) else "truncated"] += 1
    waits = sorted(answer.ttft_s for answer in answers if answer.ttft_s is not None)
    row["ttft_p99_s"] = waits[int(0.99 * len(waits))] if waits else None
    row["errors"] = dict(errors)
    return row


def _is_within(at_s: float, span_s: tuple[float, float]) -> bool:
    return span_s[0] - _FAULT_TAKES_S <= at_s <= span_s[1]


def _grew(row: dict[str, float]) -> bool:
    return row["growth_frac"] > _MOST_GROWTH_FRAC


def _differ(before: dict[str, int], after: dict[str, int]) -> list[str]:
    return [name for name in {**before, **after} if before.get(name, 0) != after.get(name, 0)]


def _left(app: Any) -> dict[str, int]:
    """Placement groups, processes by kind, and ports that replicas listen on."""
    from serve_app.ray_held import placement_groups

    found: Counter[str] = Counter({"placement groups": placement_groups()})
    for process in app.processes():
        try:
            title = " ".join(process.cmdline())
            if "ServeReplica" in title:
                found[title.split()[0]] += 1
                found["ports of replicas"] += sum(one.status == "LISTEN" for one in process.net_connections("tcp"))
        except psutil.Error:
            continue
    return dict(found)


async def _held(application: str) -> dict[str, float]:
    from serve_app.ray_held import held

    return await held(application)


def main(
    minutes: Annotated[float, typer.Option(min=0.5, help="How long.")] = 20.0,
    seed: Annotated[int, typer.Option(help="Of the faults and the prompts.")] = 0,
    out: Path = Path("reports/soak.json"),
) -> None:
    """Break, watch, show and write; 1 where anything was lost, has grown or is left behind."""
    driver_environment()  # before anything imports ray
    console = Console()
    result = run(minutes, seed, lambda line: console.print(line, highlight=False, markup=False))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    shown = ("requests", "lost", "duplicated", "truncated", "wrong_tokens", "cut_at_front", "retried")
    console.print(", ".join(f"{name} {result[name]}" for name in shown), highlight=False)
    for line in result["findings"]:
        console.print(line, highlight=False, markup=False)
    console.print(f"written to {out}")
    if result["findings"] or any(result[name] for name in ("lost", "duplicated", "truncated", "wrong_tokens")):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
