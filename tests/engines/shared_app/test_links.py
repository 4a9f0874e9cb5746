"""Links between a decode and a prefill engine break while both run: clients only wait longer, and links come back."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
import psutil
import pytest

from tests.engines.endpoint import eventually, prompt_ids, samples, total
from tests.lab.drill.faults import break_nixl, silence_nixl
from tests.lab.drill.links import Connection, silence

pytestmark = [pytest.mark.ray, pytest.mark.vllm]

# Time that prefill may keep unread KV, seconds: far below its lease of 60 s.
FREED_S = 30.0
SO_DETACH_FILTER = 27


async def ask(app: Any, seed: int, salt: str) -> tuple[list[int], float]:
    """The output of a prompt that is prefilled remotely if possible, and the time that it took, in seconds."""
    body = {
        "model": "tiny",
        "prompt": prompt_ids(400, seed=seed),
        "max_tokens": 16,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
        "cache_salt": salt,
    }
    started_s = time.monotonic()
    async with aiohttp.ClientSession() as session, session.post(f"{app.url}/v1/completions", json=body) as response:
        text = await response.text()
    assert response.status == 200, text
    return json.loads(text)["choices"][0]["token_ids"], time.monotonic() - started_s


def counted(app: Any, name: str) -> float:
    return total(app, f"tandem_{name}_total")


async def until_repaired(app: Any, repairs: float, salt: str) -> None:
    deadline_s, number = time.monotonic() + 600.0, 0
    while counted(app, "link_repairs") == repairs:
        assert time.monotonic() < deadline_s
        number += 1
        await ask(app, 900 + number, salt)
    before = sum(v for have, v in samples(app, "tandem_prefill_path_total") if have["path"] == "remote")
    await ask(app, 999, salt)
    assert sum(v for have, v in samples(app, "tandem_prefill_path_total") if have["path"] == "remote") == before + 1


@pytest.mark.parametrize(("fault", "why", "within_s"), [(break_nixl, "failed", 5.0), (silence_nixl, "stuck", 25.0)])
async def test_a_link_that_breaks_is_made_anew(app: Any, fault: Any, why: str, within_s: float) -> None:
    salt = f"link-{why}"
    expected, _ = await ask(app, 70, f"{salt}-before")
    failures, repairs = total(app, "tandem_link_failures_total", why=why), counted(app, "link_repairs")
    fault(app.processes())
    got, took_s = await ask(app, 70, f"{salt}-after")
    assert got == expected
    assert took_s < within_s  # no request waits for longer than pull_timeout_s
    await eventually(lambda: total(app, "tandem_link_failures_total", why=why) == failures + 1)
    await until_repaired(app, repairs, salt)
    await eventually(lambda: not total(app, "vllm:kv_cache_usage_perc", role="prefill"), within_s=FREED_S)


@contextmanager
def deaf_side_channel(app: Any) -> Iterator[None]:
    """While the context is open, a prefill engine's handshake port takes connections and answers nothing."""
    found = [
        Connection(engine.pid, one.fd)
        for replica in app.processes()
        if ":prefill:" in " ".join(replica.cmdline())
        for engine in replica.children(recursive=True)
        for one in engine.net_connections("tcp")
        if one.status == psutil.CONN_LISTEN and 20000 <= one.laddr.port < 28000
    ]
    assert found
    for link in found:
        silence(link)
    try:
        yield
    finally:
        for link in found:
            with link.duplicate() as taken:
                taken.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)


async def test_a_handshake_that_gets_no_answer_is_given_up(app: Any) -> None:
    salt = "handshake"
    expected, _ = await ask(app, 71, f"{salt}-before")
    failures, repairs = counted(app, "link_failures"), counted(app, "link_repairs")
    with deaf_side_channel(app):
        break_nixl(app.processes())
        took_s = 0.0
        while counted(app, "link_failures") < failures + 3:  # the link, then two handshakes
            got, one_s = await ask(app, 71, f"{salt}-{time.monotonic()}")
            took_s = max(took_s, one_s)
            assert got == expected
        assert took_s < 12.0  # vLLM waits five seconds for an answer
    await until_repaired(app, repairs, salt)
