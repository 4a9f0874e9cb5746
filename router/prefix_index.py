"""The prompt blocks in an engine's prefix cache, as its replica knows them (pure).

A block is named by its key (``router.prompt_keys``), a hash over all tokens up to its end. So two prompts share exactly
their common leading blocks, as in vLLM's own cache. The replica adds the blocks that its engine has computed or pulled
for it. If the engine reports its blocks (``router.engine_blocks``), the reports add and remove blocks too.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile

from router.prompt_keys import PromptKeys


def _nothing(key: int) -> None:
    """The default of a callback."""


class PrefixIndex:
    """Bounded index of block keys; the least recently used blocks leave first."""

    def __init__(
        self,
        *,
        max_blocks: int,
        on_store: Callable[[int], None] = _nothing,
        on_remove: Callable[[int], None] = _nothing,
    ) -> None:
        """An empty index.

        Args:
            max_blocks: the engine's KV capacity in blocks; 0 if it reuses no prefix.
            on_store: called with the key of each block that comes into the index.
            on_remove: called with the key of each block that leaves it.
        """
        self._max_blocks = max_blocks
        self._on_store, self._on_remove = on_store, on_remove
        self._blocks: OrderedDict[int, None] = OrderedDict()  # the least recently used first

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: int) -> bool:
        return key in self._blocks

    def cached_tokens(self, blocks: PromptKeys) -> int:
        """Number of leading tokens of a prompt that are cached: whole blocks, and never the last token.

        The engine always computes the last prompt token, since it samples the first output token from it.
        ``blocks``: the keys of the prompt's blocks; their ``piece_tokens`` is the engine's block size.
        """
        block_tokens = int(blocks.piece_tokens)
        usable = blocks.keys[: max(0, blocks.tokens - 1) // block_tokens]
        hits = list(takewhile(self._blocks.__contains__, usable))
        self._touch(hits)
        return len(hits) * block_tokens

    def add(self, keys: Sequence[int]) -> None:
        """Add the leading blocks of a sequence, whose KV the engine has computed or loaded."""
        # A block that comes now may push out another one of these, so the callbacks wait until all have come.
        new = [key for key in keys if key not in self._blocks]
        self._touch(keys)
        for key in new:
            self._on_store(key)
        while len(self._blocks) > self._max_blocks:
            self._on_remove(self._blocks.popitem(last=False)[0])

    def remove(self, keys: Iterable[int]) -> None:
        """Remove blocks that the engine holds no longer; unknown ones change nothing."""
        for key in keys:
            if key in self._blocks:
                del self._blocks[key]
                self._on_remove(key)

    def clear(self) -> None:
        """Remove all blocks."""
        self.remove(list(self._blocks))

    def _touch(self, keys: Sequence[int]) -> None:
        # A prompt's last block is touched first, so that it leaves first: the blocks before it are of use without it,
        # but it is of no use without them. vLLM frees a request's blocks in this order too.
        for key in reversed(keys):
            self._blocks[key] = None
            self._blocks.move_to_end(key)
