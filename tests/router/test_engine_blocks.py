"""Tandem's keys of an engine's blocks, against the keys of the whole sequences."""

from hypothesis import given
from hypothesis import strategies as st

from router.engine_blocks import BlocksStored, EngineBlocks, block_seed
from router.prompt_keys import token_keys

SIZE = 4


def stored(
    hashes: list[int], token_ids: list[int], parent: int | None = None, lora: str = "", salt: str = ""
) -> BlocksStored:
    return BlocksStored(
        hashes=tuple(hashes), parent=parent, token_ids=token_ids, block_tokens=SIZE, lora=lora, salt=salt
    )


def engine(max_blocks: int = 100) -> EngineBlocks:
    return EngineBlocks(block_tokens=SIZE, max_blocks=max_blocks)


def keys(token_ids: list[int], lora: str = "", salt: str = "") -> list[int]:
    return list(token_keys(token_ids, SIZE, block_seed(SIZE, lora, salt)).keys)


@given(st.integers(1, 6), st.integers(0, 6), st.sampled_from(["", "blue"]))
def test_blocks_of_two_reports_have_the_keys_of_the_whole_sequence(first: int, second: int, salt: str) -> None:
    ids, blocks = list(range(SIZE * (first + second))), engine()
    names = list(range(100, 100 + first + second))
    begin, _ = blocks.store(stored(names[:first], ids[: SIZE * first], salt=salt))
    end, _ = blocks.store(stored(names[first:], ids[SIZE * first :], parent=names[first - 1]))
    assert begin + end == keys(ids, salt=salt)


def test_adapters_and_salts_and_block_sizes_share_no_key() -> None:
    ids = [1, 2, 3, 4]
    made = {keys(ids)[0], keys(ids, lora="a")[0], keys(ids, salt="a")[0]}
    assert len(made) == 3
    assert token_keys(ids, 4, block_seed(4, "", "")).keys[0] not in token_keys(ids, 2, block_seed(2, "", "")).keys


def test_block_with_two_copies_is_held_until_both_are_gone() -> None:
    blocks = engine()
    assert blocks.store(stored([7], [1, 2, 3, 4])) == (keys([1, 2, 3, 4]), [])
    assert blocks.store(stored([7], [1, 2, 3, 4])) == ([], [])
    assert blocks.remove([7]) == []
    assert blocks.remove([7]) == keys([1, 2, 3, 4])
    assert blocks.remove([7]) == []


def test_blocks_after_an_unknown_one_have_no_key_and_are_counted() -> None:
    blocks = engine()
    assert blocks.store(stored([8, 9], list(range(8)), parent=7)) == ([], [])
    assert (blocks.unknown_blocks, len(blocks)) == (2, 0)


def test_blocks_of_another_size_are_left_out() -> None:
    event = BlocksStored(hashes=(1,), parent=None, token_ids=[1, 2], block_tokens=2)
    assert engine().store(event) == ([], [])


def test_if_removals_are_lost_the_oldest_blocks_go() -> None:
    blocks = engine(max_blocks=2)
    blocks.store(stored([1], [1] * SIZE))
    blocks.store(stored([2], [2] * SIZE))
    assert blocks.store(stored([3], [3] * SIZE)) == (keys([3] * SIZE), keys([1] * SIZE))
    assert len(blocks) == 2
