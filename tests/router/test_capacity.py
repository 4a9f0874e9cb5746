"""What is learned of what engines can take."""

import pytest

from router.capacity import Capacity


def test_a_rate_at_which_nobody_was_held_back_raises_but_does_not_lower() -> None:
    capacity = Capacity(None, 0.0)
    for second in range(1, 40):
        capacity.first(1000)
        capacity.learn(float(second))
    assert capacity.tokens_s == pytest.approx(1000.0)
    for second in range(40, 80):
        capacity.first(10)
        capacity.idle()
        capacity.learn(float(second))
    assert capacity.tokens_s == pytest.approx(1000.0)
    capacity.first(3000)
    capacity.idle()
    capacity.learn(80.0)
    assert capacity.tokens_s == pytest.approx(1600.0)
    for second in range(81, 120):
        capacity.first(500)
        capacity.learn(float(second))  # somebody waited: this is what it can do
    assert capacity.tokens_s == pytest.approx(500.0, rel=0.01)


@pytest.mark.parametrize(("tokens", "is_too_slow"), [(100, False), (10, True)])
def test_answers_in_one_piece_are_judged_at_their_end(tokens: int, is_too_slow: bool) -> None:
    capacity = Capacity(0.05, 0.0)
    capacity.streams(10, 0.0, is_seen=False)
    capacity.streams(1, 0.0, is_seen=True)
    for tenth in range(1, 31):
        capacity.output(4)  # the stream's: 40 tokens/s
        capacity.learn(0.1 * tenth)
    assert capacity.most_streams is None
    for _ in range(10):
        capacity.output(tokens, 3.0)
        capacity.streams(-1, 3.0, is_seen=False)
    capacity.learn(4.1)
    assert (capacity.most_streams is not None) == is_too_slow
