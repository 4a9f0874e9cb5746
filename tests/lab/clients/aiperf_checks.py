"""AIPerf, a load generator: chat, completions, the Responses API and a trace at its own times."""

import json
import os
import shutil
from pathlib import Path

from tests.lab.clients.checks import Checks, Server, call

checks, server = Checks(), Server.load()
_REQUESTS = 6
# Offline, AIPerf takes no tokenizer of a folder. A hub that does not answer is the same to it as none.
for _name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
    os.environ.pop(_name, None)
os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"
_SYNTHETIC = ("--isl", "64", "--osl", "8", "--request-count", str(_REQUESTS), "--concurrency", "2")


def profile(endpoint: str, *arguments: str, requests: int = _REQUESTS) -> None:
    """Send prompts to an endpoint; every request must be answered, with tokens."""
    folder = Path(server.folder) / "aiperf"
    shutil.rmtree(folder, ignore_errors=True)
    call(
        "aiperf",
        *("profile", "--model", server.model, "--url", server.url, "--api-key", server.key, "--ui", "none"),
        *("--tokenizer", server.tokenizer, "--endpoint-type", endpoint, "--artifact-dir", str(folder)),
        *("--no-gpu-telemetry", "--no-server-metrics", *arguments),
    )
    figures = json.loads(next(folder.rglob("profile_export_aiperf.json")).read_text())
    assert figures["request_count"]["avg"] == requests and not figures.get("error_request_count"), figures
    assert figures["output_sequence_length"]["avg"] >= 1


@checks.add
def chat() -> None:
    """Chat, streamed."""
    profile("chat", "--streaming", *_SYNTHETIC)


@checks.add
def completions() -> None:
    """Completions, streamed."""
    profile("completions", "--streaming", *_SYNTHETIC)


@checks.add
def trace() -> None:
    """A trace of Mooncake's format at its own times."""
    path = Path(server.folder) / "aiperf_trace.jsonl"
    rows = [
        {"timestamp": 200 * number, "input_length": 64, "output_length": 8, "hash_ids": [number]} for number in range(6)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    profile(
        "chat",
        *("--streaming", "--input-file", str(path), "--custom-dataset-type", "mooncake_trace", "--fixed-schedule"),
        requests=len(rows),
    )


@checks.add
def responses() -> None:
    """The Responses API, whole and streamed."""
    profile("responses", *_SYNTHETIC)
    profile("responses", "--streaming", *_SYNTHETIC)


if __name__ == "__main__":
    checks.run()
