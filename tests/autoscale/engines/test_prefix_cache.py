"""The blocks that an engine model has cached."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from autoscale.engines.prefix_cache import PrefixCache


def test_the_last_blocks_of_the_least_recently_used_prompt_leave_first() -> None:
    cache = PrefixCache(10)
    for blocks in ([1, 2, 3], [7, 8]):
        cache.hold(blocks)
        cache.release(blocks)
    assert cache.hashes() == [7, 8, 1, 2, 3]
    cache.shrink_to(45)
    assert (cache.leading_tokens([1, 2, 3]), cache.leading_tokens([7, 8])) == (20, 20)
    cache.hold([1, 2])
    cache.release([1, 2])
    cache.shrink_to(20)
    assert (cache.leading_tokens([1, 2, 3]), cache.leading_tokens([7, 8])) == (20, 0)


def test_held_blocks_stay_and_those_of_several_requests_are_shared() -> None:
    cache = PrefixCache(10)
    cache.hold([1, 2, 3])
    cache.hold([1, 2])
    assert (cache.shared_tokens, cache.leading_held_tokens([1, 2, 3, 4])) == (20, 30)
    cache.release([1, 2, 3])
    assert (cache.shared_tokens, cache.leading_held_tokens([1, 2, 3]), cache.leading_tokens([1, 2, 3])) == (0, 20, 30)
    cache.shrink_to(0)
    assert cache.leading_tokens([1, 2, 3]) == 20
    cache.clear()
    cache.release([1, 2])  # held before all were dropped
    assert (cache.hashes(), cache.shared_tokens) == ([], 0)


PROMPTS = st.lists(st.integers(0, 12).map(range) | st.just((0, 1, 20, 21)), max_size=20)


@given(prompts=PROMPTS, tokens=st.integers(0, 80), requests=st.integers(1, 4))
def test_the_changes_that_a_cache_tells_of_are_its_content(
    prompts: Sequence[Sequence[int]], tokens: int, requests: int
) -> None:
    cache, known = PrefixCache(10), set[int]()

    def change(stored: Sequence[int], removed: Sequence[int]) -> None:
        assert not known & set(stored) and known >= set(removed)
        known.update(stored)
        known.difference_update(removed)

    cache.on_change = change
    for index, prompt in enumerate(prompts):
        cache.hold(prompt)
        if index >= requests:
            cache.release(prompts[index - requests])
        cache.shrink_to(tokens)
        assert known == set(cache.hashes())
        running = prompts[max(0, index + 1 - requests) : index + 1]
        assert all(cache.leading_tokens(each) == 10 * len(each) for each in running)
        assert cache.shared_tokens == 10 * (sum(map(len, running)) - len({block for each in running for block in each}))
    cache.clear()
    assert not known
