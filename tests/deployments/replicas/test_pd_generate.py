"""Paths of prompts on a decode replica, also while prefill fails; vLLM's client and Serve's handle are fakes."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.vllm

SHORT, LONG = list(range(300, 320)), list(range(300, 900))


class Prefill:
    """A prefill pool; a test sets the answer of each of its ``calls``."""

    def __init__(self) -> None:
        self.calls: list[asyncio.Future[Any]] = []
        self.requests: list[Any] = []

    def options(self, **_: Any) -> "Prefill":
        return self

    def remote(self, request: Any) -> Any:
        answer = asyncio.get_running_loop().create_future()
        self.calls.append(answer)
        self.requests.append(request)
        request.routing.choice.replica_id = f"p{len(self.calls)}"
        return Stream(answer)


class Stream:
    """Serve's stream of an answer in one piece."""

    def __init__(self, answer: asyncio.Future[Any]) -> None:
        self._answer = answer

    async def __aiter__(self) -> AsyncIterator[Any]:
        yield await self._answer

    def cancel(self) -> None:
        self._answer.cancel()


class QueueError(Exception):
    """The error of an engine at its limit."""


def engine_output(*, finish_reason: str | None = None, cached_tokens: int = 0, metrics: Any = None) -> Any:
    """An output of vLLM's engine with one token."""
    return SimpleNamespace(
        num_cached_tokens=cached_tokens,
        num_cache_creation_tokens=0,
        kv_transfer_params=None,
        ec_transfer_params=None,
        outputs=[SimpleNamespace(token_ids=[7], finish_reason=finish_reason)],
        finished=finish_reason is not None,
        metrics=metrics,
    )


class Client:
    """An engine that answers with one token. ``requests``: the id and the handoff of each."""

    model_config = SimpleNamespace(max_model_len=4096)

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.released: list[Any] = []
        self.is_full = False
        self.output: Callable[[], Any] = engine_output

    def check_admission(self, n: int, request_id: str) -> None:
        if self.is_full:
            raise QueueError

    async def notify_kv_transfer_request_rejected(self, request_id: str, params: Any) -> None:
        self.released.append(params)

    async def generate(self, prompt: Any, sampling: Any, request_id: str, **_: Any) -> AsyncIterator[Any]:
        self.requests.append((request_id, (sampling.extra_args or {}).get("kv_transfer_params")))
        yield self.output()


@pytest.fixture(name="prefill")
def _prefill() -> Prefill:
    return Prefill()


@pytest.fixture(name="client")
def _client() -> Client:
    return Client()


def decode(
    client: Client,
    prefill: Prefill | None,
    prefix_cache_blocks: int = 1000,
    answer_tokens: int = 0,
    max_prompt_tokens: int | None = None,
    watch: Any = None,
    piece_tokens: int | None = None,
    max_media_bytes: int = 0,
) -> Any:
    from autoscale.observe.request_stats import RequestStats
    from deployments.replicas.cache_watch import CacheWatch
    from deployments.replicas.pd_generate import PDGenerate
    from deployments.replicas.pull_watch import PullWatch
    from deployments.replicas.remote_prefill import RemotePrefill
    from deployments.vllm_seam.engine_stats import EngineLoad
    from deployments.wire.call import CallWatch, PoolCaller
    from router.config import RouterConfig
    from router.ejection import OutlierConfig
    from router.ray_health import HealthFeed

    stats = SimpleNamespace(
        block_tokens=32, prefix_cache_blocks=prefix_cache_blocks, max_running_requests=32, load=EngineLoad()
    )
    requests = RequestStats(time.monotonic)
    remote = None
    if prefill is not None:
        caller: Any = PoolCaller(
            prefill,  # type: ignore[arg-type]
            "prefill",
            health=HealthFeed("app", "prefill:g0", OutlierConfig()),
            watch=watch or CallWatch(lambda *_: True, lambda _: False),
            is_whole=lambda answer: True,
        )
        remote = RemotePrefill(caller, PullWatch(client, 15.0), RouterConfig(), lease_s=60.0)
    if answer_tokens:
        timer = requests.begin(time.monotonic(), 7, is_streamed=True)
        timer.add_tokens(answer_tokens)
        timer.end()
    return PDGenerate(
        client=client,
        remote=remote,
        stats=stats,
        requests=requests,
        length=RouterConfig().length,
        cache=CacheWatch(block_tokens=32, max_blocks=prefix_cache_blocks, piece_tokens=128),
        piece_tokens=piece_tokens,
        max_media_bytes=max_media_bytes,
        max_prompt_tokens=max_prompt_tokens,
    )


