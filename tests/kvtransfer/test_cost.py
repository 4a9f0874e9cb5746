"""Laws of transfers that share wires."""

import pytest

from kvtransfer.cost import Wire, transfer_end_s


def test_a_transfer_alone_takes_its_base_and_its_bytes_at_the_slowest_wire() -> None:
    assert transfer_end_s(1.0, 200.0, 0.5, [Wire(100.0), Wire(400.0)]) == 3.5


def test_transfers_over_one_wire_go_one_after_another() -> None:
    card, one, other = Wire(100.0), Wire(100.0), Wire(100.0)
    assert transfer_end_s(0.0, 100.0, 0.0, [card, one]) == 1.0
    assert transfer_end_s(0.5, 100.0, 0.0, [card, other]) == 2.0
    assert transfer_end_s(0.5, 100.0, 0.0, [Wire(100.0), Wire(100.0)]) == 1.5


def test_a_transfer_to_a_busy_card_does_not_hold_up_another_from_the_same_one() -> None:
    source, busy, idle = Wire(100.0), Wire(10.0), Wire(100.0)
    assert transfer_end_s(0.0, 100.0, 0.0, [source, busy]) == 10.0
    assert transfer_end_s(0.0, 100.0, 0.0, [source, idle]) == 2.0


def test_base_time_keeps_no_wire_busy() -> None:
    card = Wire(100.0)
    transfer_end_s(0.0, 100.0, 10.0, [card])
    assert card.free_s == pytest.approx(1.0)
