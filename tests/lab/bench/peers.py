"""``python -m tests.lab.bench.peers``: Tandem, plain vLLM and Ray Serve LLM's own P/D on this machine, one at a time.

Each stack runs in a process of its own, since Ray Serve reads its modes at import. Every round measures every stack, in
an order that rotates; a ratio is taken round by round, and its median is what counts.
"""

import argparse
import asyncio
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from autoscale.report import Report, RequestRecord, Slo
from autoscale.traces.trace import TraceRequest
from kvtransfer.topology import Role
from serve_app.load.generator import LoadGenerator
from serve_app.local.cluster import LocalCluster, NodeSpec, driver_environment
from serve_app.local.quickstart import sample_trace
from tests.lab.stand.plain_vllm import ENVIRONMENT, server_command
from tests.lab.stand.reference_stack import CORES, peer_config

CONFIG = Path("configs/cpu_tiny.yaml")
STACKS = {
    "vllm": "plain vLLM server as it ships, all its processes on one core, no handoff",
    "ray_pd": "Ray Serve LLM's build_pd_openai_app: throughput mode, no batching delay, our engine plugin",
    "ray_pd_fastest": "the same behind HAProxy with direct streaming",
    "tandem": "Tandem as it ships",
}
CELLS = {
    "short": "32 input and 32 output tokens, one at a time; _c8: eight at a time",
    "long": "512 input and 32 output tokens, one at a time; _c8: eight at a time",
    "mix": "the committed Azure conversation slice, lengths / 8, at its own times; _c8: twice as fast",
}
SHORT_TOKENS, LONG_TOKENS, OUTPUT_TOKENS = 32, 512, 32
_PORT = 8100
_START_TIMEOUT_S = 300.0
# Ray's processes are still busy with their own start when an application already answers.
_SETTLE_S = 20.0
_WARM_REQUESTS = 30
_SLO_LENGTHS = (16, 64, 128, 256, 512)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=60, help="requests per cell")
    parser.add_argument("--out", type=Path, default=Path("reports/bench_peers.json"))
    parser.add_argument("--host", choices=STACKS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.host:
        _host(arguments.host)
        return
    slos = _measure_slos(arguments.requests)
    rounds = []
    for number in range(arguments.rounds):
        order = [*STACKS][number % len(STACKS) :] + [*STACKS][: number % len(STACKS)]
        rounds.append({stack: _measure(stack, arguments.requests, slos) for stack in order})
        _write(arguments.out, rounds, slos)
    print(json.dumps(_ratios(rounds), indent=1))


def _measure_slos(requests: int) -> dict[str, list[float]]:
    """Plain vLLM's unloaded medians by prompt length; the objectives are multiples of them."""
    with Stack("vllm") as url:
        generator = settled(url, seed=7)
        rows = []
        for length in _SLO_LENGTHS:
            load = [_request(length)] * max(10, requests // 3)
            report = Report.of(asyncio.run(generator.keep_in_flight(load, 1)))
            rows.append((float(length), report.ttft_s["p50"], report.tpot_s["p50"]))
    lengths, ttft, tpot = zip(*rows, strict=True)
    return {"input_tokens": list(lengths), "ttft_p50_s": list(ttft), "tpot_p50_s": list(tpot)}


def _slo(record: RequestRecord, slos: dict[str, list[float]]) -> Slo:
    ttft = np.interp(record.input_tokens, slos["input_tokens"], slos["ttft_p50_s"])
    tpot = np.interp(record.input_tokens, slos["input_tokens"], slos["tpot_p50_s"])
    return Slo(ttft_s=3 * float(ttft), tpot_s=2 * float(tpot))


def _measure(stack: str, requests: int, slos: dict[str, list[float]]) -> dict[str, Any]:
    print(f"measuring {stack}", file=sys.stderr, flush=True)
    cells: dict[str, Any] = {}
    with Stack(stack) as url:
        generator = settled(url, seed=1)
        for name, length in (("short", SHORT_TOKENS), ("long", LONG_TOKENS)):
            for suffix, concurrency in (("", 1), ("_c8", 8)):
                records = asyncio.run(generator.keep_in_flight([_request(length)] * requests, concurrency))
                cells[name + suffix] = Report.of(records).as_dict()
        for suffix, factor in (("", 1.0), ("_c8", 0.5)):
            mix = sample_trace(time_factor=factor, limit=requests)
            records = asyncio.run(generator.replay(mix))
            cells["mix" + suffix] = Report.of(records, [_slo(record, slos) for record in records]).as_dict()
    return cells


def settled(url: str, *, seed: int) -> LoadGenerator:
    """A generator for a stack that is at rest and warm."""
    time.sleep(_SETTLE_S)
    generator = LoadGenerator(url, "tiny", seed=seed)
    for length in (SHORT_TOKENS, LONG_TOKENS):
        asyncio.run(generator.keep_in_flight([_request(length)] * _WARM_REQUESTS, 2))
    return generator


def _request(length: int) -> TraceRequest:
    return TraceRequest(at_s=0.0, input_tokens=length, output_tokens=OUTPUT_TOKENS)


def _ratios(rounds: Sequence[dict[str, Any]]) -> dict[str, dict[str, float | None]]:
    ratios: dict[str, dict[str, float | None]] = {}
    for suffix in ("", "_c8"):
        for key, cell, value, peer in (
            ("short_ttft_p50_over_ray_pd", "short", ("ttft_s", "p50"), "ray_pd"),
            ("short_ttft_p50_over_ray_pd_fastest", "short", ("ttft_s", "p50"), "ray_pd_fastest"),
            ("short_ttft_p50_over_vllm", "short", ("ttft_s", "p50"), "vllm"),
            ("long_ttft_p50_over_ray_pd", "long", ("ttft_s", "p50"), "ray_pd"),
            ("long_throughput_over_ray_pd", "long", ("output_tokens_per_s",), "ray_pd"),
            ("tpot_p50_over_vllm", "short", ("tpot_s", "p50"), "vllm"),
            ("mix_goodput_over_ray_pd", "mix", ("goodput_requests_per_s",), "ray_pd"),
            ("mix_goodput_over_ray_pd_fastest", "mix", ("goodput_requests_per_s",), "ray_pd_fastest"),
        ):
            each = [
                _ratio(_value(r["tandem"], cell + suffix, value), _value(r[peer], cell + suffix, value)) for r in rounds
            ]
            ratios[key + suffix] = _spread(each)
    return ratios


def _spread(ratios: Sequence[float | None]) -> dict[str, float | None]:
    """Median and extremes; null if a round has no ratio, and for infinity, which JSON lacks."""
    known = [ratio for ratio in ratios if ratio is not None]
    if len(known) < len(ratios):
        return {"median": None, "min": None, "max": None}
    spread = {"median": statistics.median(known), "min": min(known), "max": max(known)}
    return {name: ratio if math.isfinite(ratio) else None for name, ratio in spread.items()}


def _ratio(ours: float | None, theirs: float | None) -> float | None:
    """``ours / theirs``; infinite if the peer's is 0 (a goodput), 1 if both are."""
    if ours is None or theirs is None:
        return None
    if theirs == 0.0:
        return math.inf if ours else 1.0
    return ours / theirs


def _value(cells: dict[str, Any], cell: str, path: tuple[str, ...]) -> float | None:
    """A figure of a cell; ``None`` for a quantile without any successful request."""
    value: Any = cells[cell]
    for part in path[:-1]:
        value = value[part]
    figure: float | None = value.get(path[-1])
    return figure


def _write(out: Path, rounds: Sequence[dict[str, Any]], slos: dict[str, list[float]]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    machine = {"cores": os.cpu_count(), "system": platform.platform(), "python": platform.python_version()}
    report = {
        "machine": machine,
        "stacks": STACKS,
        "cells": CELLS,
        "slos": slos,
        "ratios": _ratios(rounds),
        "rounds": list(rounds),
    }
    out.write_text(json.dumps(report, indent=1) + "\n")


class Stack:
    """One stack, up while the context is open."""

    def __init__(self, name: str, bench: str = "peers", *, start_timeout_s: float = _START_TIMEOUT_S) -> None:
        """``bench``: the module of this folder that hosts the stack: it takes ``--host NAME``."""
        self._name, self._bench, self._start_timeout_s = name, bench, start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> str:
        log = Path("reports") / f"bench_{self._bench}_{self._name}.log"
        log.parent.mkdir(exist_ok=True)
        with log.open("w") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"tests.lab.bench.{self._bench}", "--host", self._name],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
            )
        url = f"http://127.0.0.1:{_PORT}"
        deadline = time.monotonic() + self._start_timeout_s
        while not answers(url):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.__exit__()
                raise RuntimeError(f"{self._name} did not start: see {log}")
            time.sleep(1.0)
        return url

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(120)


def answers(url: str) -> bool:
    """Whether a stack answers a request."""
    # Text: PrefixCacheAffinityRouter of Ray 2.60 did not answer a prompt of token ids within 30 s.
    body = json.dumps({"model": "tiny", "prompt": "Hello", "max_tokens": 1}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", data=body, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _host(stack: str) -> None:
    document = yaml.safe_load(CONFIG.read_text())
    args = document["applications"][0]["args"]
    if stack == "vllm":
        _host_vllm(args)
    elif stack == "tandem":
        from serve_app.sdk import deploy

        document["http_options"]["port"] = _PORT
        with deploy(document):
            sys.stdin.read()
    else:
        _host_ray_pd(args, fastest=stack == "ray_pd_fastest")


def _host_vllm(args: dict[str, Any]) -> None:
    # Confined to one core, as each engine of the others is.
    command = server_command(args["model"]["source"], "tiny", _PORT, args["engine_kwargs"])
    environment = {**os.environ, **ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": str(CORES[Role.DECODE])}
    os.sched_setaffinity(0, {CORES[Role.DECODE]})
    server = subprocess.Popen([*command, "--disable-uvicorn-access-log"], env=environment)
    try:
        sys.stdin.read()
    finally:
        server.terminate()
        server.wait(60)


def _host_ray_pd(args: dict[str, Any], *, fastest: bool) -> None:
    """Ray Serve LLM's own P/D configured to its advantage: no batching delay, and the repairs of our engine plugin."""
    mode = {
        "RAY_SERVE_ENABLE_HA_PROXY": "1" if fastest else "0",
        "RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING": "1" if fastest else "0",
    }
    driver_environment()
    os.environ.update(mode)
    with LocalCluster([NodeSpec(cpus=6)], environment=mode) as cluster:
        import ray
        from ray import serve
        from ray.serve.llm import build_pd_openai_app

        ray.init(address=cluster.address, namespace="serve", log_to_driver=False)
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": _PORT})
        configs = {f"{role}_config": peer_config(role, args, bundle_cpus=1, num_replicas=1) for role in Role}
        serve.run(build_pd_openai_app(configs), route_prefix="/")
        sys.stdin.read()
        ray.shutdown()


if __name__ == "__main__":
    main()
