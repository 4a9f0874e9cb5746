"""Which replicas hold which pieces, as one router knows it."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.prefix_map import PrefixMap
from router.prompt_keys import PromptKeys


def prompt(*keys: int, tokens: int | None = None) -> PromptKeys:
    """A prompt of pieces of 10 tokens; by default it has 5 tokens more than its full pieces."""
    return PromptKeys(keys=keys, piece_tokens=10, tokens=10 * len(keys) + 5 if tokens is None else tokens)


def prefixes(capacity_pieces: int = 100, sent_s: float = 5.0) -> PrefixMap:
    return PrefixMap(capacity_pieces=capacity_pieces, sent_s=sent_s)


def overlap_of(known: PrefixMap, name: str, prompt: PromptKeys) -> int:
    """Leading tokens of a prompt that one replica holds."""
    return known.overlap_tokens(prompt).get(name, 0)


def test_the_overlap_is_the_leading_pieces_that_a_replica_holds() -> None:
    known = prefixes()
    known.store("a", [1, 2, 3])
    known.store("b", [1])
    known.store("c", [2, 3])  # without the first piece the others are of no use
    known.store("d", [1, 3])
    assert known.overlap_tokens(prompt(1, 2, 3, 4)) == {"a": 30, "b": 10, "d": 10}
    assert known.overlap_tokens(prompt(1, 2, 3, tokens=30)) == {"a": 29, "b": 10, "d": 10}
    assert known.overlap_tokens(prompt(9)) == known.overlap_tokens(prompt()) == {}


def test_what_a_replica_removed_or_cleared_is_forgotten() -> None:
    known = prefixes()
    for name in "ab":
        known.store(name, [1, 2, 3])
    known.remove("a", [2, 2, 99])
    known.remove("unknown", [1])
    assert known.overlap_tokens(prompt(1, 2, 3)) == {"a": 10, "b": 30}
    known.clear("b")
    known.clear("b")
    assert known.overlap_tokens(prompt(1, 2, 3)) == {"a": 10}
    known.store("c", [1])  # takes b's place
    assert known.overlap_tokens(prompt(1, 2, 3)) == {"a": 10, "c": 10}


def test_what_was_sent_counts_at_once_and_only_for_its_time_unless_it_is_reported() -> None:
    known = prefixes(sent_s=5.0)
    known.sent("a", prompt(1, 2, 3), 10.0)
    assert known.overlap_tokens(prompt(1, 2, 3)) == {"a": 30}
    known.store("a", [1])
    known.sent("a", prompt(1, 2), 12.0)
    known.expire(14.9)
    assert overlap_of(known, "a", prompt(1, 2, 3)) == 30
    known.expire(15.0)
    assert overlap_of(known, "a", prompt(1, 2, 3)) == 20
    known.expire(17.0)
    assert overlap_of(known, "a", prompt(1, 2, 3)) == 10
    assert known.pieces("a") == 1


def test_a_replica_that_is_cleared_is_not_hurt_by_the_end_of_what_was_sent_before() -> None:
    known = prefixes(sent_s=5.0)
    known.sent("a", prompt(1), 0.0)
    known.clear("a")
    known.sent("a", prompt(1), 3.0)
    known.expire(5.0)
    assert overlap_of(known, "a", prompt(1)) == 10


@pytest.mark.parametrize("is_reported", [True, False])
def test_beyond_its_capacity_a_replicas_least_recently_used_pieces_leave_the_last_first(is_reported: bool) -> None:
    known = prefixes(capacity_pieces=4)

    def hold(*keys: int) -> None:
        if is_reported:
            known.store("a", keys)
        else:
            known.sent("a", prompt(*keys), 0.0)

    hold(1, 2, 3)
    hold(7, 8)
    assert known.overlap_tokens(prompt(1, 2, 3)) == {"a": 20}
    known.sent("a", prompt(1, 2), 0.0)  # used again
    hold(5, 6)
    assert [overlap_of(known, "a", prompt(*keys)) for keys in ((1, 2), (7, 8), (5, 6))] == [20, 0, 20]
    known.set_capacity("a", 1)
    assert overlap_of(known, "a", prompt(5, 6)) == 10
    hold(1, 2, 3)
    assert overlap_of(known, "a", prompt(1, 2, 3)) == 10
    known.store("b", [1, 2, 3])
    assert known.pieces("b") == 3


def test_pieces_that_an_engine_did_not_have_are_forgotten_and_counted() -> None:
    known = prefixes()
    known.store("a", [1, 2, 3, 4])
    known.store("b", [1, 2, 3, 4])
    known.found("a", prompt(1, 2, 3, 4), expected_tokens=40, found_tokens=20)
    assert known.overlap_tokens(prompt(1, 2, 3, 4)) == {"a": 20, "b": 40}
    known.found("b", prompt(1, 2, 3, 4), expected_tokens=40, found_tokens=60)  # more than expected is no fault
    known.found("b", prompt(1, 2, 3, 4), expected_tokens=40, found_tokens=31)  # less than a piece is none either
    assert overlap_of(known, "b", prompt(1, 2, 3, 4)) == 40
    assert (known.false_hits, known.expected_tokens, known.found_tokens) == (1, 120, 91)


KEYS = st.lists(st.integers(0, 9), max_size=5, unique=True)


class Maps(RuleBasedStateMachine):
    """A map beside plain sets, with room for everything."""

    def __init__(self) -> None:
        super().__init__()
        self.known = prefixes(capacity_pieces=1000, sent_s=5.0)
        self.reported: dict[str, set[int]] = {}
        self.sent: dict[str, dict[int, float]] = {}
        self.now_s = 0.0

    @rule(name=st.sampled_from("abc"), keys=KEYS)
    def store(self, name: str, keys: list[int]) -> None:
        self.known.store(name, keys)
        self.reported.setdefault(name, set()).update(keys)
        for key in keys:
            self.sent.get(name, {}).pop(key, None)

    @rule(name=st.sampled_from("abc"), keys=KEYS)
    def remove(self, name: str, keys: list[int]) -> None:
        self.known.remove(name, keys)
        self.reported.get(name, set()).difference_update(keys)
        for key in keys:
            self.sent.get(name, {}).pop(key, None)

    @rule(name=st.sampled_from("abc"))
    def clear(self, name: str) -> None:
        self.known.clear(name)
        self.reported.pop(name, None)
        self.sent.pop(name, None)

    @rule(name=st.sampled_from("abc"), keys=KEYS, passed_s=st.sampled_from([0.0, 1.0, 4.0]))
    def send(self, name: str, keys: Sequence[int], passed_s: float) -> None:
        self.now_s += passed_s
        self.known.sent(name, prompt(*keys), self.now_s)
        new = set(keys) - self.reported.get(name, set())
        self.sent.setdefault(name, {}).update(dict.fromkeys(new, self.now_s + 5.0))

    @invariant()
    def overlaps_are_those_of_the_sets(self) -> None:
        self.known.expire(self.now_s)
        for keys in ((0, 1, 2), (3, 4), (0, 5)):
            for name in "abc":
                held = 0
                while held < len(keys) and self.holds(name, keys[held]):
                    held += 1
                assert self.known.overlap_tokens(prompt(*keys)).get(name, 0) == 10 * held

    def holds(self, name: str, key: int) -> bool:
        return key in self.reported.get(name, set()) or self.sent.get(name, {}).get(key, 0.0) > self.now_s


TestMaps = Maps.TestCase


@given(st.lists(st.tuples(st.sampled_from("ab"), KEYS, st.booleans()), max_size=30))
def test_no_replica_has_more_than_its_capacity_and_nothing_remains_after_all_are_cleared(
    steps: list[tuple[str, list[int], bool]],
) -> None:
    known = prefixes(capacity_pieces=6)
    for now_s, (name, keys, is_sent) in enumerate(steps):
        if is_sent:
            known.sent(name, prompt(*keys), float(now_s))
        else:
            known.store(name, keys)
        assert known.pieces(name) <= 6
    for name in "ab":
        known.clear(name)
    assert not known._holders and not known._replicas
