"""Which of a node's ingress replicas serves the metrics, and what happens if another process has the port."""

import asyncio
import socket
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from deployments.endpoint.metrics_port import MetricsPort
from deployments.machine.claims import free_ports

Start = Callable[..., "asyncio.Task[None]"]


@pytest.fixture(name="port")
def _port() -> int:
    return free_ports(1)[0]


@pytest.fixture(name="start")
async def _start(tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    """Start the metrics port as an ingress replica does."""
    monkeypatch.setattr("deployments.endpoint.metrics_port._RETRY_S", 0.05)
    tasks = []

    def start(page: bytes, *, app: str = "a/b", host: str = "127.0.0.1") -> "asyncio.Task[None]":
        async def render() -> bytes:
            return page

        tasks.append(asyncio.create_task(MetricsPort(host, port, app, render, claims=tmp_path).run()))
        return tasks[-1]

    yield start
    running = [task for task in tasks if not task.cancelled()]
    assert not [task for task in running if task.done()]  # a task runs on, with or without its port
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def read(port: int, path: str = "/metrics") -> bytes | int | None:
    """The page, the status of an error, or ``None`` if no process listens."""

    def ask() -> bytes | int | None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as response:
                assert response.headers["Content-Type"] == "text/plain; version=0.0.4"
                return bytes(response.read())
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return None

    return await asyncio.to_thread(ask)


async def becomes(port: int, page: bytes | None) -> None:
    async with asyncio.timeout(30.0):
        while await read(port) != page:
            await asyncio.sleep(0.02)


async def test_one_replica_serves_and_another_takes_over_without_a_log_record(
    start: Start, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    first = start(b"first")
    await becomes(port, b"first")
    start(b"second")
    await asyncio.sleep(0.3)
    assert await read(port) == b"first"
    assert await read(port, "/v1/models") == 404
    first.cancel()
    await becomes(port, b"second")
    assert not caplog.records


async def test_a_port_of_another_process_is_logged_once_and_taken_when_it_is_free(
    start: Start, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        start(b"mine")
        await asyncio.sleep(0.3)
    await becomes(port, b"mine")
    (record,) = caplog.records
    assert f"no metrics on 127.0.0.1:{port}: " in record.getMessage()
    assert "choose another ingress.metrics_host or ingress.metrics_port" in record.getMessage()


async def test_a_replica_that_ends_while_it_waits_for_the_port_gives_its_lock_to_another(
    start: Start, port: int
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        waits = start(b"first")
        await asyncio.sleep(0.3)
        waits.cancel()
        start(b"second")
        await asyncio.sleep(0.3)
    await becomes(port, b"second")


async def test_a_port_of_another_application_is_logged(
    start: Start, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    start(b"first")
    await becomes(port, b"first")
    start(b"second", app="other")
    await asyncio.sleep(0.3)
    assert await read(port) == b"first"
    assert len(caplog.records) == 1


async def test_an_address_of_another_machine_is_logged(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    start(b"page", host="192.0.2.1")  # an address for documentation, which no machine has
    await asyncio.sleep(0.3)
    assert [record.getMessage().startswith("no metrics on 192.0.2.1:") for record in caplog.records] == [True]


async def test_nothing_of_a_malformed_request_is_logged(
    start: Start, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    start(b"page")
    await becomes(port, b"page")
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET secret\r\nHost: x\r\n\r\n")
    assert b"400" in await reader.readline()
    writer.close()
    assert not caplog.records
