"""What the tests on engines share: prompts, an emulated application, and an endpoint's processes, metrics and logs."""

import asyncio
import random
import string
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import requests
import yaml

from deployments.machine.claims import free_ports
from serve_app.load.metrics_page import scrape
from tests.lab.stand.fixed_counts import fixed_counts
from tests.lab.stand.forked_worker import forked

ROOT = Path(__file__).parents[2]
# Longest wait for an event that must come, in seconds. A busy machine is slow, and the event ends the wait.
WAIT_S = 600.0


def forked_yaml(name: str) -> dict[str, Any]:
    """``configs/emulated.yaml`` with a free port, an application of this name, and forked workers."""
    document = yaml.safe_load((ROOT / "configs" / "emulated.yaml").read_text())
    document["http_options"]["port"] = free_ports(1)[0]
    document["applications"][0]["name"] = name
    return forked(document)


def emulated_document(**ingress: Any) -> dict[str, Any]:
    """One emulated prefill and one decode replica that start at once, without an autoscaler."""
    document = fixed_counts("emulated", 1, start_s=0.0)
    document["http_options"]["port"] = free_ports(1)[0]
    document["applications"][0]["args"]["ingress"] |= ingress
    return forked(document)


def emulated_pool(kind: str, *, lowest: int = 0, most: int, time_factor: float) -> dict[str, Any]:
    """A pool of emulated engines of one GPU of a type, which start at once and need little of a node's CPUs."""
    return {
        "replicas": lowest,
        "max_replicas": most,
        "emulator": {
            "profile": str(ROOT / "configs/profiles/h100_llama70b_fp8_tp1.json"),
            "start_s": 0.0,
            "time_factor": time_factor,
        },
        "placement": {"accelerator_type": kind, "cpus_per_worker": 0.05, "cpus_per_replica": 0.05},
    }


def replica_processes(app: Any, name: str = "") -> list[psutil.Process]:
    """The processes of an application's replicas; with ``name``, of deployments whose names begin with it."""
    found = []
    for process in app.processes():
        with suppress(psutil.Error):  # the process has just ended
            if f"ServeReplica:{app.name}:{name}" in " ".join(process.cmdline()):
                found.append(process)
    return found


def prompt_ids(length: int, seed: int) -> list[int]:
    """Random token ids that are no special tokens of the tiny model."""
    rng = random.Random(seed)
    return [rng.randrange(300, 1000) for _ in range(length)]


def total(app: Any, *names: str, **labels: str) -> float:
    """The sum over every sample with one of these names and these labels on the application's metrics page."""
    return sum(value for have, value in samples(app, *names) if labels.items() <= have.items())


def samples(app: Any, *names: str) -> list[tuple[dict[str, str], float]]:
    """Every sample with one of these names: its labels and its value."""
    return [(dict(sample.labels), sample.value) for sample in scrape(app.metrics_url, *names)]


async def eventually(holds: Callable[[], bool], within_s: float = 30.0) -> None:
    """Wait until a condition holds; the default is less than the 60 s for which unread KV is kept."""
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.2)


def keeps_to_itself(app: Any, model: str) -> None:
    """Assert that no file of the cluster contains text of a request that succeeds, is refused or fails."""
    word = "".join(random.choices(string.ascii_lowercase, k=20))
    text = f"{word} and more"
    named = {"type": "function", "function": {"name": word, "parameters": {"type": word}}}
    said = [{"role": "user", "content": text}]
    asked: list[tuple[str, dict[str, Any]]] = [
        ("completions", {"prompt": text, "stream": True}),
        ("completions", {"prompt": text, "max_tokens": 100_000}),
        ("completions", {"prompt": text, "temperature": text}),
        ("completions", {"prompt": text, "structured_outputs": {"regex": f"({text}"}}),
        ("completions", {"prompt": text * 40_000}),
        ("completions", {"prompt": text, word: text}),
        ("completions", {"prompt": text, "model": word}),
        ("chat/completions", {"messages": said}),
        ("chat/completions", {"messages": [{"role": text, "content": {"text": text}}]}),
        ("chat/completions", {"messages": said, "tools": [named], "tool_choice": "required"}),
        ("chat/completions", {"messages": said, "chat_template": "{{ raise_exception(messages[0].content) }}"}),
    ]
    statuses = set()
    for path, body in asked:
        body = {"model": model, "max_tokens": 4, **body}
        statuses.add(requests.post(f"{app.url}/v1/{path}", json=body, timeout=120).status_code)
    headers = {"Content-Type": "application/json"}
    broken = requests.post(f"{app.url}/v1/completions", data=f'{{"prompt": "{text}"', headers=headers, timeout=60)
    assert {200, 400} <= statuses | {broken.status_code}
    time.sleep(2.0)  # logs are written a little later
    files = [path for path in app._cluster.folder.rglob("*") if path.is_file()]
    assert any(path.name.startswith("replica_") for path in files)
    assert not [str(path) for path in files if word.encode() in path.read_bytes()]