async def run(generate: Any, ids: list[int], request_id: str = "r") -> None:
    await run_prompt(generate, {"type": "token", "prompt_token_ids": ids}, request_id)


async def run_prompt(generate: Any, prompt: dict[str, Any], request_id: str = "r") -> None:
    from vllm.sampling_params import SamplingParams

    async for _ in generate(prompt, SamplingParams(), request_id):
        pass


async def sent(prefill: Prefill, calls: int) -> None:
    async with asyncio.timeout(30.0):
        while len(prefill.calls) < calls:
            await asyncio.sleep(0)


def answered(backlog_tokens: int = 0, ago_s: float = 0.0, computed_s: float | None = None) -> Any:
    from deployments.wire.messages import PrefillResult

    return PrefillResult(
        kv_transfer_params={"from": "p"},
        answered_at_s=time.time() - ago_s,
        replica_id="p",
        backlog_tokens=backlog_tokens,
        computed_s=computed_s,
    )


async def test_a_long_prompt_waits_for_prefill_and_a_short_one_does_not(client: Client, prefill: Prefill) -> None:
    generate = decode(client, prefill)
    long = asyncio.create_task(run(generate, LONG, "long"))
    await sent(prefill, 1)
    await run(generate, SHORT, "short")
    assert client.requests == [("short", None)]
    prefill.calls[0].set_result(answered())
    await long
    assert client.requests[1:] == [("long", {"from": "p"})]


def with_images(**changes: Any) -> dict[str, Any]:
    """A rendered prompt of the length of ``LONG`` with two images of 4,000 bytes each."""
    import torch
    from vllm.multimodal.inputs import (
        MultiModalBatchedField,
        MultiModalFieldElem,
        MultiModalKwargsItem,
        MultiModalKwargsItems,
        PlaceholderRange,
    )

    pixels = MultiModalFieldElem(data=torch.zeros(1000), field=MultiModalBatchedField())
    return {
        "type": "multimodal",
        "prompt_token_ids": LONG,
        "mm_kwargs": MultiModalKwargsItems({"image": [MultiModalKwargsItem({"pixels": pixels})] * 2}),
        "mm_hashes": {"image": ["red", "blue"]},
        "mm_placeholders": {"image": [PlaceholderRange(offset=10, length=4), PlaceholderRange(offset=20, length=4)]},
        **changes,
    }


async def test_prompts_with_images_go_to_prefill_with_their_images(client: Client, prefill: Prefill) -> None:
    from deployments.vllm_seam.media import prompt_with_media

    generate = decode(client, prefill, piece_tokens=128, max_media_bytes=9000)
    task = asyncio.create_task(run_prompt(generate, with_images(cache_salt="blue")))
    await sent(prefill, 1)
    (request,) = prefill.requests
    assert request.token_ids == LONG
    arrived = prompt_with_media(request.token_ids, request.media, request.cache_salt)
    assert arrived["mm_hashes"] == {"image": ["red", "blue"]} and arrived["cache_salt"] == "blue"
    # Prompts of equal text and other images have equal tokens, and no key says which image it is.
    assert request.routing.prompt is None
    prefill.calls[0].set_result(answered())
    await task
    assert client.requests == [("r", {"from": "p"})]


@pytest.mark.parametrize(
    ("prompt", "max_media_bytes", "reason"),
    [
        (with_images, 7999, "media_too_large"),
        (with_images, 0, "media_too_large"),
        (lambda: with_images(mm_kwargs={"image": [None, None]}), 9000, "not_transferable"),
        (lambda: with_images(mm_kwargs={"prompt_embeds": [None]}), 9000, "not_transferable"),
    ],
    ids=["large", "off", "left out by vLLM", "embeddings"],
)
async def test_images_that_cannot_travel_are_computed_on_decode(
    client: Client, prefill: Prefill, prompt: Any, max_media_bytes: int, reason: str
) -> None:
    from deployments.metrics import PREFILL_PATH

    path_count = PREFILL_PATH.labels("local", reason)
    before = path_count._value.get()
    await run_prompt(decode(client, prefill, max_media_bytes=max_media_bytes), prompt())
    assert (client.requests, prefill.calls) == ([("r", None)], [])
    assert path_count._value.get() == before + 1


async def test_in_a_group_without_prefill_decode_computes_long_prompts_too(client: Client) -> None:
    from deployments.metrics import PREFILL_PATH

    path_count = PREFILL_PATH.labels("local", "aggregated")
    before = path_count._value.get()
    await run(decode(client, None), LONG, "long")
    assert client.requests == [("long", None)]
    assert path_count._value.get() == before + 1


