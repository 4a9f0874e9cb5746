"""The pieces of a request's prompt, by which routers find the replica that has computed its beginning before.

The endpoint has no tokeniser. It cuts the text that a chat template would write, or the token ids of a completion. The
decode replica tokenises, and knows where each piece ends (``router.held_pieces``).
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from deployments.wire.prompt_ids import chat_prompt_ids
from router.prompt_keys import PromptKeys, prompt_seed, text_keys, token_keys

# Characters of a token: usual for English text. A piece has that many for each of its tokens, so that all endpoints cut
# alike. If a model has more or fewer, its pieces have fewer or more tokens.
CHARS_PER_TOKEN = 4
# Beginning of a prompt that is cut, tokens. It bounds the work: a chat of this length takes 16 ms, token ids take 30 ms
# (CPU time, one core). A chat of 2,000 tokens takes 0.07 ms.
_MOST_TOKENS = 1 << 18
_MOST_CHARS = _MOST_TOKENS * CHARS_PER_TOKEN
# Fields that a chat template writes before the messages, and fields that change what it writes.
_HEAD = ("tools", "documents")
_TEMPLATE = ("chat_template", "chat_template_kwargs", "reasoning_effort")
_END = "\x1f"  # end of a field, so that two fields are not taken for one


def prompt_pieces(
    endpoint: str,
    body: dict[str, Any],
    *,
    model: str,
    tokens: int,
    piece_tokens: int,
    chars_per_token: float = CHARS_PER_TOKEN,
) -> PromptKeys | None:
    """The pieces of the prompt of a request to ``endpoint`` (``chat`` or ``completions``).

    ``None``: the request has several prompts, or parts that are no text, so the places of its pieces are unknown.

    Args:
        endpoint: the route.
        body: the request's fields; their bounds have been checked (``json_body``).
        model: the model's id. Prompts of other models or other cache salts have other keys.
        tokens: estimate of the prompt's tokens, for one that is longer than what is cut.
        piece_tokens: tokens in a piece.
        chars_per_token: mean characters of the model's tokens, for the estimate of a text's tokens.
    """
    salt = body.get("cache_salt")
    names = [model, salt if isinstance(salt, str) else ""]
    if (ids := chat_prompt_ids(endpoint, body)) is not None:
        return _token_pieces(ids, piece_tokens, prompt_seed(*names)) if isinstance(ids, list) else None
    if endpoint == "chat":
        seed = prompt_seed(*names, *(_dumped(body.get(name)) for name in _TEMPLATE))
        text = _beginning(_chat_texts(body))
    else:
        prompt, seed = body.get("prompt"), prompt_seed(*names)
        if isinstance(prompt, list):
            return _token_pieces(prompt, piece_tokens, seed)
        text = prompt[:_MOST_CHARS] if isinstance(prompt, str) else None
    if text is None:
        return None
    pieces = text_keys(text, piece_tokens * CHARS_PER_TOKEN, chars_per_token, seed)
    return pieces if len(text) < _MOST_CHARS else replace(pieces, tokens=max(tokens, pieces.tokens))


def _token_pieces(ids: list[Any], piece_tokens: int, seed: int) -> PromptKeys | None:
    if not all(type(one) is int for one in islice(ids, _MOST_TOKENS)):
        return None
    try:
        pieces = token_keys(ids[:_MOST_TOKENS], piece_tokens, seed)
    except OverflowError:  # decode refuses such a token
        return None
    return replace(pieces, tokens=len(ids))


def _beginning(texts: Iterator[str | None]) -> str | None:
    """The texts as one, up to the bound; ``None``: one of them is no text."""
    parts, chars = [], 0
    for text in texts:
        if text is None:
            return None
        parts.append(text)
        chars += len(text) + 1
        if chars > _MOST_CHARS:
            break
    return _END.join(parts)[:_MOST_CHARS]


def _chat_texts(body: dict[str, Any]) -> Iterator[str | None]:
    """The texts of a chat in the order in which a template writes them; ``None`` stands for what is no text."""
    for name in _HEAD:
        yield _dumped(body.get(name))
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if not isinstance(message, dict):
            yield None
            return
        yield str(message.get("role"))
        content = message.get("content")
        for part in content if isinstance(content, list) else (content,):
            yield _part_text(part)
        yield from (_dumped(message[name]) for name in sorted(message.keys() - {"role", "content"}))


def _part_text(part: Any) -> str | None:
    if isinstance(part, dict):
        part = part.get("text") if part.get("type") == "text" else 0
    if part is None or isinstance(part, str):
        return part or ""
    return None


def _dumped(value: Any) -> str:
    """A field as text; empty if it is absent."""
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, separators=(",", ":"))
