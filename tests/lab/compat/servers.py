"""Plain vLLM and Tandem on this machine, with the same model and the same engine arguments."""

import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deployments.machine.claims import free_ports
from serve_app.local.tiny_model import build_tiny_model
from tests.lab.stand.fixed_counts import ROOT, fixed_counts
from tests.lab.stand.plain_vllm import ENVIRONMENT, server_command

MODEL = ROOT / "models" / "tiny"
_START_TIMEOUT_S, _END_S = 600.0, 60.0
# Both servers keep responses, or no request could read one.
_STORE = {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}
# What both get beside the arguments of configs/cpu_tiny.yaml: what vLLM's own tests want of their servers, as far as it
# can live together.
ARGUMENTS: dict[str, Any] = {
    "max_model_len": 8192,
    "seed": 0,
    "enable_prompt_tokens_details": True,
    "enable_auto_tool_choice": True,
    "tool_call_parser": "hermes",
    "enable_prompt_embeds": True,
    "enable_tokenizer_info_endpoint": True,
}
# Prompt tokens up to which decode computes a prompt itself, by the kind of server.
TANDEMS = {"remote": 0, "local": 1_000_000}
VLLM = "vllm"


def given_flags() -> list[str]:
    """``ARGUMENTS`` as flags of vLLM's command line, such as ``--seed=0``."""
    flags = ((f"--{name.replace('_', '-')}", value) for name, value in ARGUMENTS.items())
    return [flag if value is True else f"{flag}={value}" for flag, value in flags]


def document(kind: str) -> dict[str, Any]:
    """The Serve YAML of one prefill and one decode replica; ``kind``: a key of ``TANDEMS``."""
    whole = fixed_counts("cpu_tiny", 1)
    whole["http_options"] = {"host": "127.0.0.1", "port": free_ports(1)[0]}
    args = whole["applications"][0]["args"]
    args["model"]["source"] = str(MODEL)
    args["engine_kwargs"] |= ARGUMENTS
    # What vLLM's server does without being told.
    args["ingress"] |= {"cors": {}, "docs": True, "metrics_on_public_port": True}
    limit = TANDEMS[kind]
    args["router"] = {"length": {"local_max_tokens": limit, "local_cap_tokens": limit}}
    return whole


@contextmanager
def server(kind: str, log: Path) -> Iterator[str]:
    """URL of a server, which ends with the block; ``kind``: ``vllm`` or a key of ``TANDEMS``; ``log``: of vLLM."""
    build_tiny_model(MODEL)
    with _vllm(log) if kind == VLLM else _tandem(kind) as url:
        yield url


@contextmanager
def _tandem(kind: str) -> Iterator[str]:
    from serve_app.sdk import deploy

    with deploy(document(kind), environment=_STORE) as app:
        yield app.url


@contextmanager
def _vllm(log: Path) -> Iterator[str]:
    whole = document("remote")  # has the arguments of every kind
    port = whole["http_options"]["port"]
    arguments = whole["applications"][0]["args"]["engine_kwargs"]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        command = server_command(str(MODEL), "tiny", port, arguments)
        process = subprocess.Popen(
            command, env={**os.environ, **ENVIRONMENT, **_STORE}, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(url, process, log)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()  # its engine ends when its parent does


def _wait(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"plain vLLM did not start: read {log}") from None
        time.sleep(0.5)
