"""Serve a config on this machine's GPU, measure it under several loads, and measure plain vLLM beside it.

``python -m tests.lab.gpu.one_gpu tests/lab/gpu/llama8b_one_h100.yaml --out DIR``
"""

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import time
import traceback
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from autoscale.report import Report
from autoscale.traces.trace import TraceRequest
from serve_app.load.generator import LoadGenerator
from serve_app.load.metrics_page import scrape
from serve_app.local.cluster import LocalCluster, NodeSpec, driver_environment
from tests.lab.gpu.shape import build_shape
from tests.lab.stand.plain_vllm import ENVIRONMENT, server_command

# Of each load: input tokens, output tokens, requests in flight, requests.
Loads = tuple[tuple[int, int, int, int], ...]
_LOADS: Loads = (
    (32, 64, 1, 20),
    (512, 64, 1, 20),
    (2048, 64, 1, 20),
    (8000, 64, 1, 10),
    (2048, 64, 8, 64),
    (2048, 64, 32, 128),
    (512, 128, 32, 192),
)
_WARM_REQUESTS = 8
_START_TIMEOUT_S = 240.0
_VLLM_PORT = 8123


def measure(url: str, model: str, loads: Loads) -> list[dict[str, Any]]:
    """A report of each load, after a few requests of its lengths."""
    rows = []
    for input_tokens, output_tokens, concurrency, requests in loads:
        shape = TraceRequest(at_s=0.0, input_tokens=input_tokens, output_tokens=output_tokens)
        generator = LoadGenerator(url, model, seed=input_tokens + concurrency)
        asyncio.run(generator.keep_in_flight([shape] * max(_WARM_REQUESTS, concurrency), concurrency))
        report = Report.of(asyncio.run(generator.keep_in_flight([shape] * requests, concurrency)))
        row = {"input_tokens": input_tokens, "output_tokens": output_tokens, "concurrency": concurrency}
        rows.append({**row, **asdict(report)})
        print(
            json.dumps({**row, "ttft_s": report.ttft_s, "tpot_s": report.tpot_s, "errors": report.errors}), flush=True
        )
    return rows


def counters(url: str) -> dict[str, float]:
    """Prompts by path, and what NIXL moved, since the start."""
    kinds = [f"{name}_{kind}" for name in ("bytes_transferred", "xfer_time_seconds") for kind in ("sum", "count")]
    names = ("tandem_prefill_path_total", *(f"vllm:nixl_{kind}" for kind in (*kinds, "num_failed_transfers_total")))
    sums: dict[str, float] = {}
    for sample in scrape(url, *names):
        key = " ".join([sample.name, *(sample.labels[label] for label in ("path", "reason") if label in sample.labels)])
        sums[key] = sums.get(key, 0.0) + sample.value
    return sums


@contextmanager
def plain_vllm(document: dict[str, Any], log: Path) -> Iterator[str]:
    """vLLM's own server: one engine with the decode engine's arguments and the prefill engine's step."""
    args = document["applications"][0]["args"]
    group = args["groups"][0]
    prefill, decode = (group[role].get("engine_kwargs", {}) for role in ("prefill", "decode"))
    kwargs = {**args["engine_kwargs"], **decode}
    kwargs |= {name: prefill[name] for name in ("max_num_batched_tokens",) if name in prefill}
    command = server_command(args["model"]["source"], args["model"]["id"], _VLLM_PORT, kwargs)
    url = f"http://127.0.0.1:{_VLLM_PORT}"
    with log.open("w") as out:
        server = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **ENVIRONMENT})
        try:
            deadline = time.monotonic() + _START_TIMEOUT_S
            while not _is_up(url):
                if server.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"vLLM did not start: {log.read_text()[-3000:]}")
                time.sleep(0.5)
            yield url
        finally:
            server.terminate()
            server.wait(60)


def _is_up(url: str) -> bool:
    with suppress(OSError):
        return bool(urllib.request.urlopen(f"{url}/health", timeout=5).status == 200)
    return False


def serve(document: dict[str, Any], out: Path, loads: Loads) -> dict[str, Any]:
    """Deploy on a cluster of this machine, measure, and keep the cluster's logs, whatever happens."""
    driver_environment()
    from serve_app import sdk

    began_s = time.monotonic()
    with LocalCluster([NodeSpec(cpus=os.cpu_count() or 1)]) as cluster:
        try:
            with sdk.deploy(
                document,
                address=cluster.address,
                start_timeout_s=_START_TIMEOUT_S,
                on_status=lambda status: print(status, flush=True),
            ) as app:
                start_s = time.monotonic() - began_s
                print(f"Tandem answers after {start_s:.0f} s", flush=True)
                rows = measure(app.url, document["applications"][0]["args"]["model"]["id"], loads)
                return {"start_s": start_s, "loads": rows, "counters": counters(app.metrics_url)}
        finally:
            shutil.make_archive(str(out / "logs"), "gztar", cluster.folder)


def main() -> None:
    """Measure Tandem and plain vLLM, one after the other; each that fails leaves its error in the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", choices=["tandem", "vllm"])
    parser.add_argument("--quick", action="store_true", help="two small loads, to try the way")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    document = yaml.safe_load(options.config.read_text())
    if document["applications"][0]["args"]["engine_kwargs"].get("load_format") == "dummy":
        build_shape(Path(document["applications"][0]["args"]["model"]["source"]), Path("models/tiny"))
    loads: Loads = ((32, 8, 1, 4), (300, 8, 2, 4)) if options.quick else _LOADS
    results: dict[str, Any] = {"config": document}
    for name in ("tandem", "vllm"):
        if options.only not in (None, name):
            continue
        try:
            if name == "tandem":
                results[name] = serve(document, options.out, loads)
            else:
                with plain_vllm(document, options.out / "vllm.log") as url:
                    model = document["applications"][0]["args"]["model"]["id"]
                    results[name] = {"loads": measure(url, model, loads)}
        except Exception as error:  # the other measurement is still useful
            traceback.print_exc()
            results[name] = {"error": str(error)}
        (options.out / f"{options.config.stem}.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
