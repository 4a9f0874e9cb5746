"""The prefix cache of this replica's engine: one index, which its answers and its engine's events keep true.

Where routing depends on prefixes, the routers' pieces of each prompt are bound to the engine's blocks, and the replica
reports which pieces it holds.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Protocol

from deployments.metrics import CACHE_EVENTS_LOST
from router.batch_order import BatchOrder, Turn
from router.engine_blocks import BlocksCleared, BlocksStored, EngineBlocks, EventBatch, block_seed
from router.held_pieces import HeldPieces
from router.prefix_index import PrefixIndex
from router.prompt_keys import PromptKeys, token_keys
from router.ray_prefix import PrefixReporter

logger = logging.getLogger(__name__)


class Events(Protocol):
    """The events of an engine (``vllm_seam.kv_events.KvEvents``)."""

    def batches(self) -> Any:
        """The batches as they come."""

    async def again(self, first: int) -> list[EventBatch]:
        """The batches from a number on, as far as the engine has kept them."""


class CacheWatch:
    """What the engine of one replica has cached."""

    def __init__(self, *, block_tokens: int, max_blocks: int, piece_tokens: int) -> None:
        """An empty cache.

        Args:
            block_tokens: the engine's block size.
            max_blocks: blocks of its KV; 0 if it reuses no prefix.
            piece_tokens: tokens in a router's piece of a prompt (``PrefixConfig.piece_tokens``).
        """
        self.block_tokens = block_tokens
        # Twice the pieces of tokens that the KV holds: a piece of text may have fewer tokens than a piece of tokens.
        self.capacity_pieces = 2 * max_blocks * block_tokens // piece_tokens
        self.pieces = HeldPieces(max_pieces=self.capacity_pieces)
        self.index = PrefixIndex(max_blocks=max_blocks, on_store=self.pieces.store, on_remove=self.pieces.remove)
        self._engine = EngineBlocks(block_tokens=block_tokens, max_blocks=max_blocks)
        self._order = BatchOrder()
        self._tasks: list[asyncio.Task[None]] = []  # kept, since the loop itself has only weak references

    def blocks(self, token_ids: Sequence[int], *, lora: str = "", salt: str = "") -> PromptKeys:
        """The keys of a prompt's blocks; ``lora``: name of its adapter."""
        return token_keys(token_ids, self.block_tokens, block_seed(self.block_tokens, lora, salt))

    def name(self, pieces: PromptKeys, blocks: PromptKeys) -> None:
        """Learn where a router's pieces of a prompt end."""
        if self.capacity_pieces:  # otherwise the engine reuses no prefix, and routers must not count on one
            self.pieces.name(pieces, blocks, self.index.__contains__)

    def computed(self, blocks: PromptKeys, cached_tokens: int | None) -> None:
        """The engine holds all blocks of a prompt now, and held ``cached_tokens`` of it before; ``None``: not known.

        A router that expected more has forgotten the pieces that were missing, so they are reported again. The engine
        may have reported its new blocks before its answer. So they are not removed here.
        """
        self.index.add(blocks.keys)
        if cached_tokens is not None:
            usable = blocks.keys[: max(0, blocks.tokens - 1) // self.block_tokens]
            for block in usable[cached_tokens // self.block_tokens :]:
                self.pieces.renew(block)

    def answered(self, blocks: PromptKeys, token_ids: Sequence[int], *, lora: str = "", salt: str = "") -> None:
        """The engine holds a prompt and its answer; ``blocks``: of the prompt, ``token_ids``: of both together."""
        # The keys go on from the last one, so the prompt is not hashed again.
        before = blocks.keys[-1] if blocks.keys else block_seed(self.block_tokens, lora, salt)
        rest = token_ids[len(blocks.keys) * self.block_tokens :]
        self.index.add([*blocks.keys, *token_keys(rest, self.block_tokens, before).keys])

    def change(self, stored: Sequence[int], removed: Sequence[int]) -> None:
        """Blocks have come into the engine's cache, in the order of their prompt, and others have left it."""
        self.index.add(stored)
        self.index.remove(removed)

    def start(self, events: Events | None, *, app: str, pool: str, replica_id: str) -> None:
        """Begin to follow the engine and to report; ``events``: ``None`` if the engine has none."""
        reporter = PrefixReporter(app, pool, replica_id, self.pieces, capacity_pieces=self.capacity_pieces)
        self._tasks = [asyncio.create_task(reporter.run())]
        if events is not None:
            self._tasks.append(asyncio.create_task(self.follow(events)))

    async def follow(self, events: Events) -> None:
        """Apply the engine's events. An error ends this; then the index has only what the replica itself added."""
        try:
            async for batch in events.batches():
                await self._take(batch, events)
        except Exception:
            logger.exception("the engine's cache is not followed any more")

    async def _take(self, batch: EventBatch, events: Events) -> None:
        turn = self._order.turn(batch.number, batch.at_s)
        if turn is not Turn.NEXT:
            CACHE_EVENTS_LOST.labels(turn).inc()
        if turn is Turn.RESTART:
            self._clear()
            self._order = BatchOrder()
        if self._order.turn(batch.number, batch.at_s) is Turn.GAP:
            await self._fill(events)
        turn = self._order.turn(batch.number, batch.at_s)
        if turn is Turn.LATE:  # it came before, or with the missing ones
            return
        if turn is Turn.GAP:  # what is missing cannot be had any more
            self._clear()
        self._apply(batch)

    async def _fill(self, events: Events) -> None:
        """Apply the missing batches that the engine has kept, if none of them is missing."""
        for batch in await events.again(self._order.expected):
            if self._order.turn(batch.number, batch.at_s) is not Turn.NEXT:
                return
            self._apply(batch)

    def _apply(self, batch: EventBatch) -> None:
        for event in batch.events:
            if isinstance(event, BlocksStored):
                self.change(*self._engine.store(event))
            elif isinstance(event, BlocksCleared):
                self._clear()
            else:
                self.index.remove(self._engine.remove(event.hashes))
        self._order.accept(batch.number, batch.at_s)

    def _clear(self) -> None:
        self._engine.clear()
        self.index.clear()


def piece_keys(token_ids: Sequence[int], piece_tokens: int, *, lora: str = "", salt: str = "") -> PromptKeys:
    """The pieces of a prompt of tokens, as a decode replica names them for the routing of its prefill."""
    return token_keys(token_ids, piece_tokens, block_seed(piece_tokens, lora, salt))
