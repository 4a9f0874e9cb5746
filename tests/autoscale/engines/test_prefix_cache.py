"""The blocks that an engine model has cached."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from autoscale.engines.prefix_cache import PrefixCache


def test_the_last_blocks_of_the_least_recently_used_prompt_leave_first() -> None:
    cache = PrefixCache(10)
    cache.remember([1, 2, 3])
    cache.remember([7, 8])
    assert cache.hashes() == [7, 8, 1, 2, 3]
    cache.shrink_to(45)
    assert (cache.leading_tokens([1, 2, 3]), cache.leading_tokens([7, 8])) == (20, 20)
    assert cache.use([1, 2, 3]) == 20
    cache.shrink_to(20)
    assert (cache.leading_tokens([1, 2, 3]), cache.leading_tokens([7, 8])) == (20, 0)


PROMPTS = st.lists(st.integers(0, 12).map(lambda length: [*range(length)]) | st.just([0, 1, 20, 21]), max_size=20)


@given(prompts=PROMPTS, tokens=st.integers(0, 80))
def test_the_changes_that_a_cache_tells_of_are_its_content(prompts: Sequence[Sequence[int]], tokens: int) -> None:
    cache, held = PrefixCache(10), set[int]()

    def change(stored: Sequence[int], removed: Sequence[int]) -> None:
        assert not held & set(stored) and held >= set(removed)
        held.update(stored)
        held.difference_update(removed)

    cache.on_change = change
    for prompt in prompts:
        cache.remember(prompt)
        cache.shrink_to(tokens)
        assert held == set(cache.hashes())
    cache.clear()
    assert not held
