"""Keys of the pieces of a prompt, by which routers and replicas name what an engine's cache holds (pure).

A prompt is cut into pieces of equal size; a last piece that is not full has no key. The key of a piece is a hash of the
piece and of the key before it. So two prompts have the same key at a place only if they are equal up to the end of this
piece and have the same seed. Every process computes the same keys, since the hash has no secret of the process.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

# Bytes of a key. Among 100 million keys, two are equal by chance with a probability of 0.03 % (birthday bound).
_KEY_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptKeys:
    """The keys of one prompt.

    Attributes:
        keys: one 64-bit key for each full piece, in the order of the prompt.
        piece_tokens: tokens of one piece; an estimate if the pieces are of text.
        tokens: tokens of the whole prompt; an estimate if the pieces are of text.
    """

    keys: tuple[int, ...]
    piece_tokens: float
    tokens: int

    def leading_tokens(self, pieces: int) -> int:
        """Prompt tokens that an engine need not compute if it holds the first ``pieces`` pieces.

        The last token does not count: an engine always computes it, since the first output token is sampled from it.
        """
        return max(0, min(round(pieces * self.piece_tokens), self.tokens - 1))


def prompt_seed(*names: str) -> int:
    """The seed of the keys of prompts that may share a cache: of a model, a LoRA adapter and a cache salt, by name."""
    return _hash(b"".join(len(name.encode()).to_bytes(4) + name.encode() for name in names))


def next_key(before: int, piece: bytes) -> int:
    """The key of a piece; ``before``: the key of the piece before it, or the seed."""
    return _hash(before.to_bytes(_KEY_BYTES) + piece)


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Tokens as ``next_key`` takes them: 4 bytes each. Raises OverflowError: a token id does not fit."""
    return array("I", token_ids).tobytes()


def token_keys(token_ids: Sequence[int], piece_tokens: int, seed: int) -> PromptKeys:
    """The keys of a prompt of tokens.

    Raises:
        OverflowError: a token id is below 0 or does not fit into 4 bytes.
    """
    pieces = _keys(token_bytes(token_ids), piece_tokens * 4, seed)
    return PromptKeys(keys=pieces, piece_tokens=piece_tokens, tokens=len(token_ids))


def text_keys(text: str, piece_chars: int, chars_per_token: float, seed: int) -> PromptKeys:
    """The keys of a prompt of text, cut every ``piece_chars`` characters.

    ``chars_per_token``: mean characters of a token, from which the numbers of tokens are estimated.
    """
    # Lone surrogates, which JSON allows, have no UTF-8. All characters have four bytes in UTF-32.
    pieces = _keys(text.encode("utf-32-le", "surrogatepass"), piece_chars * 4, seed)
    tokens = max(1, round(len(text) / chars_per_token))
    return PromptKeys(keys=pieces, piece_tokens=piece_chars / chars_per_token, tokens=tokens)


def _keys(prompt: bytes, piece_bytes: int, seed: int) -> tuple[int, ...]:
    keys, before = [], seed
    for end in range(piece_bytes, len(prompt) + 1, piece_bytes):
        before = next_key(before, prompt[end - piece_bytes : end])
        keys.append(before)
    return tuple(keys)


def _hash(content: bytes) -> int:
    return int.from_bytes(blake2b(content, digest_size=_KEY_BYTES).digest())
