"""Pieces of prompts that an engine holds, of tokens and of text."""

from hypothesis import given
from hypothesis import strategies as st

from router.held_pieces import HeldPieces, PieceChanges, found_tokens
from router.prompt_keys import PromptKeys


def cut(names: list[int], piece_tokens: float, tokens: int) -> PromptKeys:
    return PromptKeys(keys=tuple(names), piece_tokens=piece_tokens, tokens=tokens)


def held(pieces: HeldPieces) -> list[int]:
    return sorted(pieces.take_all())


def test_a_piece_of_tokens_is_held_with_the_block_at_its_end() -> None:
    pieces = HeldPieces(max_pieces=10)
    # 3 pieces of 8 tokens, 7 blocks of 4, of 28 tokens: the pieces end with blocks 2, 4 and 6.
    pieces.name(cut([1, 2, 3], 8, 28), cut([11, 12, 13, 14, 15, 16, 17], 4, 28), lambda block: block <= 13)
    assert held(pieces) == [1]
    pieces.store(14)
    assert held(pieces) == [1, 2]
    pieces.store(17)  # no piece ends there
    pieces.remove(12)
    assert held(pieces) == [2]


def test_a_piece_of_text_ends_where_its_share_of_the_tokens_does_rounded_down_to_a_block() -> None:
    pieces = HeldPieces(max_pieces=10)
    # The text counts as 40 tokens, and has 20. Its pieces end at tokens 5 and 10 of 20: blocks 1 and 2 of 4 tokens.
    pieces.name(cut([1, 2], 10, 40), cut([11, 12, 13, 14, 15], 4, 20), lambda block: block == 12)
    assert held(pieces) == [2]
    pieces.store(11)
    assert held(pieces) == [1, 2]


def test_a_piece_that_ends_within_the_first_block_is_never_held() -> None:
    pieces = HeldPieces(max_pieces=10)
    pieces.name(cut([1], 10, 100), cut([11, 12], 16, 32), lambda block: True)
    assert held(pieces) == []


def test_a_held_block_is_kept_for_a_piece_of_which_another_prompt_estimates_a_block_that_is_not_held() -> None:
    pieces = HeldPieces(max_pieces=10)
    pieces.name(cut([1], 8, 16), cut([11, 12, 13, 14], 4, 16), lambda block: block < 13)
    pieces.name(cut([1], 8, 20), cut([11, 12, 93, 94, 95, 96, 97], 4, 30), lambda block: block < 13)  # ends at 93
    assert held(pieces) == [1]
    pieces.remove(12)
    assert held(pieces) == []


def test_changes_are_those_since_the_last_ones() -> None:
    pieces = HeldPieces(max_pieces=10)
    pieces.name(cut([1, 2], 4, 8), cut([11, 12], 4, 8), lambda block: False)
    assert pieces.take() == PieceChanges(coming=(1, 2))
    pieces.store(11)
    assert pieces.take() == PieceChanges(stored=(1,))
    pieces.store(12)
    pieces.remove(11)
    assert pieces.take() == PieceChanges(stored=(2,), removed=(1,))
    assert pieces.take() == PieceChanges()


def test_pieces_that_are_held_by_the_next_report_are_not_coming_any_more() -> None:
    pieces = HeldPieces(max_pieces=10)
    pieces.name(cut([1, 2], 4, 8), cut([11, 12], 4, 8), lambda block: False)
    pieces.store(11)
    assert pieces.take() == PieceChanges(stored=(1,), coming=(2,))


def test_a_piece_that_went_and_came_again_is_reported_again() -> None:
    pieces = HeldPieces(max_pieces=10)
    prompt, blocks = cut([1], 4, 4), cut([11], 4, 4)
    pieces.name(prompt, blocks, lambda block: True)
    pieces.take()
    pieces.remove(11)
    pieces.name(prompt, blocks, lambda block: True)
    assert pieces.take() == PieceChanges(stored=(1,))


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=40), st.integers(1, 6))
def test_no_more_pieces_are_remembered_than_the_bound(steps: list[tuple[int, bool]], bound: int) -> None:
    pieces = HeldPieces(max_pieces=bound)
    told: set[int] = set()  # what a router knows that gets all changes
    for number, is_held in steps:
        pieces.name(cut([number, 100 + number], 4, 8), cut([number, 50 + number], 4, 8), lambda _, held=is_held: held)
        if number % 3 == 0:
            pieces.remove(number)
        changes = pieces.take()
        told = (told - set(changes.removed)) | set(changes.stored)
        assert len(pieces) <= bound
        assert told == set(pieces.take_all())


def test_found_tokens_are_in_the_units_of_the_router() -> None:
    text = cut([1, 2, 3], 128, 400)
    # 100 of 200 tokens, with blocks of 1: half of the 400 tokens that the text counts as.
    assert found_tokens(text, input_tokens=200, cached_tokens=100, block_tokens=1) == 200
    # Almost a block more counts too, since a piece may end within the next block.
    assert found_tokens(text, input_tokens=400, cached_tokens=96, block_tokens=32) == 127
