"""The blocks that an engine reports as stored and removed, by the keys of Tandem (pure).

An engine names its blocks by hashes of its own. A report of stored blocks has their tokens and the hash of the block
before them, from which Tandem's keys follow (``router.prompt_keys``).
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from router.prompt_keys import next_key, prompt_seed, token_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksStored:
    """Consecutive blocks of one sequence have come into an engine's cache."""

    hashes: tuple[int, ...]  # the engine's names of the blocks
    parent: int | None  # name of the block before them; ``None``: they begin the sequence
    token_ids: Sequence[int]  # tokens of these blocks
    block_tokens: int
    lora: str = ""  # name of the LoRA adapter; empty: none
    salt: str = ""  # the client's ``cache_salt``; read only if they begin the sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksRemoved:
    """Blocks have left an engine's cache."""

    hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksCleared:
    """All blocks have left an engine's cache."""


BlockEvent = BlocksStored | BlocksRemoved | BlocksCleared


@dataclass(frozen=True, slots=True, kw_only=True)
class EventBatch:
    """The events of one step of an engine, in their order."""

    number: int  # number of batches before it
    at_s: float  # when the engine made it, by its clock
    events: tuple[BlockEvent, ...]


def block_seed(block_tokens: int, lora: str, salt: str) -> int:
    """The seed of the keys of an engine's blocks: prompts of other adapters, salts or block sizes share none."""
    return prompt_seed(str(block_tokens), lora, salt)


@dataclass(slots=True)
class _Block:
    key: int
    copies: int  # two prompts that are computed at the same time each have a copy of a common block


class EngineBlocks:
    """The keys of the blocks that an engine holds, by its reports in their order."""

    def __init__(self, *, block_tokens: int, max_blocks: int) -> None:
        """``max_blocks``: blocks of the engine's KV. It bounds this object if reports of removed blocks are lost."""
        self._block_tokens = block_tokens
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[int, _Block] = OrderedDict()  # by the engine's hash, the oldest first
        self.unknown_blocks = 0  # blocks stored so far without a key: the block before them is not known

    def __len__(self) -> int:
        return len(self._blocks)

    def store(self, event: BlocksStored) -> tuple[list[int], list[int]]:
        """The keys of the blocks that are new, and of blocks that are forgotten since there are more than possible."""
        if event.block_tokens != self._block_tokens:
            return [], []
        before = block_seed(event.block_tokens, event.lora, event.salt)
        if event.parent is not None:
            parent = self._blocks.get(event.parent)
            if parent is None:
                self.unknown_blocks += len(event.hashes)
                return [], []
            before = parent.key
        new, size = [], event.block_tokens
        for number, its_hash in enumerate(event.hashes):
            before = next_key(before, token_bytes(event.token_ids[number * size : (number + 1) * size]))
            block = self._blocks.get(its_hash)
            if block is not None:
                block.copies += 1
                continue
            self._blocks[its_hash] = _Block(before, 1)
            new.append(before)
        return new, self._trim()

    def remove(self, hashes: Iterable[int]) -> list[int]:
        """The keys of the blocks of which the last copy is gone; unknown hashes change nothing."""
        gone = []
        for its_hash in hashes:
            block = self._blocks.get(its_hash)
            if block is None:
                continue
            block.copies -= 1
            if not block.copies:
                gone.append(self._blocks.pop(its_hash).key)
        return gone

    def clear(self) -> None:
        """Forget all blocks."""
        self._blocks.clear()

    def _trim(self) -> list[int]:
        gone = []
        while len(self._blocks) > self._max_blocks:
            gone.append(self._blocks.popitem(last=False)[1].key)
        return gone
