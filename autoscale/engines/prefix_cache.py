"""The prompt blocks that an engine has cached; the least recently used ones leave first (pure)."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import takewhile

# Called with the hashes that are cached from now on, in the order of their prompt, and with those that have left.
OnChange = Callable[[Sequence[int], Sequence[int]], None]


class PrefixCache:
    """Hashes of cached blocks; a hash stands for its block and all blocks before it.

    ``on_change``: called after each change, if it is set.
    """

    def __init__(self, block_tokens: int) -> None:
        self.on_change: OnChange | None = None
        self._block_tokens = block_tokens
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def hashes(self) -> list[int]:
        """Hashes of all cached blocks, the most recently used first."""
        return list(reversed(self._blocks))

    def leading_tokens(self, block_hashes: Sequence[int]) -> int:
        """Number of cached tokens at the start of a prompt; their blocks do not count as used now."""
        return len(list(takewhile(self._blocks.__contains__, block_hashes))) * self._block_tokens

    def use(self, block_hashes: Sequence[int]) -> int:
        """Number of cached tokens at the start of a prompt; their blocks count as used now."""
        tokens = self.leading_tokens(block_hashes)
        self.remember(block_hashes[: tokens // self._block_tokens])
        return tokens

    def remember(self, block_hashes: Sequence[int]) -> None:
        """Add the blocks of a prompt; they count as used now, the last one before the first.

        So the last block leaves first: without the blocks before it, it is of no use. vLLM frees blocks in this order.
        """
        stored = [block for block in block_hashes if block not in self._blocks] if self.on_change is not None else []
        for block in reversed(block_hashes):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        self._tell(stored, ())

    def shrink_to(self, tokens: float) -> None:
        """Drop the least recently used blocks until the others fit into ``tokens``."""
        removed = []
        while self._blocks and len(self._blocks) * self._block_tokens > tokens:
            removed.append(self._blocks.popitem(last=False)[0])
        self._tell((), removed)

    def clear(self) -> None:
        """Drop all blocks."""
        removed = list(self._blocks)
        self._blocks.clear()
        self._tell((), removed)

    def _tell(self, stored: Sequence[int], removed: Sequence[int]) -> None:
        if self.on_change is not None and (stored or removed):
            self.on_change(stored, removed)
