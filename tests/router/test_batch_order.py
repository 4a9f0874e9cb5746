"""Gaps, repeats and restarts in the numbers of an engine's batches."""

from router.batch_order import BatchOrder, Turn


def after(*batches: tuple[int, float]) -> BatchOrder:
    order = BatchOrder()
    for number, at_s in batches:
        order.accept(number, at_s)
    return order


def test_first_batch_has_number_0() -> None:
    assert BatchOrder().turn(0, 5.0) is Turn.NEXT
    assert BatchOrder().turn(3, 5.0) is Turn.GAP


def test_the_next_number_follows_and_a_higher_one_shows_a_gap() -> None:
    order = after((0, 1.0), (1, 2.0))
    assert order.turn(2, 3.0) is Turn.NEXT
    assert order.turn(4, 3.0) is Turn.GAP


def test_an_old_batch_is_late_and_a_new_one_with_an_old_number_is_of_another_engine() -> None:
    order = after((0, 1.0), (1, 2.0))
    assert order.turn(1, 2.0) is Turn.LATE
    assert order.turn(0, 1.0) is Turn.LATE
    assert order.turn(0, 9.0) is Turn.RESTART
    assert order.turn(1, 9.0) is Turn.RESTART


def test_after_a_gap_the_numbers_go_on_from_the_accepted_batch() -> None:
    order = after((0, 1.0), (7, 2.0))
    assert order.turn(8, 3.0) is Turn.NEXT
    assert order.turn(3, 1.5) is Turn.LATE
