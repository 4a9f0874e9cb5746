"""Limits of a body: its size, its time, all bodies of a key. The memory of large bodies goes back to the machine."""

import asyncio
import subprocess
import sys
from typing import Any

import pytest
from fastapi import Request

from deployments import metrics
from deployments.endpoint.config import IngressConfig
from deployments.endpoint.request_body import Bodies, Body, Trim, read_body
from deployments.wire.openai_errors import OpenAIError
from router.admission_config import Priority

CONFIG = IngressConfig(max_body_bytes=1024, max_bodies_bytes=2048, body_timeout_s=0.2)


def alone() -> Body:
    return Body(Bodies(CONFIG), None)


def request(*parts: bytes, gap_s: float = 0.0, is_whole: bool = True) -> Request:
    """A request whose body comes in parts, ``gap_s`` apart; if it is not whole, its end never comes."""
    left = list(parts)

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(gap_s)
        if not left:
            await asyncio.Event().wait()
        part = left.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(left) or not is_whole}

    return Request({"type": "http", "method": "POST", "headers": []}, receive)


async def test_a_body_as_large_as_allowed_is_read() -> None:
    assert await read_body(request(b"a" * 1000, b"b" * 24), CONFIG, alone()) == b"a" * 1000 + b"b" * 24


async def test_one_byte_more_is_refused_before_the_rest_has_come() -> None:
    with pytest.raises(OpenAIError, match="larger than 1024 bytes") as refusal:
        await read_body(request(b"a" * 1000, b"b" * 25, is_whole=False), CONFIG, alone())
    assert refusal.value.status == 413


@pytest.mark.parametrize("parts", [[b"a"], [b"a"] * 1000], ids=["silent", "dripping"])
async def test_a_body_that_is_not_whole_in_time_is_refused(parts: list[bytes]) -> None:
    with pytest.raises(OpenAIError, match=r"as a whole in 0\.2 s") as refusal:
        async with asyncio.timeout(30.0):
            await read_body(request(*parts, gap_s=0.01, is_whole=False), CONFIG, alone())
    assert refusal.value.status == 408


async def test_all_bodies_together_have_a_limit_until_their_requests_have_ended() -> None:
    bodies = Bodies(CONFIG)
    held = [Body(bodies, None) for _ in range(3)]
    for body in held[:2]:
        await read_body(request(b"a" * 1000), CONFIG, body)
    with pytest.raises(OpenAIError, match=r"take 2000 bytes \(ingress\.max_bodies_bytes\)") as refusal:
        await read_body(request(b"a" * 49), CONFIG, held[2])
    assert (refusal.value.status, refusal.value.headers()["Retry-After"]) == (429, "1")
    held[2].free()
    held[0].free()
    held[0].free()
    assert bodies.used_bytes == 1000
    assert len(await read_body(request(b"a" * 1000), CONFIG, Body(bodies, None))) == 1000


async def test_a_body_counts_for_more_memory_once_its_values_are_counted() -> None:
    bodies = Bodies(CONFIG)
    body, other = Body(bodies, None), Body(bodies, None)
    await read_body(request(b"a" * 1000), CONFIG, body)
    body.take(600)
    with pytest.raises(OpenAIError, match="take 1600 bytes") as refusal:
        await read_body(request(b"a" * 449), CONFIG, other)
    assert refusal.value.status == 429
    with pytest.raises(OpenAIError, match="takes 2049 bytes of memory, and one may take 2048") as refusal:
        body.take(449)
    assert refusal.value.status == 413  # it would not fit later either
    body.free()
    assert bodies.used_bytes == 0


async def test_one_key_leaves_room_for_the_others() -> None:
    bodies = Bodies(CONFIG)
    first, second, other = Body(bodies, "a"), Body(bodies, "a"), Body(bodies, "b")
    first.take(1000)
    with pytest.raises(
        OpenAIError, match="requests of this key at this replica of the endpoint take 1000 bytes"
    ) as refusal:
        second.take(25)
    assert refusal.value.status == 429
    other.take(1024)
    with pytest.raises(OpenAIError, match="takes 1025 bytes of memory, and one may take 1024") as refusal:
        other.take(1)
    assert refusal.value.status == 413
    first.free()
    second.take(1024)
    assert bodies.used_bytes == 2048
    with pytest.raises(OpenAIError, match="requests at this replica of the endpoint take 2048 bytes"):
        Body(bodies, "c").take(1)


async def test_a_body_without_room_is_counted_with_its_priority() -> None:
    config = {"max_body_bytes": 1024, "max_bodies_bytes": 2048, "api_keys_file": "/keys"}
    bodies = Bodies(IngressConfig.model_validate(config | {"admission": {"key": {"max_requests": 1}}}))
    Body(bodies, "a").take(1000)
    Body(bodies, "b").take(1000)
    before = {reason: refused(reason) for reason in ("key", "bodies")}
    with pytest.raises(OpenAIError):
        Body(bodies, "a", Priority.LOW)
    assert {reason: refused(reason) - count for reason, count in before.items()} == {"key": 1, "bodies": 0}
    with pytest.raises(OpenAIError):
        Body(bodies, "c", Priority.LOW).take(100)
    assert {reason: refused(reason) - count for reason, count in before.items()} == {"key": 1, "bodies": 1}


def refused(reason: str) -> float:
    return float(metrics.REFUSED.labels(reason, "low")._value.get())


async def test_requests_of_a_key_count_from_before_their_first_byte_until_they_have_ended() -> None:
    config = IngressConfig.model_validate(
        {"api_keys_file": "/keys", "admission": {"key": {"max_requests": 2}, "keys": {"much": {}}}}
    )
    bodies = Bodies(config)
    held = [Body(bodies, "a"), Body(bodies, "a")]
    with pytest.raises(OpenAIError, match=r"has 2 requests of this key \(max_requests\)") as refusal:
        Body(bodies, "a")
    assert (refusal.value.status, refusal.value.code) == (429, "rate_limit_exceeded")
    assert refusal.value.headers()["Retry-After"] == "1"
    for key in ("b", *["much"] * 9):
        Body(bodies, key)
    held[0].free()
    held[0].free()
    Body(bodies, "a")
    with pytest.raises(OpenAIError, match="2 requests"):
        Body(bodies, "a")


# Frees many texts between which small ones stay. It runs in a process of its own: other tests' memory must not count.
SCRIPT = """
import asyncio, psutil
from deployments.endpoint.request_body import Trim

def now(): return psutil.Process().memory_info().rss / 2**20

async def main():
    trim, kept = Trim(delay_s=0.01), []
    before = now()
    texts = []
    for _ in range(2000):
        texts.append(bytearray(b"x" * 100_000))
        kept.append(bytearray(b"y" * 600))
    texts.clear()
    freed = now()
    trim.note_freed(8 << 20)
    await trim._task
    print(before, freed, now())

asyncio.run(main())
"""


def test_memory_that_glibc_keeps_goes_back_to_the_machine() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    before, freed, after = map(float, done.stdout.split())
    assert freed > before + 100.0  # else the test would show nothing
    assert after < before + 50.0


async def test_little_freed_memory_is_no_reason_to_trim_and_much_is_trimmed_once() -> None:
    calls: list[int] = []
    trim = Trim(delay_s=0.05)
    trim._trim = calls.append
    trim.note_freed(1 << 20)
    assert trim._task is None
    for _ in range(5):
        trim.note_freed(32 << 20)
    assert trim._task is not None
    await trim._task
    assert calls == [0]
    trim.note_freed(32 << 20)
    await trim._task
    assert calls == [0, 0]
