"""The index of prompt blocks, against a brute-force oracle."""

from hypothesis import given
from hypothesis import strategies as st

from router.prefix_index import PrefixIndex
from router.prompt_keys import PromptKeys, prompt_seed, token_keys

# Few distinct tokens, so that prompts share prefixes often.
SEQUENCES = st.lists(st.integers(0, 1), max_size=24)
SALTS = st.sampled_from(["", "a", "b"])
UNBOUNDED_BLOCKS = 10_000


class Index:
    """A ``PrefixIndex`` for sequences of tokens, and the blocks that its callbacks have told."""

    def __init__(self, *, block_tokens: int, max_blocks: int) -> None:
        self.told: set[int] = set()
        self.blocks = PrefixIndex(max_blocks=max_blocks, on_store=self.told.add, on_remove=self.told.remove)
        self._block_tokens = block_tokens

    def __len__(self) -> int:
        return len(self.blocks)

    def keys(self, token_ids: list[int], salt: str = "") -> PromptKeys:
        return token_keys(token_ids, self._block_tokens, prompt_seed(salt))

    def add(self, token_ids: list[int], salt: str = "") -> None:
        self.blocks.add(self.keys(token_ids, salt).keys)

    def cached_tokens(self, token_ids: list[int], salt: str = "") -> int:
        return self.blocks.cached_tokens(self.keys(token_ids, salt))


def common_blocks(left: list[int], right: list[int], block_tokens: int) -> int:
    """Whole leading blocks that two sequences share."""
    blocks = 0
    while True:
        end = (blocks + 1) * block_tokens
        if end > min(len(left), len(right)) or left[:end] != right[:end]:
            return blocks
        blocks += 1


@given(st.lists(st.tuples(SEQUENCES, SALTS), max_size=8), SEQUENCES, SALTS, st.integers(1, 4))
def test_hits_are_the_longest_common_prefix_in_whole_blocks(
    served: list[tuple[list[int], str]], prompt: list[int], salt: str, block_tokens: int
) -> None:
    index = Index(block_tokens=block_tokens, max_blocks=UNBOUNDED_BLOCKS)
    for sequence, its_salt in served:
        index.add(sequence, its_salt)
    # Never the last token: the engine computes it to have something to sample from.
    matches = [common_blocks(sequence, prompt[:-1], block_tokens) for sequence, of in served if of == salt]
    assert index.cached_tokens(prompt, salt) == block_tokens * max(matches, default=0)


@given(st.lists(SEQUENCES, max_size=12), st.integers(1, 4), st.integers(0, 6))
def test_index_never_holds_more_than_its_bound(served: list[list[int]], block_tokens: int, max_blocks: int) -> None:
    index = Index(block_tokens=block_tokens, max_blocks=max_blocks)
    for sequence in served:
        index.add(sequence)
        assert len(index) <= max_blocks


@given(st.lists(SEQUENCES, max_size=6), SEQUENCES, st.integers(1, 4))
def test_latest_sequence_is_whole_if_it_fits(before: list[list[int]], sequence: list[int], block_tokens: int) -> None:
    blocks = len(sequence) // block_tokens
    index = Index(block_tokens=block_tokens, max_blocks=blocks)
    for other in before:
        index.add(other)
    index.add(sequence)
    assert index.cached_tokens([*sequence, 0]) == blocks * block_tokens


@given(st.lists(SEQUENCES, max_size=6), SEQUENCES)
def test_asking_changes_no_answer(served: list[list[int]], prompt: list[int]) -> None:
    index = Index(block_tokens=2, max_blocks=UNBOUNDED_BLOCKS)
    for sequence in served:
        index.add(sequence)
    held = len(index)
    assert index.cached_tokens(prompt) == index.cached_tokens(prompt)
    assert len(index) == held


def test_salt_separates_equal_prompts() -> None:
    index = Index(block_tokens=2, max_blocks=8)
    index.add([1, 2, 3, 4], "tenant-a")
    assert index.cached_tokens([1, 2, 3, 4, 5], "tenant-a") == 4
    assert index.cached_tokens([1, 2, 3, 4, 5], "tenant-b") == 0
    assert index.cached_tokens([1, 2, 3, 4, 5]) == 0


def test_equal_blocks_after_different_prefixes_are_different() -> None:
    index = Index(block_tokens=2, max_blocks=8)
    index.add([1, 1, 7, 7])
    assert index.cached_tokens([7, 7, 0]) == 0
    assert index.cached_tokens([2, 2, 7, 7, 0]) == 0


def test_least_recently_used_prompt_goes_first() -> None:
    index = Index(block_tokens=2, max_blocks=2)
    index.add([1, 1])
    index.add([2, 2])
    assert index.cached_tokens([1, 1, 0]) == 2  # asked for, so in use
    index.add([3, 3])
    assert index.cached_tokens([1, 1, 0]) == 2
    assert index.cached_tokens([2, 2, 0]) == 0
    index.add([1, 1])  # served again, so in use
    index.add([4, 4])
    assert index.cached_tokens([1, 1, 0]) == 2
    assert index.cached_tokens([3, 3, 0]) == 0


def test_eviction_takes_a_prompt_from_its_tail() -> None:
    index = Index(block_tokens=2, max_blocks=4)
    index.add([1, 1, 2, 2, 3, 3])
    index.add([7, 7, 8, 8])
    # One block of the first prompt had to go: with its last block gone, two are still usable.
    assert index.cached_tokens([1, 1, 2, 2, 3, 3, 0]) == 4


@given(st.lists(SEQUENCES, max_size=12), st.lists(SEQUENCES, max_size=6), st.integers(0, 6))
def test_callbacks_tell_what_is_in_the_index(served: list[list[int]], gone: list[list[int]], max_blocks: int) -> None:
    index = Index(block_tokens=2, max_blocks=max_blocks)
    for sequence in served:
        index.add(sequence)
    for sequence in gone:
        index.blocks.remove(index.keys(sequence).keys)
    assert len(index) == len(index.told)
    assert all(key in index.blocks for key in index.told)
    index.blocks.clear()
    assert index.told == set()


def test_a_removed_block_ends_the_prefix() -> None:
    index = Index(block_tokens=2, max_blocks=8)
    index.add([1, 1, 2, 2, 3, 3])
    index.blocks.remove(index.keys([1, 1, 2, 2]).keys[1:])
    assert index.cached_tokens([1, 1, 2, 2, 3, 3, 0]) == 2
