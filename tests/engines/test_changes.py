"""Configurations change, applications end and replicas crash while requests are answered, on emulated engines."""

import asyncio
import copy
import json
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import yaml

from serve_app.checks.yaml_checks import ConfigError
from tests.engines.endpoint import WAIT_S, emulated_document, eventually, prompt_ids, replica_processes
from tests.lab.drill.faults import kill_decode

pytestmark = [pytest.mark.ray, pytest.mark.vllm]

MODEL = "llama-70b"
# An emulated engine takes 65 s for them. By default Serve gives a replica less time to end (20 s; an endpoint 30 s).
LONG_TOKENS = 2500


@pytest.fixture(scope="module", name="document")
def _document() -> dict[str, Any]:
    document = emulated_document(replicas=2)
    for role in ("prefill", "decode"):
        document["applications"][0]["args"]["groups"][0][role]["max_surge_frac"] = 0.25  # of one replica: one more
    return document


@pytest.fixture(scope="module", name="app")
def _app(document: dict[str, Any]) -> Iterator[Any]:
    from serve_app.sdk import deploy

    with deploy(document) as running:
        yield running


async def stream(url: str, prompt: list[int], tokens: int) -> tuple[list[int], str]:
    """The output of one request, and how it ended."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "stream": True, "return_token_ids": True}
    got: list[int] = []
    end = "a closed connection"
    try:
        async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                return got, f"HTTP {response.status}: {await response.text()}"
            async for line in response.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line[len(b"data: ") :])
                    if "error" in event:
                        return got, str(event["error"])
                    got += [token for choice in event["choices"] for token in choice.get("token_ids") or ()]
                elif line.startswith(b"data: [DONE]"):
                    end = "whole"
    except aiohttp.ClientError as error:
        end = repr(error)
    return got, end


def expected(prompt: list[int], tokens: int) -> tuple[list[int], str]:
    from deployments.emulated.text import next_tokens

    return next_tokens(prompt[-1], tokens), "whole"


@asynccontextmanager
async def steady(url: str, per_s: float) -> AsyncGenerator[list[asyncio.Task[None]], None]:
    """Send short requests at a steady rate while the context is open; each must be answered. Gives the tasks so far."""
    asked: list[asyncio.Task[None]] = []

    async def one(seed: int) -> None:
        prompt = prompt_ids(20 if seed % 2 else 400, seed=seed)
        assert await stream(url, prompt, 50) == expected(prompt, 50)

    async def send() -> None:
        while True:
            asked.append(asyncio.create_task(one(len(asked))))
            await asyncio.sleep(1.0 / per_s)

    sending = asyncio.create_task(send())
    try:
        yield asked
    finally:
        sending.cancel()
        await asyncio.gather(*asked)


def replicas(app: Any, name: str = "") -> set[int]:
    return {one.pid for one in replica_processes(app, name)}


async def test_a_new_configuration_cuts_off_no_request(app: Any, document: dict[str, Any]) -> None:
    changed = copy.deepcopy(document)
    args = changed["applications"][0]["args"]
    args["ingress"]["retries"] = 3
    for role in ("prefill", "decode"):
        args["groups"][0][role]["emulator"]["max_running"] = 20
    before = replicas(app)
    prompts = [prompt_ids(300, seed=seed) for seed in range(6)]
    long = [asyncio.create_task(stream(app.url, prompt, LONG_TOKENS)) for prompt in prompts]
    async with steady(app.url, 2.0) as asked:
        await asyncio.sleep(3.0)
        await asyncio.to_thread(app.update, changed)
        answers = await asyncio.gather(*long)
        await eventually(lambda: not replicas(app) & before, within_s=WAIT_S)
        assert len(asked) > 50
    assert answers == [expected(prompt, LONG_TOKENS) for prompt in prompts]
    changed["applications"][0]["name"] = "another"
    with pytest.raises(ConfigError, match="'another' is not 'tandem'"):
        await asyncio.to_thread(app.update, changed)


async def test_a_decode_replica_that_crashes_again_and_again_waits_before_it_starts(app: Any) -> None:
    def waits() -> int:
        logs = app._cluster.folder.rglob("worker-*.err")
        return sum("so this one starts" in path.read_text(errors="replace") for path in logs)

    for _ in range(6):
        await eventually(lambda: app.status().replicas["decode:g0"] == {"RUNNING": 1}, within_s=WAIT_S)
        if waits():
            break
        gone = replicas(app, "decode")
        kill_decode(app.processes())
        await eventually(lambda gone=gone: not gone & replicas(app, "decode"), within_s=WAIT_S)  # type: ignore[misc]
        await asyncio.sleep(3.0)  # until Serve has seen it
    assert waits()
    prompt = prompt_ids(300, seed=77)
    await eventually(lambda: app.status().replicas["decode:g0"] == {"RUNNING": 1}, within_s=WAIT_S)
    assert await stream(app.url, prompt, 20) == expected(prompt, 20)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
async def test_an_application_that_is_told_to_end_answers_the_requests_that_it_has_begun(
    tmp_path: Path, number: signal.Signals
) -> None:
    document = emulated_document()
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(document))
    url = f"http://127.0.0.1:{document['http_options']['port']}"
    log = tmp_path / "serve.log"
    with log.open("w") as out:
        serve = subprocess.Popen(
            [sys.executable, "-m", "serve_app.cli.main", "serve", str(config)], stdout=out, stderr=subprocess.STDOUT
        )
    try:
        await eventually(lambda: "/v1/chat/completions" in log.read_text() or serve.poll() is not None, within_s=WAIT_S)
        assert serve.poll() is None, log.read_text()
        prompt = prompt_ids(300, seed=5)
        begun = asyncio.create_task(stream(url, prompt, 600))
        await asyncio.sleep(2.0)
        started = psutil.Process(serve.pid).children(recursive=True)
        assert "raylet" in " ".join(" ".join(process.cmdline()) for process in started)
        serve.send_signal(number)
        got, end = [0], ""
        while got:  # until every part of the endpoint knows of the end
            got, end = await stream(url, prompt, 4)
        assert end.startswith("HTTP 503")
        assert "is being shut down" in end
        assert not begun.done()
        assert await begun == expected(prompt, 600)
        assert await asyncio.to_thread(serve.wait, 120) == 128 + number
        _, alive = await asyncio.to_thread(psutil.wait_procs, started, 120)
        assert [process.cmdline() for process in alive] == []
    finally:
        serve.kill()
    assert "Finishing running requests" in log.read_text()
    assert "cut off" not in log.read_text()