async def test_a_prompt_beyond_the_limit_is_refused_before_anything_is_computed(
    client: Client, prefill: Prefill
) -> None:
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match=f"has {len(LONG)} tokens, .* at most {len(LONG) - 1}: send a"):
        await run(decode(client, prefill, max_prompt_tokens=len(LONG) - 1), LONG)
    assert (client.requests, prefill.calls) == ([], [])
    await run(decode(client, prefill, max_prompt_tokens=len(SHORT)), SHORT)
    assert len(client.requests) == 1


async def test_a_token_id_that_no_vocabulary_has_is_the_clients_fault(client: Client) -> None:
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match=f"token id {2**32} is out of vocabulary"):
        await run(decode(client, None), [1, 2**32, 3])
    assert not client.requests


async def fails(generate: Any, prefill: Prefill, *, times: int) -> None:
    """Let ``times`` calls of prefill fail one after another; each prompt makes a second call."""
    while len(prefill.calls) < times:
        task = asyncio.create_task(run(generate, [len(prefill.calls), *LONG], "failed"))
        while not task.done():
            for call in prefill.calls:
                if not call.done():
                    call.set_exception(RuntimeError("gone"))
            await asyncio.sleep(0)
        await task


async def test_a_prompt_that_one_prefill_replica_failed_goes_to_another(client: Client, prefill: Prefill) -> None:
    task = asyncio.create_task(run(decode(client, prefill), LONG))
    await sent(prefill, 1)
    prefill.calls[0].set_exception(RuntimeError("gone"))
    await sent(prefill, 2)
    assert prefill.requests[1].routing.last_resort == "p1" and prefill.requests[1].token_ids == LONG
    prefill.calls[1].set_result(answered())
    await task
    assert client.requests == [("r", {"from": "p"})]


async def test_a_prompt_whose_prefill_replica_stands_still_goes_to_another(client: Client, prefill: Prefill) -> None:
    from deployments.wire.call import CallWatch

    still: list[str] = []

    def is_alive(deployment: str, replica_id: str) -> bool:
        still.append(f"{replica_id} of {deployment}")
        if replica_id == "p1":
            raise TimeoutError
        return True

    watch = CallWatch(is_alive, lambda _: False, quiet_s=0.05, check_s=0.01)
    watching = asyncio.create_task(watch.run())
    generate = decode(client, prefill, watch=watch)
    task = asyncio.create_task(run(generate, LONG))
    await sent(prefill, 2)
    assert still == ["p1 of prefill:g0"] * 2
    assert prefill.requests[1].routing.last_resort == "p1" and failures(generate) == ["p1"]
    await asyncio.sleep(0.2)  # another one may take its time
    prefill.calls[1].set_result(answered())
    await task
    assert client.requests == [("r", {"from": "p"})]
    assert not watch.calls
    watching.cancel()


async def test_if_prefill_has_no_replica_decode_prefills(client: Client, prefill: Prefill) -> None:
    from deployments.wire.call import CallWatch

    watch = CallWatch(lambda *_: True, lambda pool: pool == "prefill:g0", quiet_s=0.05, check_s=0.01)
    generate, remote = decode(client, prefill, watch=watch), prefill.remote
    watching = asyncio.create_task(watch.run())

    def nowhere(request: Any) -> Any:
        stream = remote(request)
        request.routing.choice.replica_id = None
        return stream

    prefill.remote = nowhere  # type: ignore[method-assign]
    async with asyncio.timeout(30.0):
        await run(generate, LONG)
    assert client.requests == [("r", None)]
    watching.cancel()


async def test_prefill_computes_nothing_for_an_engine_without_room(client: Client, prefill: Prefill) -> None:
    generate, client.is_full = decode(client, prefill), True
    with pytest.raises(QueueError):
        await run(generate, LONG)
    assert (prefill.calls, client.requests) == ([], [])


async def test_a_prefill_replica_that_refuses_a_prompt_is_healthy(client: Client, prefill: Prefill) -> None:
    from deployments.wire.messages import PrefillRefusal

    generate = decode(client, prefill)
    for number in range(5):  # more failures in a row than make an outage
        task = asyncio.create_task(run(generate, [number, *LONG]))
        await sent(prefill, 2 * number + 1)
        prefill.calls[-1].set_result(PrefillRefusal(why="full", backlog_tokens=0, replica_id="p1"))
        await sent(prefill, 2 * number + 2)  # another replica may have room
        prefill.calls[-1].set_result(PrefillRefusal(why="full", backlog_tokens=0, replica_id="p2"))
        await task
        assert client.requests[-1] == ("r", None)
    assert failures(generate) == []


