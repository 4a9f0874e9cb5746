"""An application's life on a running cluster: two groups, limits, lost replicas, and the command line around it."""

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.error
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import yaml

from autoscale.types import PoolKey
from deployments.machine.claims import free_ports
from deployments.wire.messages import PrefillRequest
from kvtransfer.topology import Role
from serve_app.local.cluster import LocalCluster, NodeSpec, driver_environment
from tests.engines.endpoint import WAIT_S, emulated_document, eventually, prompt_ids, samples, total
from tests.lab.stand.processes import title

pytestmark = [pytest.mark.ray, pytest.mark.vllm]

LEASE_S = 8
TIMEOUT_S = 5.0
# Rounds of prompts to new engines until one is in time.
ROUNDS = 4


@pytest.fixture(scope="module", name="cluster")
def _cluster() -> Iterator[LocalCluster]:
    driver_environment()
    with LocalCluster([NodeSpec(cpus=6)]) as cluster:
        yield cluster


@pytest.fixture(scope="module", name="http_port")
def _http_port() -> int:
    return free_ports(1)[0]


@pytest.fixture(scope="module", name="two_groups")
def _two_groups(cluster: LocalCluster, http_port: int, make_document: Any) -> Iterator[Any]:
    from serve_app.sdk import deploy

    document = make_document()
    document["http_options"]["port"] = http_port
    args = document["applications"][0]["args"]
    args["groups"][0]["decode"]["engine_silence_s"] = LEASE_S - 1.0
    args["groups"] = [{**args["groups"][0], "name": name} for name in ("g0", "g1")]
    args["engine_kwargs"]["max_num_queued_reqs"] = 8
    args["kv_transfer"] = {"lease_s": LEASE_S}
    args["router"] = {"prefill_timeout_s": TIMEOUT_S / 2}
    args["ingress"]["request_timeout_s"] = TIMEOUT_S
    with deploy(document, address=cluster.address) as app:
        yield app


def tandem(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "serve_app.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "COLUMNS": "120"},
    )


