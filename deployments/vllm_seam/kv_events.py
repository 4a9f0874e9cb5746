"""vLLM's events about its prefix cache: how an engine is told to send them, and what they say.

vLLM publishes each step's events as one numbered batch over ZeroMQ, and keeps the last batches for those that have
missed some. The sockets are in a folder of this replica that no other user can read, since events have tokens.
"""

import asyncio
import logging
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

from router.engine_blocks import BlockEvent, BlocksCleared, BlocksRemoved, BlocksStored, EventBatch

logger = logging.getLogger(__name__)

# Batches that wait to be read, beyond which ZeroMQ drops them: vLLM's own default. They are the steps of an hour.
_MOST_WAITING = 100_000
# Longest wait for the next batch of a replay, seconds; the engine answers between two batches.
_REPLAY_S = 2.0
_DECODER = msgspec.msgpack.Decoder(KVEventBatch)


class KvEvents:
    """The events of the engine of this process.

    Needs: ``kv_events_config`` of ``AsyncEngineArgs`` with the fields below; ``KVEventBatch``, ``BlockStored``,
    ``BlockRemoved`` and ``AllBlocksCleared`` of ``vllm.distributed.kv_events``; three frames a batch (topic, number,
    content), and the replay of ``ZmqEventPublisher``, which ends with the number -1.
    Without it: no replica starts with ``router.policy: prefix``; the error names the missing part.
    """

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="tandem-kv-"))  # its user alone may enter it
        self._events, self._replay = f"ipc://{self._folder}/events", f"ipc://{self._folder}/replay"

    def engine_arguments(self) -> dict[str, Any]:
        """Arguments with which the engine sends its events here."""
        config = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self._events,
            "replay_endpoint": self._replay,
        }
        return {"kv_events_config": config}

    async def batches(self) -> AsyncIterator[EventBatch]:
        """The batches as they come; the first ones may be missing."""
        socket = zmq.asyncio.Context.instance().socket(zmq.SUB)
        try:
            socket.set_hwm(_MOST_WAITING)
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            socket.connect(self._events)
            while True:
                _, number, content = await socket.recv_multipart()
                yield _batch(number, content)
        finally:
            socket.close(linger=0)

    async def again(self, first: int) -> list[EventBatch]:
        """The batches from a number on, as far as the engine has kept them; empty if it does not answer."""
        batches: list[EventBatch] = []
        socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        try:
            socket.connect(self._replay)
            await socket.send_multipart((b"", first.to_bytes(8, "big")))
            while True:
                async with asyncio.timeout(_REPLAY_S):
                    _, _, number, content = await socket.recv_multipart()
                if int.from_bytes(number, "big", signed=True) < 0:
                    return batches
                batches.append(_batch(number, content))
        except TimeoutError:
            return []
        finally:
            socket.close(linger=0)

    def close(self) -> None:
        """Remove the sockets."""
        with suppress(OSError):
            shutil.rmtree(self._folder)


def _batch(number: bytes, content: bytes) -> EventBatch:
    events: list[BlockEvent] = []
    at_s = 0.0
    try:
        batch = _DECODER.decode(content)
        at_s = batch.ts
        for event in batch.events:
            events += _converted(event)
    except (msgspec.DecodeError, ValueError, TypeError) as error:  # what changed is unknown, so nothing is known
        logger.warning("an event of the engine cannot be read: %s", error)
        events = [BlocksCleared()]
    return EventBatch(number=int.from_bytes(number, "big"), at_s=at_s, events=tuple(events))


def _converted(event: Any) -> list[BlockEvent]:
    """An event in Tandem's terms; empty for blocks outside of the engine's own memory or of another kind of cache."""
    if isinstance(event, AllBlocksCleared):
        return [BlocksCleared()]
    if not isinstance(event, BlockStored | BlockRemoved) or event.medium not in (None, "GPU") or event.group_idx:
        return []
    if isinstance(event, BlockRemoved):
        return [BlocksRemoved(hashes=tuple(event.block_hashes))]
    salt, plain_blocks = _plain(event)
    if not plain_blocks:
        return []
    return [
        BlocksStored(
            hashes=tuple(event.block_hashes[:plain_blocks]),
            parent=event.parent_block_hash,
            token_ids=event.token_ids[: plain_blocks * event.block_size],
            block_tokens=event.block_size,
            lora=event.lora_name or "",
            salt=salt,
        )
    ]


def _plain(event: BlockStored) -> tuple[str, int]:
    """The salt, and the number of leading blocks that depend on nothing but tokens, adapter and salt.

    Other blocks depend on images or embeddings too. vLLM adds the salt to the first block of a sequence alone.
    """
    salt = ""
    for number, extra in enumerate(event.extra_keys or ()):
        keys = list(extra or ())
        if event.lora_name in keys:
            keys.remove(event.lora_name)
        if keys and number == 0 and event.parent_block_hash is None and isinstance(keys[0], str):
            salt = keys.pop(0)
        if keys:
            return salt, number
    return salt, len(event.block_hashes)