def failures(generate: Any) -> list[str]:
    """Ids of replicas whose failures this decode replica will report to the health board, in order."""
    return [one.replica_id for one in generate._remote._caller.health._unsent if one.has_failed]


@pytest.mark.parametrize(("computed_s", "waited_s", "slow"), [(0.1, 50.0, 0), (9.0, 0.0, 1), (None, 50.0, 0)])
async def test_time_in_the_queue_of_prefill_is_no_sign_against_it(
    client: Client, prefill: Prefill, monkeypatch: Any, computed_s: float | None, waited_s: float, slow: int
) -> None:
    from deployments.replicas import remote_prefill

    generate, clock_s = decode(client, prefill), time.monotonic()
    monkeypatch.setattr(remote_prefill, "time", SimpleNamespace(monotonic=lambda: clock_s, time=time.time))
    for number in range(21):
        task = asyncio.create_task(run(generate, [number, *LONG]))
        await sent(prefill, number + 1)
        is_last = number == 20
        clock_s += waited_s if is_last else 0.1
        prefill.calls[-1].set_result(answered(computed_s=computed_s if is_last else 0.1))
        await task
    assert len(failures(generate)) == slow


async def test_a_prefill_replica_that_ends_without_an_answer_has_failed(client: Client, prefill: Prefill) -> None:
    async def nothing() -> AsyncIterator[Any]:
        for never in ():
            yield never

    generate, remote = decode(client, prefill), prefill.remote

    def silent(request: Any) -> AsyncIterator[Any]:
        remote(request)
        return nothing()

    prefill.remote = silent  # type: ignore[method-assign]
    await run(generate, LONG)
    assert failures(generate) == ["p1", "p2"]
    assert client.requests == [("r", None)]


@pytest.mark.parametrize("error", [RuntimeError("broken off"), TimeoutError()])
async def test_a_prefill_replica_that_breaks_off_after_its_answer_has_not_failed(
    client: Client, prefill: Prefill, error: Exception
) -> None:
    generate, remote = decode(client, prefill), prefill.remote
    is_cancelled = []

    class Broken:
        async def __aiter__(self) -> AsyncIterator[Any]:
            yield answered()
            raise error

        def cancel(self) -> None:
            is_cancelled.append(True)

    def broken(request: Any) -> Any:
        remote(request)
        return Broken()

    prefill.remote = broken  # type: ignore[method-assign]
    await run(generate, LONG)
    assert client.requests == [("r", {"from": "p"})]
    assert failures(generate) == [] and is_cancelled == [True]


async def test_a_replica_that_did_not_take_a_prompt_is_reported_though_another_took_it(
    client: Client, prefill: Prefill
) -> None:
    generate = decode(client, prefill)
    task = asyncio.create_task(run(generate, LONG))
    await sent(prefill, 1)
    prefill.requests[0].routing.choice.unreached.add("p0")
    prefill.calls[0].set_result(answered())
    await task
    assert failures(generate) == ["p0"]


@pytest.mark.parametrize(("ago_s", "is_pulled"), [(29.0, True), (31.0, False)])
async def test_kv_whose_lease_may_have_ended_is_not_pulled(
    client: Client, prefill: Prefill, ago_s: float, is_pulled: bool
) -> None:
    task = asyncio.create_task(run(decode(client, prefill), LONG))
    await sent(prefill, 1)
    prefill.calls[0].set_result(answered(ago_s=ago_s))
    await task
    assert client.requests == [("r", {"from": "p"} if is_pulled else None)]
    assert client.released == [] if is_pulled else [{"from": "p"}]


async def test_retries_are_limited_to_a_share_of_the_requests(client: Client, prefill: Prefill) -> None:
    generate = decode(client, prefill)
    for number in range(100):  # every other one succeeds, so that there is no outage
        task = asyncio.create_task(run(generate, [number, *LONG]))
        await asyncio.sleep(0)
        while not task.done():
            for call in prefill.calls:
                if not call.done():
                    call.set_exception(RuntimeError("gone")) if number % 2 else call.set_result(answered())
            await asyncio.sleep(0)
    # 50 failed. The budget allows ten retries at first and one more for every five requests: 30. The first requests add
    # nothing, because the budget is full.
    assert 100 + 10 + 18 <= len(prefill.calls) <= 100 + 10 + 20


