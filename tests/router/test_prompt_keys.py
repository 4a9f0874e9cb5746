"""Keys of prompt pieces."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.prompt_keys import PromptKeys, next_key, prompt_seed, text_keys, token_bytes, token_keys

TOKENS = st.lists(st.integers(0, 3), max_size=24)


def common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Number of equal leading entries."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(a=TOKENS, b=TOKENS, piece=st.integers(1, 5))
def test_prompts_share_exactly_the_keys_of_their_common_full_pieces(a: list[int], b: list[int], piece: int) -> None:
    shared = common(tuple(a), tuple(b)) // piece
    assert common(token_keys(a, piece, 7).keys, token_keys(b, piece, 7).keys) == shared
    text_a, text_b = ("".join("ab\ud800ü"[token] for token in tokens) for tokens in (a, b))
    assert common(text_keys(text_a, piece, 1.0, 7).keys, text_keys(text_b, piece, 1.0, 7).keys) == shared


def test_a_last_piece_that_is_not_full_has_no_key() -> None:
    prompt = token_keys(range(33), 16, 0)
    assert (len(prompt.keys), prompt.piece_tokens, prompt.tokens) == (2, 16, 33)
    assert len(token_keys(range(32), 16, 0).keys) == 2
    assert token_keys((), 16, 0) == PromptKeys(keys=(), piece_tokens=16, tokens=0)


def test_text_is_worth_as_many_tokens_as_its_characters_say() -> None:
    prompt = text_keys("x" * 1000, 256, 4.0, 0)
    assert (len(prompt.keys), prompt.piece_tokens, prompt.tokens) == (3, 64.0, 250)


def test_other_models_adapters_and_salts_share_no_key() -> None:
    seeds = {prompt_seed(*names) for names in (("m", "", ""), ("m", "l", ""), ("m", "", "l"), ("ml", "", ""), ("m",))}
    assert len(seeds) == 5
    keys = [token_keys(range(8), 4, seed).keys for seed in seeds]
    assert len({key for each in keys for key in each}) == 10


def test_a_key_follows_from_the_key_before_it_and_the_piece_alone() -> None:
    first, second = token_keys(range(8), 4, 5).keys
    assert first == next_key(5, token_bytes(range(4)))
    assert second == next_key(first, token_bytes(range(4, 8)))


def test_every_process_has_the_same_keys() -> None:
    program = "from router.prompt_keys import *; print(token_keys(range(20), 4, prompt_seed('m', 'ü')).keys)"
    output = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert output.strip() == str(token_keys(range(20), 4, prompt_seed("m", "ü")).keys)


@pytest.mark.parametrize(("pieces", "tokens"), [(0, 0), (1, 16), (2, 31)])
def test_the_last_token_of_a_prompt_is_always_computed(pieces: int, tokens: int) -> None:
    assert token_keys(range(32), 16, 0).leading_tokens(pieces) == tokens
    assert PromptKeys(keys=(), piece_tokens=16, tokens=0).leading_tokens(0) == 0


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_that_is_no_32_bit_number_is_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        token_keys([token], 1, 0)
