"""vLLM's own publisher, read by ours: order, replay, salts, adapters and what is no block of tokens."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from router.engine_blocks import BlocksCleared, BlocksRemoved, BlocksStored, EventBatch

pytestmark = pytest.mark.vllm


@pytest.fixture(name="events")
def _events() -> Iterator[Any]:
    from deployments.vllm_seam.kv_events import KvEvents

    events = KvEvents()
    yield events
    events.close()
    assert not events._folder.exists()


@pytest.fixture(name="publisher")
def _publisher(events: Any) -> Iterator[Any]:
    from vllm.config.kv_events import KVEventsConfig
    from vllm.distributed.kv_events import EventPublisherFactory

    config = KVEventsConfig(**events.engine_arguments()["kv_events_config"])
    publisher = EventPublisherFactory.create(config)
    yield publisher
    publisher.shutdown()


def publish(publisher: Any, *events: Any) -> None:
    from vllm.distributed.kv_events import KVEventBatch

    publisher.publish(KVEventBatch(ts=1.5, events=list(events)))


def block(**changed: Any) -> Any:
    from vllm.distributed.kv_events import BlockStored

    fields: dict[str, Any] = {
        "block_hashes": [7],
        "parent_block_hash": None,
        "token_ids": [1, 2],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None],
        "group_idx": 0,
    }
    return BlockStored(**{**fields, **changed})


async def received(events: Any, publisher: Any, *sent: Any) -> EventBatch:
    """A batch as it comes; sent again until the subscription has begun."""
    async with asyncio.timeout(30.0):
        batches = events.batches()
        waiting = asyncio.ensure_future(anext(batches))
        while not waiting.done():
            publish(publisher, *sent)
            await asyncio.wait([waiting], timeout=0.1)
        await batches.aclose()
        return waiting.result()


async def test_events_of_an_engine_in_tandems_terms(events: Any, publisher: Any) -> None:
    from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved

    removed = BlockRemoved(block_hashes=[7, 8], medium="GPU", group_idx=0)
    batch = await received(events, publisher, block(), removed, AllBlocksCleared())
    assert batch.events == (
        BlocksStored(hashes=(7,), parent=None, token_ids=[1, 2], block_tokens=2),
        BlocksRemoved(hashes=(7, 8)),
        BlocksCleared(),
    )
    assert batch.at_s == 1.5


@pytest.mark.parametrize(
    ("changed", "lora", "salt", "blocks"),
    [
        ({"extra_keys": [("blue",)]}, "", "blue", 1),
        ({"lora_name": "a", "extra_keys": [("a",)]}, "a", "", 1),
        ({"lora_name": "a", "extra_keys": [("a", "blue")]}, "a", "blue", 1),
        ({"lora_name": "a", "extra_keys": [("a", "a")]}, "a", "a", 1),
        ({"extra_keys": None}, "", "", 1),
        ({"extra_keys": [(("image", 0),)]}, "", "", 0),
        ({"extra_keys": [(b"embeddings",)]}, "", "", 0),
        ({"block_hashes": [7, 8], "token_ids": [1, 2, 3, 4], "extra_keys": [None, (("image", 1),)]}, "", "", 1),
    ],
)
async def test_salt_and_adapter_of_blocks(
    events: Any, publisher: Any, changed: dict[str, Any], lora: str, salt: str, blocks: int
) -> None:
    (*stored,) = (await received(events, publisher, block(**changed))).events
    if not blocks:
        assert stored == []
        return
    assert [(one.lora, one.salt, len(one.hashes), len(one.token_ids)) for one in stored] == [(lora, salt, 1, 2)]


async def test_blocks_outside_of_the_engines_own_memory_are_left_out(events: Any, publisher: Any) -> None:
    batch = await received(events, publisher, block(medium="CPU"), block(group_idx=1))
    assert batch.events == ()


async def test_missed_batches_can_be_had_again(events: Any, publisher: Any) -> None:
    for number in range(4):
        publish(publisher, block(block_hashes=[number]))
    batches: list[EventBatch] = []
    async with asyncio.timeout(30.0):
        while len(batches) < 3:
            batches = await events.again(1)
    assert [(one.number, one.events[0].hashes) for one in batches] == [(1, (1,)), (2, (2,)), (3, (3,))]


async def test_an_engine_that_does_not_answer_has_kept_nothing(events: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from deployments.vllm_seam import kv_events

    monkeypatch.setattr(kv_events, "_REPLAY_S", 0.05)
    assert await events.again(0) == []


def test_an_unreadable_batch_means_that_nothing_is_known() -> None:
    from deployments.vllm_seam.kv_events import _batch

    assert _batch((3).to_bytes(8, "big"), b"\x93nonsense").events == (BlocksCleared(),)


def test_other_users_cannot_read_the_events(events: Any) -> None:
    assert events._folder.stat().st_mode & 0o077 == 0
