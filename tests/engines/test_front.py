"""An endpoint on emulated engines: what it shows to which client, what it bounds, and what its logs leave out."""

import asyncio
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from tests.engines.endpoint import (
    WAIT_S,
    emulated_document,
    eventually,
    keeps_to_itself,
    replica_processes,
    samples,
    total,
)
from tests.lab.drill.faults import kill_proxy
from tests.lab.stand.processes import title

pytestmark = [pytest.mark.ray, pytest.mark.vllm]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", name="app")
def _app() -> Iterator[Any]:
    from serve_app.sdk import deploy

    document = emulated_document(replicas=2, max_body_bytes=2 << 20, body_timeout_s=2.0, max_prompt_tokens=2000)
    del document["logging_config"]  # Serve's default level logs more
    with deploy(document) as running:
        yield running


def serves_metrics(app: Any) -> psutil.Process:
    """The replica of the endpoint that has the metrics port."""
    port = int(app.metrics_url.rsplit(":", 1)[1].removesuffix("/metrics"))
    (owner,) = [
        process
        for process in replica_processes(app, "ingress")
        if any(one.status == "LISTEN" and one.laddr.port == port for one in process.net_connections("tcp"))
    ]
    return owner


async def test_metrics_are_on_a_port_of_their_own_and_outlive_the_replica_that_serves_them(app: Any) -> None:
    answer = requests.get(f"{app.url}/metrics", timeout=30)
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "invalid_request_error")
    assert app.metrics_url.startswith("http://127.0.0.1:")
    body = {"model": "llama-70b", "prompt": [100] * 50, "max_tokens": 4}
    for _ in range(8):  # the balancer sends some to each replica
        assert requests.post(f"{app.url}/v1/completions", json=body, timeout=60).status_code == 200
    assert total(app, "tandem_requests_total", endpoint="completions", code="200") == 8
    serves_metrics(app).kill()

    def answers() -> bool:
        try:
            return total(app, "tandem_requests_total", endpoint="completions", code="200") >= 0
        except OSError:
            return False

    await eventually(answers, within_s=WAIT_S)


async def test_a_replica_that_stands_still_removes_only_its_own_metrics(app: Any) -> None:
    def roles() -> Counter[str]:
        return Counter(labels["role"] for labels, _ in samples(app, "tandem_resumed_total"))

    whole = Counter(ingress=2, decode=1, prefill=1)
    await eventually(lambda: roles() == whole, within_s=WAIT_S)  # the test above has killed a replica
    (other,) = set(replica_processes(app, "ingress")) - {serves_metrics(app)}
    other.suspend()
    try:
        assert roles() == whole - Counter(ingress=1)
    finally:
        other.resume()


async def test_a_client_that_waits_for_the_only_proxy_finds_its_routes_when_it_is_back(app: Any) -> None:
    kill_proxy(app.processes())
    statuses: list[int | None] = []

    def is_back() -> bool:
        try:
            statuses.append(requests.get(f"{app.url}/v1/models", timeout=10).status_code)
        except requests.ConnectionError:
            statuses.append(None)
        return statuses[-1] == 200

    await eventually(is_back, within_s=WAIT_S)
    assert set(statuses) == {None, 200}
    # HAProxy alone keeps memory that it has freed.
    keeping = set()
    for one in app.processes():
        with suppress(psutil.Error):
            if "MALLOC_TRIM_THRESHOLD_" in one.environ():
                keeping.add(title(one).split(" ")[0].rpartition("/")[2])
    assert keeping == {"haproxy"}


@pytest.mark.parametrize(
    ("prompt", "status", "says"),
    [
        ([100] * 2000, 200, None),
        ([100] * 2001, 400, "the prompt has 2001 tokens, and this endpoint takes at most 2000"),
        ("a" * (2 << 20), 413, "the body is larger than 2097152 bytes (ingress.max_body_bytes)"),
    ],
    ids=["allowed", "long", "large"],
)
def test_prompts_and_bodies_have_limits(app: Any, prompt: Any, status: int, says: str | None) -> None:
    body = {"model": "llama-70b", "prompt": prompt, "max_tokens": 2}
    answer = requests.post(f"{app.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == status
    assert says is None or says in answer.json()["error"]["message"]


def dripped(app: Any, head: bytes, most_s: float) -> tuple[bytes, float]:
    """The answer to a request whose bytes come slowly after ``head``, and the seconds until the answer."""
    host, _, port = app.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(head)
        client.settimeout(0.2)
        answer, began_s = b"", time.monotonic()
        while not answer and time.monotonic() - began_s < most_s:
            client.sendall(b" ")
            try:
                answer = client.recv(4096)
            except TimeoutError:
                continue
        return answer, time.monotonic() - began_s


POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def test_a_body_that_comes_too_slowly_is_refused(app: Any) -> None:
    # This body is too large for HAProxy to wait until it is whole.
    answer, took_s = dripped(app, POST + b"Content-Length: 2000000\r\n\r\n" + b" " * 1_500_000, most_s=20.0)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert took_s >= 1.5


async def test_headers_and_bodies_that_come_byte_by_byte_are_refused(app: Any) -> None:
    heads = (POST + b"X-Slow: ", POST + b"Content-Length: 1000\r\n\r\n{")
    answers = await asyncio.gather(*(asyncio.to_thread(dripped, app, head, 45.0) for head in heads))
    assert all(answer.startswith(b"HTTP/1.1 408 ") for answer, _ in answers)


def test_no_log_contains_text_of_a_request(app: Any) -> None:
    keeps_to_itself(app, "llama-70b")


async def test_a_request_without_output_so_far_outlives_its_ingress_replica(app: Any) -> None:
    body = {"model": "llama-70b", "prompt": [100] * 50, "max_tokens": 300}
    asked = [asyncio.to_thread(requests.post, f"{app.url}/v1/completions", json=body, timeout=120) for _ in range(12)]
    started = [asyncio.create_task(one) for one in asked]
    await asyncio.sleep(2.0)
    assert not any(one.done() for one in started)
    replica_processes(app, "ingress")[0].kill()
    answers = await asyncio.gather(*started)
    assert [answer.status_code for answer in answers] == [200] * 12
    assert all(answer.json()["usage"]["completion_tokens"] == 300 for answer in answers)
