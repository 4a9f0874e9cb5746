"""How long decisions take, and the cost of an application at rest: ``make bench-control``.

The controller's tick and a routing decision are timed in this process, and the policy's call in Serve's controller. The
time from a step of the load to a raised target is measured on emulated engines under real Ray Serve. At last twelve of
these engines are at rest.
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

from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.controller import Controller
from autoscale.traces.trace import TraceRequest
from autoscale.types import ControllerState, PoolKey, PoolLimits, PoolStats, ReplicaStats, Snapshot
from kvtransfer.topology import Role
from router.routing import Routing
from serve_app.checks.yaml_checks import load_serve_yaml
from serve_app.load.generator import LoadGenerator
from serve_app.local.cluster import driver_environment
from tests.lab.stand.processes import cpu_s

# Size of the snapshot: groups of two pools, and replicas of a pool.
_GROUPS = 50
_REPLICAS = 20
# Ticks that are timed.
_TICKS = 1000
# Replicas that a request may be routed to.
_ROUTED_REPLICAS = 256
# Routing decisions that are timed.
_ROUTES = 20_000
# Time at rest before a step of the load, in seconds.
_REST_S = 12.0
# Steps of the load.
_STEPS = 5
_INTERVAL_S = AutoscaleConfig.model_fields["interval_s"].default
# Prefill and decode replicas at rest.
_IDLE_COUNTS = (3, 9)
# Time over which they are measured, in seconds.
_IDLE_S = 40.0
_CONFIG = Path(__file__).parents[3] / "configs" / "emulated.yaml"


def tick_s(rounds: int = _TICKS) -> list[float]:
    """Seconds of each ``Controller.tick`` over 50 groups of two pools of 20 replicas, under a load that changes."""
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
            limits=PoolLimits(lowest_replicas=1, highest_replicas=2 * _REPLICAS),
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
    """Seconds of each ``choose_replicas`` of Tandem's router over 256 replicas with changing load."""
    from ray.serve._private.common import DeploymentID, RequestMetadata
    from ray.serve.request_router import PendingRequest, ReplicaID

    from router.ray_router import TandemRouter

    pool = DeploymentID(name="decode:bench_control", app_name="tandem")
    router = TandemRouter.__new__(TandemRouter)  # Serve's own part needs a running controller
    router._deployment_id = pool
    router.initialize_state()
    ids = [ReplicaID(f"r{index}", pool) for index in range(_ROUTED_REPLICAS)]
    candidates: list[Any] = [SimpleNamespace(replica_id=name) for name in ids]

    async def run() -> list[float]:
        taken = []
        for number in range(rounds):
            metadata = RequestMetadata(request_id=str(number), internal_request_id=str(number), is_streaming=True)
            routed = SimpleNamespace(routing=Routing(work_tokens=number % 97))
            request = PendingRequest(args=[routed], kwargs={}, metadata=metadata)
            started_s = time.perf_counter()
            ranks = await router.choose_replicas(candidates, request)
            taken.append(time.perf_counter() - started_s)
            router.record_choice(request, ranks[0][0].replica_id.unique_id)
            if number >= _ROUTED_REPLICAS:
                router.on_request_completed(ids[number % _ROUTED_REPLICAS], str(number - _ROUTED_REPLICAS))
        return taken

    return asyncio.run(run())


def live(console: Console) -> dict[str, float]:
    """Time of the policy's call in Serve's controller, and intervals from a step of the load to a raised target."""
    from serve_app.running.ray_control import Control, status_of
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
        figures = {"policy_call_p99_s": float(status_of(app.name).policy_call_p99_s or 0.0)}
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
    """Cores and memory of twelve emulated replicas at rest, with all processes of their cluster."""
    from serve_app.running.ray_control import Control
    from serve_app.sdk import deploy

    with deploy(_CONFIG, on_status=lambda status: None) as app:
        control = Control(app.name)
        control.scale(*_IDLE_COUNTS)
        _wait(lambda: _ready(control) == sum(_IDLE_COUNTS), 240.0)
        time.sleep(_IDLE_S)
        processes = psutil.Process().children(recursive=True)
        before_s = {process: cpu_s(process) for process in processes}
        time.sleep(_IDLE_S)
        busy_s = sum(cpu_s(process) - before_s[process] for process in processes if process.is_running())
        pss_bytes = sum(process.memory_full_info().pss for process in processes if process.is_running())
    return {"idle_cores": busy_s / _IDLE_S, "idle_pss_gb": pss_bytes / 1e9}


def _raised(control: Any) -> int:
    return sum(control.status().last.plan.state.desired.values()) - 2


def _ready(control: Any) -> int:
    return sum(len(names) for names in control.status().last.running.values())


def _wait(holds: Callable[[], bool], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the application has not reached the wanted counts in {within_s:g} s")
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
