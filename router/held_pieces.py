"""Which pieces of prompts an engine holds, by the names that routers give them (pure).

Routers and engines cut a prompt differently: the endpoint cuts its text, a decode replica its tokens into pieces for
prefill, an engine its tokens into blocks. A replica has both cuts of each prompt that it serves. It takes a piece as
held while its engine holds the block in which, or just before which, the piece ends.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from router.prompt_keys import PromptKeys


def found_tokens(pieces: PromptKeys, *, input_tokens: int, cached_tokens: int, block_tokens: int) -> int:
    """Tokens that an engine had of a prompt, in the router's tokens, which are estimates where the pieces are of text.

    A piece counts as held from the block before its end on, so less than a block more counts as found.
    """
    return int((cached_tokens + block_tokens - 1) * pieces.tokens / max(1, input_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceChanges:
    """How the pieces that an engine holds have changed.

    Attributes:
        stored: pieces that have come, and are held.
        removed: pieces that have gone.
        coming: pieces of prompts that were accepted, and that the engine is about to compute.
    """

    stored: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()
    coming: tuple[int, ...] = ()


class HeldPieces:
    """The block of each piece, the pieces that are held, and how they have changed since they were last taken."""

    def __init__(self, *, max_pieces: int) -> None:
        """``max_pieces``: pieces whose block is remembered; the least recently named are forgotten first."""
        self._max_pieces = max_pieces
        self._blocks: OrderedDict[int, int] = OrderedDict()  # the block of each piece
        self._pieces: dict[int, set[int]] = {}  # the pieces of each block
        self._held: set[int] = set()
        # Pieces that have come or gone since the last ``take``, or that are reported again (``renew``). One that has
        # gone and come again is among them, since a router may have noticed that it was gone.
        self._changed: set[int] = set()
        self._coming: set[int] = set()  # pieces that were named and not held at that time, since the last ``take``

    def __len__(self) -> int:
        return len(self._held)

    def name(self, pieces: PromptKeys, blocks: PromptKeys, is_held: Callable[[int], bool]) -> None:
        """Learn the blocks of a prompt's pieces.

        Where the pieces are of text, tokens are taken as spread evenly over it. Ends are rounded down to whole blocks.

        Args:
            pieces: the prompt as the router cut it.
            blocks: the same prompt as the engine cuts it; ``tokens`` is exact.
            is_held: whether the engine holds a block now.
        """
        scale = blocks.tokens / (max(1, pieces.tokens) * blocks.piece_tokens)  # blocks for each token of ``pieces``
        for number, piece in enumerate(pieces.keys, start=1):
            end = min(int(number * pieces.piece_tokens * scale + 1e-9), len(blocks.keys))
            if end > 0:
                self._bind(piece, blocks.keys[end - 1], is_held)
        while len(self._blocks) > self._max_pieces:
            self._forget(next(iter(self._blocks)))

    def store(self, block: int) -> None:
        """The engine holds a block from now on."""
        for piece in self._pieces.get(block, ()):
            self._set(piece, is_held=True)

    def renew(self, block: int) -> None:
        """The engine holds a block that a router may have missed there, so its pieces are reported again."""
        self._changed.update(piece for piece in self._pieces.get(block, ()) if piece in self._held)

    def remove(self, block: int) -> None:
        """The engine holds a block no longer. Its pieces are forgotten: a prompt that needs them names them again."""
        for piece in list(self._pieces.get(block, ())):
            self._forget(piece)

    def take(self) -> PieceChanges:
        """The changes since the last call."""
        changes = PieceChanges(
            stored=tuple(piece for piece in self._changed if piece in self._held),
            removed=tuple(piece for piece in self._changed if piece not in self._held),
            coming=tuple(piece for piece in self._coming if piece not in self._held),
        )
        self._changed.clear()
        self._coming.clear()
        return changes

    def take_all(self) -> list[int]:
        """All pieces that are held; the next ``take`` gives the changes after them."""
        self._changed.clear()
        self._coming.clear()
        return list(self._held)

    def _bind(self, piece: int, block: int, is_held: Callable[[int], bool]) -> None:
        before = self._blocks.get(piece)
        # A prompt with another tail estimates another block for a piece of text. A block that is held is as good.
        if before is not None and is_held(before) and not is_held(block):
            block = before
        if before != block:
            if before is not None:
                self._unbind(piece, before)
            self._blocks[piece] = block
            self._pieces.setdefault(block, set()).add(piece)
        self._blocks.move_to_end(piece)
        self._set(piece, is_held=is_held(block))
        if piece not in self._held:
            self._coming.add(piece)

    def _unbind(self, piece: int, block: int) -> None:
        pieces = self._pieces[block]
        pieces.discard(piece)
        if not pieces:
            del self._pieces[block]

    def _forget(self, piece: int) -> None:
        self._unbind(piece, self._blocks.pop(piece))
        self._set(piece, is_held=False)

    def _set(self, piece: int, *, is_held: bool) -> None:
        if is_held == (piece in self._held):
            return
        (self._held.add if is_held else self._held.remove)(piece)
        self._changed.add(piece)
