"""How long decisions take, and what they cost at rest: ``make bench-control``.

The controller's tick and a routing decision are timed here; the policy's call where it is made, in Serve's controller;
the time from more load to a raised target on emulated engines under real Ray Serve; then twelve of them are at rest.
"""

import asyncio
import json
import platform
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import typer
from rich.console import Console
from rich.table import Table

from autoscale.config import AutoscaleConfig
from autoscale.controller import Controller
from autoscale.trace import TraceRequest
from autoscale.types import ControllerState, PoolKey, PoolStats, ReplicaStats, Snapshot
from kvtransfer.topology import Role
from serve_app.bench import LoadGenerator
from serve_app.cluster import driver_environment
from serve_app.validate import load_serve_yaml

_GROUPS, _REPLICAS, _TICKS = 50, 20, 1000
_ROUTED_REPLICAS, _ROUTES = 256, 20_000
_REST_S, _STEPS = 12.0, 5
_INTERVAL_S = AutoscaleConfig.model_fields["interval_s"].default
_IDLE_COUNTS, _IDLE_S = (3, 9), 40.0
_CONFIG = Path(__file__).parent.parent / "configs" / "emulated.yaml"


def tick_s(rounds: int = _TICKS) -> list[float]:
    """Seconds of each ``Controller.tick`` over 50 groups of two pools of 20 replicas under a load that moves."""
    config = {"pd_ratio": "1:1", "policy": {"kind": "heteroscale", "target": 100.0}, "gate": {"observation_s": 5.0}}
    controller = Controller(AutoscaleConfig.model_validate(config))
    pools = [
        PoolStats(
            key=PoolKey(f"g{group}", role),
            replicas=tuple(
                ReplicaStats(replica_id=f"{role}{group}-{index}", observed_s=0.0, queued_prefill_tokens=1.0)
                for index in range(_REPLICAS)
            ),
            target_replicas=_REPLICAS,
            lowest_replicas=1,
            highest_replicas=2 * _REPLICAS,
        )
        for group in range(_GROUPS)
        for role in Role
    ]
    state, taken = ControllerState(), []
    for number in range(rounds):
        now_s, shown = 1000.0 + 2.0 * number, (95.0, 130.0, 50.0)[number // 20 % 3]
        seen = tuple(
            replace(
                pool, replicas=tuple(replace(r, observed_s=now_s, decode_tokens_per_s=shown) for r in pool.replicas)
            )
            for pool in pools
        )
        snapshot = Snapshot(now_s=now_s, pools=seen, state=state)
        started_s = time.perf_counter()
        state = controller.tick(snapshot).state
        taken.append(time.perf_counter() - started_s)
    return taken


def route_s(rounds: int = _ROUTES) -> list[float]:
    """Seconds of each ``choose_replicas`` of Tandem's router over 256 replicas whose load moves."""
    from ray.serve._private.common import DeploymentID, RequestMetadata
    from ray.serve.request_router import PendingRequest, ReplicaID

    from router.ray_router import TandemRouter

    router = TandemRouter.__new__(TandemRouter)  # Serve's own part needs a running controller
    router.initialize_state()
    ids = [ReplicaID(f"r{index}", DeploymentID(name="decode:g0")) for index in range(_ROUTED_REPLICAS)]
    candidates: list[Any] = [SimpleNamespace(replica_id=name) for name in ids]

    async def run() -> list[float]:
        taken = []
        for number in range(rounds):
            metadata = RequestMetadata(request_id=str(number), internal_request_id=str(number), is_streaming=True)
            request = PendingRequest(args=[SimpleNamespace(work_tokens=number % 97)], kwargs={}, metadata=metadata)
            started_s = time.perf_counter()
            ranks = await router.choose_replicas(candidates, request)
            taken.append(time.perf_counter() - started_s)
            router.chosen(request, ranks[0][0].replica_id.unique_id)
            if number >= _ROUTED_REPLICAS:
                router.on_request_completed(ids[number % _ROUTED_REPLICAS], str(number - _ROUTED_REPLICAS))
        return taken

    return asyncio.run(run())


def live(console: Console) -> dict[str, float]:
    """The policy's call in Serve's controller, and decision intervals from a step in load to a raised target."""
    from serve_app.ray_control import Control
    from serve_app.sdk import deploy

    document = load_serve_yaml(_CONFIG)
    args = document["applications"][0]["args"]
    args["autoscale"] |= {"window_s": 10.0, "guard": {"cooldown_out_s": 0.0, "cooldown_in_s": 0.0}}
    args["autoscale"]["gate"] = {"observation_s": 0.0}
    args["groups"][0]["prefill"]["max_replicas"] = args["groups"][0]["decode"]["max_replicas"] = 2
    shape = TraceRequest(at_s=0.0, input_tokens=200, output_tokens=200)
    waits = []
    with deploy(document, on_status=lambda status: None) as app:
        control = Control(app.name)
        generator = LoadGenerator(app.url, app.config.model.id, seed=1)
        for step in range(_STEPS):
            _wait(lambda: _raised(control) == 0 and _ready(control) == 2, 120.0)
            time.sleep(_REST_S)
            console.print(f"step {step + 1} of {_STEPS}")
            waits.append(asyncio.run(_step(generator, control, shape)))
        figures = {"policy_call_p99_s": float(control.status()["policy_call_p99_s"])}
    return {
        **figures,
        "load_step_to_target_intervals_p50": float(np.median(waits)) / _INTERVAL_S,
        "load_step_to_target_intervals_max": max(waits) / _INTERVAL_S,
    }


async def _step(generator: LoadGenerator, control: Any, shape: TraceRequest) -> float:
    load = asyncio.create_task(generator.keep_in_flight([shape] * 60, 30))
    started_s = time.monotonic()
    while _raised(control) == 0:
        await asyncio.sleep(0.05)
    waited_s = time.monotonic() - started_s
    await load
    return waited_s


def idle() -> dict[str, float]:
    """What twelve emulated replicas at rest take of the machine, with everything that serves them."""
    from serve_app.ray_control import Control
    from serve_app.sdk import deploy

    with deploy(_CONFIG, on_status=lambda status: None) as app:
        control = Control(app.name)
        control.scale(*_IDLE_COUNTS)
        _wait(lambda: _ready(control) == sum(_IDLE_COUNTS), 240.0)
        time.sleep(_IDLE_S)
        processes = psutil.Process().children(recursive=True)
        before_s = {process: _cpu_s(process) for process in processes}
        time.sleep(_IDLE_S)
        busy_s = sum(_cpu_s(process) - before_s[process] for process in processes if process.is_running())
        pss_bytes = sum(process.memory_full_info().pss for process in processes if process.is_running())
    return {"idle_cores": busy_s / _IDLE_S, "idle_pss_gb": pss_bytes / 1e9}


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _raised(control: Any) -> int:
    desired: dict[str, int] = control.status()["plan"]["state"]["desired"]
    return sum(desired.values()) - 2


def _ready(control: Any) -> int:
    return sum(len(names) for names in control.status()["running"].values())


def _wait(holds: Callable[[], bool], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the application has not come to the wanted counts, and no others, in {within_s:g} s")
        time.sleep(0.5)


def _quantiles(name: str, taken: Iterable[float]) -> dict[str, float]:
    values = list(taken)
    return {f"{name}_p50_s": float(np.quantile(values, 0.5)), f"{name}_p99_s": float(np.quantile(values, 0.99))}


def main(out: Path = Path("reports/bench_control.json")) -> None:
    """Measure, print and write."""
    console = Console()
    driver_environment()  # before anything imports ray
    figures = {**_quantiles("tick", tick_s()), **_quantiles("route", route_s()), **live(console), **idle()}
    table = Table("what", "value")
    for name, value in figures.items():
        table.add_row(name, f"{value * 1e3:.3g} ms" if name.endswith("_s") else f"{value:.2f}")
    console.print(table)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"machine": platform.platform(), **figures}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
