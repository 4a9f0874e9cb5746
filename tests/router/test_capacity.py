"""How the capacity of engines is learned."""

import pytest

from router.capacity import Capacity


def test_a_rate_at_which_no_request_was_held_back_can_raise_the_capacity_but_not_lower_it() -> None:
    capacity = Capacity(None, 0.0)
    capacity.set_busy(1.0, 0.0)
    for second in range(1, 40):
        capacity.count_prompt(1000)
        capacity.learn(float(second))
    assert capacity.prompt_tokens_per_s == pytest.approx(1000.0)
    for second in range(40, 80):
        capacity.count_prompt(10)
        capacity.note_idle()
        capacity.learn(float(second))
    assert capacity.prompt_tokens_per_s == pytest.approx(1000.0)
    capacity.count_prompt(3000)
    capacity.note_idle()
    capacity.learn(80.0)
    assert capacity.prompt_tokens_per_s == pytest.approx(1600.0)
    for second in range(81, 120):
        capacity.count_prompt(500)
        capacity.learn(float(second))  # a request waited, so this rate is the capacity
    assert capacity.prompt_tokens_per_s == pytest.approx(500.0, rel=0.01)


@pytest.mark.parametrize(("tokens", "is_too_slow"), [(100, False), (10, True)])
def test_answers_in_one_piece_are_judged_at_their_end(tokens: int, is_too_slow: bool) -> None:
    capacity = Capacity(0.05, 0.0)
    capacity.change_answers(11, 0.0)
    capacity.change_observed(1, 0.0)
    first = capacity.mark(0.0)
    for tenth in range(1, 31):
        capacity.count_output(4)  # the stream's: 40 tokens/s
        capacity.learn(0.1 * tenth)
    assert capacity.most_answers is None
    for _ in range(10):
        capacity.count_whole(tokens, 1, first, 3.0)
        capacity.change_answers(-1, 3.0)
    capacity.learn(4.1)
    assert (capacity.most_answers is not None) == is_too_slow


def test_no_round_raises_the_rate_to_more_than_its_double() -> None:
    """Prompts that need not be computed pass as fast as they arrive."""
    capacity = Capacity(None, 0.0)
    capacity.set_busy(1.0, 0.0)
    capacity.count_prompt(1000)
    capacity.learn(1.0)
    capacity.count_prompt(8_000_000)
    capacity.note_idle()
    capacity.learn(2.0)
    assert capacity.prompt_tokens_per_s == 2000.0


def test_the_rate_while_engines_had_work_is_their_capacity() -> None:
    capacity = Capacity(None, 0.0)
    for second in range(60):
        capacity.set_busy(0.5, float(second))  # one prefill replica of two, for half a second
        capacity.count_prompt(1000)
        capacity.set_busy(0.0, second + 0.5)
        capacity.note_idle()
        capacity.learn(second + 1.0)
    assert capacity.prompt_tokens_per_s == pytest.approx(4000.0)  # 1,000 tokens in a quarter of each second
    assert not capacity.is_known(60.0)  # they may be faster when all of them have work


def test_a_rate_is_known_once_engines_had_work_all_the_time_and_is_doubted_again_later() -> None:
    capacity = Capacity(None, 0.0)
    capacity.set_busy(1.0, 0.0)
    capacity.count_prompt(1000)
    capacity.note_idle()
    capacity.learn(1.0)
    assert capacity.is_known(1.0)
    assert capacity.is_known(60.0)
    assert not capacity.is_known(61.0)


def test_engines_that_stand_still_for_a_while_are_no_slower_afterwards() -> None:
    capacity = Capacity(None, 0.0)
    for second in range(1, 31):
        capacity.count_prompt(1000)
        capacity.learn(float(second))
    for second in range(31, 34):
        capacity.learn(float(second))  # no prompt passes
    assert capacity.prompt_tokens_per_s == pytest.approx(1000.0)
    capacity.count_prompt(4000)  # the prompts that waited pass at once
    capacity.learn(34.0)
    assert capacity.prompt_tokens_per_s == pytest.approx(1000.0)


class Decode:
    """A capacity of streams; a test gives their number and pace for each second."""

    def __init__(self) -> None:
        self.capacity, self.now_s = Capacity(0.05, 0.0), 0.0

    def second(self, answers: int, pace_s: float, *, holds_back: bool = False) -> float | None:
        capacity = self.capacity
        capacity.change_answers(answers, self.now_s)
        capacity.change_observed(answers, self.now_s)
        if holds_back:
            capacity.note_limit_reached()
        self.now_s += 1.0
        capacity.count_output(round(answers / pace_s))
        capacity.learn(self.now_s)
        capacity.change_answers(-answers, self.now_s)
        capacity.change_observed(-answers, self.now_s)
        return capacity.most_answers


def test_a_slow_round_after_good_ones_lowers_the_streams_by_a_fifth() -> None:
    decode = Decode()
    for _ in range(10):
        assert decode.second(100, 0.03) is None
    assert [decode.second(80, 0.5) for _ in range(2)] == pytest.approx([80.0, 64.0])  # a fifth less each round


@pytest.mark.parametrize(("holds_back", "least", "most"), [(True, 6.25, 12.5), (False, 5.5, 5.6)])
def test_streams_grow_back_while_pace_is_good(holds_back: bool, least: float, most: float) -> None:
    decode = Decode()
    assert decode.second(10, 0.5) == pytest.approx(5.0)
    while decode.second(5, 0.02) == 5.0:  # the slow round counts less and less
        assert decode.now_s < 10.0
    # If a request is held back: to a quarter more than the streams of the rounds that count, 5 and 10. Else by a
    # fiftieth each round.
    rounds = [decode.second(5, 0.02, holds_back=holds_back) for _ in range(4)]
    assert rounds == sorted(rounds)
    assert least <= (rounds[-1] or 0.0) <= most