@pytest.mark.parametrize(("failures", "prompts", "is_outage"), [(2, 1, False), (3, 2, True)])
async def test_in_an_outage_of_prefill_one_prompt_at_a_time_is_sent_there(
    client: Client, prefill: Prefill, failures: int, prompts: int, is_outage: bool
) -> None:
    generate = decode(client, prefill)
    await fails(generate, prefill, times=failures)
    assert client.requests == [("failed", None)] * prompts
    tasks = [asyncio.create_task(run(generate, [100 + n, *LONG], f"r{n}")) for n in range(3)]
    await sent(prefill, failures + 1)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(prefill.calls) == failures + (1 if is_outage else 3)
    assert client.requests[prompts:] == ([("r1", None), ("r2", None)] if is_outage else [])
    for call in prefill.calls[failures:]:
        call.set_result(answered())
    await asyncio.gather(*tasks)
    assert client.requests[-1][1] == {"from": "p"}


async def test_a_success_ends_the_outage(client: Client, prefill: Prefill) -> None:
    generate = decode(client, prefill)
    await fails(generate, prefill, times=5)
    probe = asyncio.create_task(run(generate, [50, *LONG]))
    await sent(prefill, 6)
    prefill.calls[5].set_result(answered())
    await probe
    again = [asyncio.create_task(run(generate, [n, *LONG])) for n in (60, 61)]
    await sent(prefill, 8)
    for call in prefill.calls[6:]:
        call.set_result(answered())
    await asyncio.gather(*again)


async def test_a_repeated_prompt_stays_on_decode_only_if_the_engine_caches_prefixes(
    client: Client, prefill: Prefill
) -> None:
    for blocks, remote in ((1000, 1), (0, 2)):
        prefill.calls.clear()
        generate = decode(client, prefill, prefix_cache_blocks=blocks)
        for _ in range(2):
            task = asyncio.create_task(run(generate, LONG))
            await asyncio.sleep(0.01)
            for call in prefill.calls:
                if not call.done():
                    call.set_result(answered())
            await task
        assert len(prefill.calls) == remote


async def test_a_queue_at_prefill_keeps_longer_prompts_on_decode(client: Client, prefill: Prefill) -> None:
    medium = list(range(1000, 1300))  # above the 128 that always stay, below the 400 that answers of 50 tokens allow
    for backlog_tokens, answer_tokens, stays in ((0, 50, False), (5000, 50, True), (5000, 30, False)):
        prefill.calls.clear()
        client.requests.clear()
        generate = decode(client, prefill, answer_tokens=answer_tokens)
        first = asyncio.create_task(run(generate, LONG))
        await sent(prefill, 1)
        prefill.calls[0].set_result(answered(backlog_tokens))
        await first
        second = asyncio.create_task(run(generate, medium, "medium"))
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(prefill.calls) == (1 if stays else 2)
        for call in prefill.calls[1:]:
            call.set_result(answered())
        await second


async def test_a_prompt_avoids_prefill_replicas_whose_kv_does_not_come(client: Client, prefill: Prefill) -> None:
    generate = decode(client, prefill)
    peers = generate._remote.pulls.peers
    for name in ("p", "other"):
        peers.heard(name, time.monotonic())
    peers.failed("p", time.monotonic())
    task = asyncio.create_task(run(generate, LONG))
    await sent(prefill, 1)
    assert prefill.requests[0].routing.exclude == {"p"}
    prefill.calls[0].set_result(answered())
    await task
    peers.failed("other", time.monotonic())
    await run(generate, [1, *LONG], "cut off")
    assert len(prefill.calls) == 1
    assert client.requests[-1] == ("cut off", None)


async def test_one_prompt_probes_a_prefill_replica_whose_kv_did_not_come(client: Client, prefill: Prefill) -> None:
    generate = decode(client, prefill)
    generate._remote.pulls.peers.failed("p", time.monotonic() - 2.0)
    tasks = [asyncio.create_task(run(generate, [number, *LONG], f"r{number}")) for number in range(3)]
    await sent(prefill, 1)
    await asyncio.gather(*tasks[1:])
    assert [(request.routing.probe, request.routing.exclude) for request in prefill.requests] == [("p", frozenset())]
    prefill.calls[0].set_result(answered())
    await tasks[0]
    assert client.requests == [("r1", None), ("r2", None), ("r0", {"from": "p"})]


