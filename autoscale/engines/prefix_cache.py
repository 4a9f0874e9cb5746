"""The prompt blocks that an engine has cached; the least recently used ones leave first (pure)."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import takewhile

# Called with the hashes that are cached from now on, in the order of their prompt, and with those that have left.
OnChange = Callable[[Sequence[int], Sequence[int]], None]


class PrefixCache:
    """Hashes of cached blocks; a hash stands for its block and all blocks before it.

    Blocks that requests hold stay; the others leave when the KV is needed, the least recently used first.

    Attributes:
        on_change: called after each change, if it is set.
        block_tokens: tokens of a block.
        shared_tokens: tokens of the blocks that several requests hold, once for each of them but the first: the KV that
            they need less than if each had its own.
    """

    def __init__(self, block_tokens: int) -> None:
        self.on_change: OnChange | None = None
        self.shared_tokens = 0
        self.block_tokens = block_tokens
        self._held: dict[int, int] = {}  # number of requests that hold each block
        self._free: OrderedDict[int, None] = (
            OrderedDict()
        )  # blocks that no request holds, the least recently used first

    def hashes(self) -> list[int]:
        """Hashes of all cached blocks: held ones, then the others, the most recently used first."""
        return [*self._held, *reversed(self._free)]

    def leading_tokens(self, block_hashes: Sequence[int]) -> int:
        """Number of cached tokens at the start of a prompt."""
        return len(list(takewhile(self._is_cached, block_hashes))) * self.block_tokens

    def leading_held_tokens(self, block_hashes: Sequence[int]) -> int:
        """Number of tokens at the start of a prompt whose blocks another request holds."""
        return len(list(takewhile(self._held.__contains__, block_hashes))) * self.block_tokens

    def hold(self, block_hashes: Sequence[int]) -> None:
        """Let one more request hold blocks, which are cached from now on, in the order of their prompt."""
        stored = [block for block in block_hashes if not self._is_cached(block)] if self.on_change is not None else []
        for block in block_hashes:
            self._free.pop(block, None)
            requests = self._held.get(block, 0)
            self._held[block] = requests + 1
            if requests:
                self.shared_tokens += self.block_tokens
        self._tell(stored, ())

    def release(self, block_hashes: Sequence[int]) -> None:
        """Let one request no longer hold blocks, which stay cached while there is room.

        The last block leaves first: without the blocks before it, it is of no use. vLLM frees blocks in this order.
        """
        for block in reversed(block_hashes):
            requests = self._held.get(block, 0)
            if requests > 1:
                self._held[block] = requests - 1
                self.shared_tokens -= self.block_tokens
            elif requests:  # otherwise all blocks have been dropped in the meantime
                del self._held[block]
                self._free[block] = None

    def shrink_to(self, tokens: float) -> None:
        """Drop the least recently used blocks that no request holds until the others of them fit into ``tokens``."""
        removed = []
        while self._free and len(self._free) * self.block_tokens > tokens:
            removed.append(self._free.popitem(last=False)[0])
        self._tell((), removed)

    def clear(self) -> None:
        """Drop all blocks."""
        removed = [*self._held, *self._free]
        self._held.clear()
        self._free.clear()
        self.shared_tokens = 0
        self._tell((), removed)

    def _is_cached(self, block: int) -> bool:
        return block in self._held or block in self._free

    def _tell(self, stored: Sequence[int], removed: Sequence[int]) -> None:
        if self.on_change is not None and (stored or removed):
            self.on_change(stored, removed)
