"""Words and tokens of an emulated engine: each token of an answer is the token before it plus one (pure)."""

import zlib
from collections.abc import Sequence

_CHARS_PER_TOKEN = 4  # characters of a prompt that make one token
# The words of answers, by token.
_WORDS = (" alpha", " beta", " gamma", " delta", " epsilon", " zeta", " eta", " theta")
# Number of different tokens. It is large: no answer repeats a part of itself, and few repeat a part of another answer.
_TOKENS = 1_000_003


def next_tokens(last: int, count: int) -> list[int]:
    """The ``count`` tokens that follow token ``last``."""
    return [(last + 1 + index) % _TOKENS for index in range(count)]


def text_of(token_ids: Sequence[int]) -> str:
    """The text of tokens, one word each."""
    return "".join([_WORDS[token % len(_WORDS)] for token in token_ids])


def tokens_of(text: str) -> list[int]:
    """The tokens of a text, one for every four characters; the same text always has the same tokens."""
    pieces = (text[i : i + _CHARS_PER_TOKEN] for i in range(0, len(text), _CHARS_PER_TOKEN))
    return [zlib.crc32(piece.encode()) for piece in pieces]
