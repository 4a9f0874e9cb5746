"""The prompt blocks that an engine has cached; the least recently used ones leave first (pure)."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile


class PrefixCache:
    """Hashes of cached blocks; a hash stands for its block and all blocks before it."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def leading_tokens(self, block_hashes: Sequence[int]) -> int:
        """Number of cached tokens at the start of a prompt; their blocks do not count as used now."""
        return len(list(takewhile(self._blocks.__contains__, block_hashes))) * self._block_tokens

    def use(self, block_hashes: Sequence[int]) -> int:
        """Number of cached tokens at the start of a prompt; their blocks count as used now."""
        tokens = self.leading_tokens(block_hashes)
        self.remember(block_hashes[: tokens // self._block_tokens])
        return tokens

    def remember(self, block_hashes: Sequence[int]) -> None:
        """Add the blocks of a prompt; they count as used now."""
        for block in block_hashes:
            self._blocks[block] = None
            self._blocks.move_to_end(block)

    def shrink_to(self, tokens: float) -> None:
        """Drop the least recently used blocks until the others fit into ``tokens``."""
        while self._blocks and len(self._blocks) * self._block_tokens > tokens:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        """Drop all blocks."""
        self._blocks.clear()