@pytest.mark.parametrize("ends", ["its client leaves", "it fails", "its KV is late", "another answers"])
async def test_a_link_whose_probe_has_no_result_is_probed_again_a_second_later(
    client: Client, prefill: Prefill, ends: str
) -> None:
    generate = decode(client, prefill)
    peers = generate._remote.pulls.peers
    peers.failed("p", time.monotonic() - 2.0)
    task = asyncio.create_task(run(generate, LONG))
    await sent(prefill, 1)
    assert prefill.requests[0].routing.probe == "p"
    if ends == "its client leaves":
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    elif ends == "it fails":
        prefill.calls[0].set_exception(RuntimeError("gone"))
        await sent(prefill, 2)
        prefill.calls[1].set_exception(RuntimeError("gone"))
        await task
    elif ends == "its KV is late":
        prefill.calls[0].set_result(answered(ago_s=40.0))
        await task
    else:
        prefill.calls[0].set_result(replace(answered(), replica_id="other"))
        await task
    now_s = time.monotonic()
    assert peers.probe(now_s + 0.5) is None
    assert peers.probe(now_s + 1.5) == "p"


async def test_a_late_prompt_does_not_end_the_probe_of_another_prompt(client: Client, prefill: Prefill) -> None:
    generate = decode(client, prefill)
    peers = generate._remote.pulls.peers
    before = asyncio.create_task(run(generate, LONG, "before"))
    await sent(prefill, 1)
    peers.failed("p", time.monotonic() - 2.0)
    probe = asyncio.create_task(run(generate, [1, *LONG], "probe"))
    await sent(prefill, 2)
    assert [request.routing.probe for request in prefill.requests] == [None, "p"]
    prefill.calls[0].set_result(answered(ago_s=40.0))
    await before
    assert peers.probe(time.monotonic() + 1.5) is None  # the probe that is on its way will show it
    prefill.calls[1].set_result(answered())
    await probe


async def test_prompts_avoid_ejected_replicas_and_one_prompt_probes(client: Client, prefill: Prefill) -> None:
    generate = decode(client, prefill)

    async def grant(replica_id: str) -> bool:
        return True

    health = generate._remote._caller.health
    health._ejected, health._due = frozenset({"p8", "p9"}), {"p9"}
    health._board = SimpleNamespace(probe=SimpleNamespace(remote=grant))
    guides = []
    for number in range(2):
        task = asyncio.create_task(run(generate, [number, *LONG]))
        await sent(prefill, number + 1)
        guides.append((prefill.requests[number].routing.avoid, prefill.requests[number].routing.probe))
        prefill.requests[number].routing.choice.replica_id = prefill.requests[
            number
        ].routing.probe  # as the router does it
        prefill.calls[number].set_result(answered())
        await task
    assert guides == [({"p8"}, "p9"), ({"p8", "p9"}, None)]


@pytest.mark.parametrize("ids", [SHORT, LONG])
async def test_an_answer_in_one_piece_has_its_first_token_on_prefill_or_when_the_engine_has_it(
    client: Client, prefill: Prefill, ids: list[int]
) -> None:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    from deployments.replicas.generation import CURRENT_TRACE, RequestTrace

    generate, trace, ends = decode(client, prefill), RequestTrace(), asyncio.Event()
    state = SimpleNamespace(is_prefilling=True)
    client.output_processor = SimpleNamespace(  # type: ignore[attr-defined]
        external_req_ids={"r": ["r-0"]}, request_states={"r-0": state}
    )

    async def answer(*_: Any, **__: Any) -> AsyncIterator[Any]:
        await ends.wait()
        yield engine_output(finish_reason="stop")

    generate._engine_generate = answer
    CURRENT_TRACE.set(trace)
    sampling = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY)

    async def run() -> None:
        async for _ in generate({"type": "token", "prompt_token_ids": ids}, sampling, "r"):
            pass

    answering = asyncio.create_task(run())
    if ids is LONG:
        await sent(prefill, 1)
        assert not trace.has_first.is_set()
        prefill.calls[0].set_result(answered())
    else:
        async with asyncio.timeout(30.0):
            while not generate._first_tokens._waiting:
                await asyncio.sleep(0)
        generate._stats.on_step()
        assert not trace.has_first.is_set()
        state.is_prefilling = False
        generate._stats.on_step()
    async with asyncio.timeout(30.0):
        await trace.has_first.wait()
    assert not answering.done()
    ends.set()
    await answering
    assert not generate._first_tokens._waiting


async def test_a_prompt_is_cut_for_the_routing_of_its_prefill(client: Client, prefill: Prefill) -> None:
    from deployments.replicas.cache_watch import piece_keys

    for piece_tokens, keys in ((None, None), (200, piece_keys(LONG, 200))):
        prefill.requests.clear()
        prefill.calls.clear()
        task = asyncio.create_task(run(decode(client, prefill, piece_tokens=piece_tokens), LONG))
        await sent(prefill, 1)
        prefill.calls[0].set_result(answered())
        await task
        assert prefill.requests[0].routing.prompt == keys
    assert keys is not None
    assert len(keys.keys) == 3