async def complete(app: Any, **fields: Any) -> tuple[int, str]:
    body = {"model": "tiny", "temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **fields}
    async with aiohttp.ClientSession() as session, session.post(f"{app.url}/v1/completions", json=body) as response:
        return response.status, await response.text()


def victims(cluster: LocalCluster, role: str, victim: str) -> list[psutil.Process]:
    """The replicas of a role in every group, or their engines."""
    replicas = [one for one in cluster.processes() if "ServeReplica" in title(one) and f":{role}:" in title(one)]
    assert len(replicas) == 2
    if victim == "replica":
        return replicas
    return [process for replica in replicas for process in replica.children(recursive=True)]


def kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        process.kill()


async def test_requests_spread_over_the_groups(two_groups: Any) -> None:
    prompts = [prompt_ids(length, seed=seed) for seed in range(8) for length in (20, 300)]
    # The first prompts touch the engines' KV memory. Where a virtual machine gets memory only then, all its processes
    # may stop for longer than TIMEOUT_S (18 s were measured), so a round that came too late is sent again.
    for _ in range(ROUNDS):
        answers = await asyncio.gather(*(complete(two_groups, prompt=prompt, temperature=1.0) for prompt in prompts))
        if {status for status, _ in answers} == {200}:
            break
    assert {status for status, _ in answers} == {200}
    served = {
        (labels["group"], labels["path"]) for labels, value in samples(two_groups, "tandem_prefill_path_total") if value
    }
    assert served == {("g0", "local"), ("g0", "remote"), ("g1", "local"), ("g1", "remote")}


async def test_a_request_beyond_its_time_ends_with_an_error_and_frees_the_engine(two_groups: Any) -> None:
    long = {"prompt": prompt_ids(20, seed=1), "max_tokens": 4000}
    status, body = await complete(two_groups, **long)
    assert status == 408
    assert "request_timeout_s" in body
    status, body = await complete(two_groups, **long, stream=True)
    assert status == 200
    *_, error, done, _ = body.split("\n\n")
    assert "request_timeout_s" in error
    assert done == "data: [DONE]"
    await eventually(lambda: not total(two_groups, "vllm:num_requests_running"))


async def leave_unread(app: Any, request_id: str) -> Any:
    """Let prefill compute a prompt that no decode replica will ask for. Gives the handle of the prefill deployment."""
    from ray import serve

    handle = serve.get_deployment_handle(str(PoolKey("g0", Role.PREFILL)), app.name)
    if not handle.is_initialized:  # each test has an event loop of its own
        handle._init(_run_router_in_separate_loop=True)
    prompt = PrefillRequest(request_id=request_id, token_ids=prompt_ids(2000, seed=3))
    async for _ in handle.options(method_name="prefill", stream=True).remote(prompt):
        pass
    return handle


async def test_unread_kv_is_reported_and_freed_after_its_lease(two_groups: Any) -> None:
    handle = await leave_unread(two_groups, "unread")
    assert (await handle.record_autoscaling_stats.remote())["unread_kv_requests"] == 1.0
    used = [value for labels, value in samples(two_groups, "vllm:kv_cache_usage_perc") if labels["role"] == "prefill"]
    assert max(used) > 0.0
    await eventually(lambda: not total(two_groups, "vllm:kv_cache_usage_perc", role="prefill"), within_s=10 * LEASE_S)
    assert (await handle.record_autoscaling_stats.remote())["unread_kv_requests"] == 0.0


async def prefills(app: Any, **labels: str) -> float:
    """Number of prompts with these labels, once the page has both decode replicas: it leaves out one that is slow."""
    page: list[tuple[dict[str, str], float]] = []

    def is_whole() -> bool:
        with suppress(urllib.error.URLError):
            page[:] = samples(app, "tandem_prefill_backlog_tokens", "tandem_prefill_path_total")
        return {have["group"] for have, _ in page if have["role"] == "decode"} == {"g0", "g1"}

    await eventually(is_whole, within_s=WAIT_S)
    return sum(value for have, value in page if "reason" in have and labels.items() <= have.items())


async def until_prefill_serves(app: Any) -> None:
    """Wait until prefill of both groups serves; each request goes to one of the two."""
    deadline = time.monotonic() + WAIT_S
    seed, in_a_row = 1000, 0
    while in_a_row < 8:
        before, seed = await prefills(app, path="remote"), seed + 1
        status, _ = await complete(app, prompt=prompt_ids(400, seed=seed))
        is_served = status == 200 and await prefills(app, path="remote") == before + 1
        in_a_row = in_a_row + 1 if is_served else 0
        assert time.monotonic() < deadline


@pytest.mark.parametrize("victim", ["engine", "replica"])
async def test_a_prompt_is_prefilled_on_decode_when_prefill_dies_and_prefill_comes_back(
    two_groups: Any, cluster: LocalCluster, victim: str
) -> None:
    before = await prefills(two_groups, reason="prefill_failed")
    kill(victims(cluster, "prefill", victim))
    status, _ = await complete(two_groups, prompt=prompt_ids(400, seed=50 if victim == "engine" else 51))
    assert status == 200
    assert await prefills(two_groups, reason="prefill_failed") == before + 1
    await until_prefill_serves(two_groups)


async def test_a_request_that_an_engine_does_not_admit_is_a_429(two_groups: Any) -> None:
    answers = await asyncio.gather(
        *(complete(two_groups, prompt=prompt_ids(20, seed=seed), stream=bool(seed % 2)) for seed in range(200))
    )
    assert {status for status, _ in answers} == {200, 429}
    refused = [json.loads(body)["error"] for status, body in answers if status == 429]
    assert all("busy" in error["message"] and error["code"] == "overloaded" for error in refused)


@pytest.mark.parametrize("victim", ["engine", "replica"])
async def test_a_stream_that_no_replica_can_continue_ends_with_an_error_in_its_time_and_decode_comes_back(
    two_groups: Any, cluster: LocalCluster, victim: str
) -> None:
    body = {"model": "tiny", "prompt": prompt_ids(20, seed=60), "max_tokens": 4000, "ignore_eos": True, "stream": True}
    decode = victims(cluster, "decode", victim)  # in both groups; looked up first, as the stream runs for seconds only
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{two_groups.url}/v1/completions", json=body) as response,
    ):
        assert response.status == 200, await response.text()
        await response.content.readline()
        kill(decode)
        *_, error, done, _ = (await response.text()).split("\n\n")
    assert "request_timeout_s" in error
    assert "server_error" in error or "invalid_request_error" in error
    assert done == "data: [DONE]"
    deadline = time.monotonic() + WAIT_S
    answers_in_a_row = 0
    while answers_in_a_row < 12:  # each request goes to one of the two groups
        status, _ = await complete(two_groups, prompt=prompt_ids(20, seed=61))
        answers_in_a_row = answers_in_a_row + 1 if status == 200 else 0
        assert time.monotonic() < deadline
        await asyncio.sleep(0.2)


async def test_the_command_line_shows_and_deletes_an_application(two_groups: Any, cluster: LocalCluster) -> None:
    shown = tandem("status", "--address", cluster.address)
    assert shown.returncode == 0, shown.stderr
    for name in ("ingress", "g0", "g1"):
        assert name in shown.stdout
    missing = tandem("delete", "absent", "--address", cluster.address)
    assert missing.returncode == 1
    assert len(missing.stderr.strip().splitlines()) == 1
    await leave_unread(two_groups, "unread-at-the-end")
    started_s = time.monotonic()
    deleted = tandem("delete", two_groups.name, "--address", cluster.address)
    assert deleted.returncode == 0, deleted.stderr
    # A prefill replica that is told to go stays until its KV has been read, or the lease has ended.
    assert time.monotonic() - started_s > LEASE_S - 2.0
    assert two_groups.name not in tandem("status", "--address", cluster.address).stdout


def test_deploy_from_the_command_line_answers(cluster: LocalCluster, http_port: int, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    document = emulated_document()
    config.write_text(yaml.safe_dump(document))
    elsewhere = tandem("deploy", str(config), "--address", cluster.address)
    assert elsewhere.returncode == 1
    assert "already runs on this cluster" in elsewhere.stderr
    document["http_options"]["port"] = http_port
    config.write_text(yaml.safe_dump(document))
    done = tandem("deploy", str(config), "--address", cluster.address)
    assert done.returncode == 0, done.stderr
    assert "answers at" in done.stdout
    assert "RUNNING" in tandem("status", "--address", cluster.address).stdout
