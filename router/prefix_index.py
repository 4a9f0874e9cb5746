"""Estimate of the blocks in an engine's prefix cache, from the prompts that it has served (pure)."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile


class PrefixIndex:
    """Bounded index of chained block hashes; the least recently used blocks leave first.

    No engine API tells how much of a prompt is cached, since the cache is in the engine's core process. So a decode
    replica remembers the blocks that it has served. A block's key is a hash over all tokens up to its end: two prompts
    share exactly their common leading blocks, as in vLLM's own cache.
    """

    def __init__(self, *, block_tokens: int, max_blocks: int) -> None:
        """``block_tokens``: the engine's block size; ``max_blocks``: its KV capacity in blocks."""
        self.block_tokens = block_tokens
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()  # the least recently used first

    def __len__(self) -> int:
        return len(self._blocks)

    def cached_tokens(self, token_ids: Sequence[int], salt: str = "") -> int:
        """Number of leading tokens of this prompt that are probably cached: whole blocks, and never the last token.

        The engine always computes the last prompt token, since it samples the first output token from it.
        ``salt``: prompts with different salts share no blocks.
        """
        usable_blocks = max(0, len(token_ids) - 1) // self.block_tokens
        hits = list(takewhile(self._blocks.__contains__, self._keys(token_ids, salt, usable_blocks)))
        self._touch(hits)
        return len(hits) * self.block_tokens

    def add(self, token_ids: Sequence[int], salt: str = "") -> None:
        """Remember the whole blocks of a sequence whose KV this replica has computed or loaded."""
        self._touch(self._keys(token_ids, salt, len(token_ids) // self.block_tokens))
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)

    def _touch(self, keys: list[int]) -> None:
        # A prompt's last block is touched first, so that it leaves first: the blocks before it are of use without it,
        # but it is of no use without them. vLLM frees a request's blocks in this order too.
        for key in reversed(keys):
            self._blocks[key] = None
            self._blocks.move_to_end(key)

    def _keys(self, token_ids: Sequence[int], salt: str, blocks: int) -> list[int]:
        """Keys of the first ``blocks`` blocks of a sequence."""
        keys = []
        key = hash(salt)
        for start in range(0, blocks * self.block_tokens, self.block_tokens):
            key = hash((key, *token_ids[start : start + self.block_tokens]))
            keys.append(key)
        return keys