async def test_the_endpoint_learns_the_path_and_what_the_engine_had(client: Client) -> None:
    from deployments.replicas.generation import CURRENT_TRACE, RequestTrace

    generate = decode(client, None)
    traces = []
    for reports_route in (True, True, False):
        trace = RequestTrace(reports_route=reports_route)
        CURRENT_TRACE.set(trace)
        await run(generate, LONG)
        traces.append(trace)
    routes = [trace.take_route() for trace in traces]
    assert routes[2] is None
    assert traces[0].take_route() is None  # it is told once
    assert [(route.path, route.reason, route.input_tokens) for route in routes[:2]] == [
        ("local", "aggregated", len(LONG))
    ] * 2
    # The second time the index has 576 of the 600 tokens, and the engine says that it found none.
    assert [route.cached_tokens for route in routes[:2]] == [0, 0]


async def test_a_resumed_stream_teaches_the_endpoint_nothing_about_its_prompt(client: Client) -> None:
    from vllm.sampling_params import SamplingParams

    from deployments.replicas.generation import Generation, RequestTrace
    from deployments.replicas.usage import UsageReport
    from deployments.wire.messages import Sent

    sent_before = Sent(outputs=((10,),), frames=1, digest=b"", created="")
    trace = RequestTrace(reports_route=True, sent=sent_before)
    prompt = {"type": "token", "prompt_token_ids": [*LONG, 10]}
    generation = Generation(
        prompt,
        [*LONG, 10],
        SamplingParams(),
        "r",
        trace=trace,
        is_step=False,
        usage=UsageReport(time.monotonic(), sent_before),
        kwargs={},
    )
    async for _ in decode(client, None)._run(generation):
        pass
    assert trace.take_route() is None


async def test_a_replica_reports_the_endpoints_pieces_once_its_engine_has_the_prompt(client: Client) -> None:
    from deployments.replicas.generation import CURRENT_TRACE, RequestTrace
    from router.prompt_keys import PromptKeys

    generate = decode(client, None)
    text = PromptKeys(keys=(1, 2, 3), piece_tokens=100, tokens=300)  # a text of 600 tokens that counts as 300
    CURRENT_TRACE.set(RequestTrace(pieces=text))
    await run(generate, LONG)
    assert sorted(generate._cache.pieces.take().stored) == [1, 2, 3]


async def test_prompts_with_images_adapters_or_other_salts_share_no_cache(client: Client) -> None:
    from vllm.sampling_params import SamplingParams

    generate = decode(client, None)

    async def cached(prompt: dict[str, Any], **kwargs: Any) -> list[int]:
        before = [int(generate._cache.index.cached_tokens(generate._cache.blocks(LONG, **names))) for names in KINDS]
        async for _ in generate({"prompt_token_ids": LONG, **prompt}, SamplingParams(), "r", **kwargs):
            pass
        return before

    none = [0, 0, 0]
    assert await cached({"type": "multimodal"}) == none
    assert await cached({"type": "token", "cache_salt": "blue"}) == none
    assert await cached({"type": "token"}, lora_request=SimpleNamespace(lora_name="a")) == [0, 576, 0]
    assert await cached({"type": "token"}) == [0, 576, 576]
    assert await cached({"type": "token"}) == [576, 576, 576]


KINDS: list[dict[str, str]] = [{}, {"salt": "blue"}, {"lora": "a"}]


async def asked(generate: Any, ids: list[int], sampling: Any = None) -> list[Any]:
    """The outputs of the answer to a prompt."""
    from vllm.sampling_params import SamplingParams

    prompt = {"type": "token", "prompt_token_ids": ids}
    return [output async for output in generate(prompt, sampling or SamplingParams(), "r")]


@pytest.mark.parametrize(("pulled_tokens", "cached_tokens", "created_tokens"), [(600, 96, 480), (32, 32, 0)])
async def test_an_answer_reports_what_prefill_had_cached_unless_decode_computed_the_prompt(
    client: Client, prefill: Prefill, pulled_tokens: int, cached_tokens: int, created_tokens: int
) -> None:
    client.output = partial(engine_output, cached_tokens=pulled_tokens)
    task = asyncio.create_task(asked(decode(client, prefill), LONG))
    await sent(prefill, 1)
    prefill.calls[0].set_result(replace(answered(), cached_tokens=96, created_tokens=480))
    (output,) = await task
    assert (output.num_cached_tokens, output.num_cache_creation_tokens) == (cached_tokens, created_tokens)


async def test_a_local_answer_reports_what_its_own_engine_had_cached(client: Client, prefill: Prefill) -> None:
    client.output = partial(engine_output, cached_tokens=16)
    (output,) = await asked(decode(client, prefill), SHORT)
    assert output.num_cached_tokens == 16


async def test_times_of_an_answer_go_from_its_arrival_over_prefill_to_the_first_token(
    client: Client, prefill: Prefill
) -> None:
    from vllm.entrypoints.generate.base.serving import build_per_request_timing_metrics
    from vllm.v1.metrics.stats import RequestStateStats

    from deployments.replicas.generation import CURRENT_TRACE, RequestTrace

    arrived_s = time.monotonic() - 9.0  # waited at the endpoint
    CURRENT_TRACE.set(RequestTrace(arrived_s=arrived_s))
    first_s = time.monotonic() + 1.0
    own = RequestStateStats(
        queued_ts=first_s - 0.2, scheduled_ts=first_s - 0.1, first_token_ts=first_s, last_token_ts=first_s + 2.0
    )
    client.output = partial(engine_output, finish_reason="stop", cached_tokens=600, metrics=own)
    task = asyncio.create_task(asked(decode(client, prefill), LONG))
    await sent(prefill, 1)
    answered_s = time.monotonic()
    prefill.calls[0].set_result(answered(computed_s=3.0))
    (output,) = await task
    figures = build_per_request_timing_metrics(output.metrics, 5)
    # Prefill began 3 s before its answer: 6 s after the arrival.
    assert figures.queue_time_ms == pytest.approx(1000 * (answered_s - 3.0 - arrived_s), abs=500)
    assert figures.queue_time_ms + figures.time_to_first_token_ms == pytest.approx(1000 * (first_s - arrived_s))
    assert figures.generation_time_ms == pytest.approx(2000.0)
    assert own.scheduled_ts == first_s - 0.1  # the engine's histograms read it


async def test_a_handoff_ends_at_the_engines_first_token_and_not_at_the_end_of_an_answer_in_one_piece(
    client: Client, prefill: Prefill
) -> None:
    from vllm.v1.metrics.stats import RequestStateStats

    generate = decode(client, prefill)
    task = asyncio.create_task(asked(generate, LONG))
    await sent(prefill, 1)
    first_s = time.monotonic() + 5.0
    client.output = partial(
        engine_output, finish_reason="stop", metrics=RequestStateStats(first_token_ts=first_s, last_token_ts=first_s)
    )
    prefill.calls[0].set_result(answered())
    await task
    assert generate.handoff_s == pytest.approx(5.0, abs=1.0)


async def test_no_output_carries_the_place_of_kv_to_a_client(client: Client) -> None:
    def with_params() -> Any:
        output = engine_output()
        output.kv_transfer_params = output.ec_transfer_params = {"remote_host": "10.0.0.1"}
        return output

    client.output = with_params
    (output,) = await asked(decode(client, None), SHORT)
    assert (output.kv_transfer_params, output.ec_transfer_params) == (None, None)


async def test_an_engine_gets_no_transfer_arguments_of_a_caller(client: Client, prefill: Prefill) -> None:
    from vllm.sampling_params import SamplingParams

    sampling = SamplingParams(extra_args={"kv_transfer_params": {"remote_block_ids": [1]}, "mine": 1})
    await asked(decode(client, prefill), SHORT, sampling)
    assert client.requests == [("r", None)]
    assert sampling.extra_args == {"kv_transfer_params": {"remote_block_ids": [1]}, "mine": 1}


async def test_a_second_prompt_with_the_same_parameters_does_not_pull_the_kv_of_the_first(
    client: Client, prefill: Prefill
) -> None:
    from vllm.sampling_params import SamplingParams

    generate, sampling = decode(client, prefill), SamplingParams()
    task = asyncio.create_task(asked(generate, LONG, sampling))
    await sent(prefill, 1)
    prefill.calls[0].set_result(answered())
    await task
    await asked(generate, SHORT, sampling)
    assert client.requests == [("r", {"from": "p"}), ("r", None)]


async def test_the_engines_histograms_begin_at_the_endpoint(client: Client) -> None:
    from deployments.replicas.generation import CURRENT_TRACE, RequestTrace

    prompts: list[Any] = []

    async def noting(prompt: Any, *_: Any, **__: Any) -> AsyncIterator[Any]:
        prompts.append(prompt)
        yield engine_output()

    client.generate = noting  # type: ignore[method-assign]
    CURRENT_TRACE.set(RequestTrace(arrived_s=time.monotonic() - 9.0))
    await asked(decode(client, None), SHORT)
    assert prompts[0]["arrival_time"] == pytest.approx(time.time() - 9.0, abs=5.0)
