"""When a stream shows its replica's pace, and which."""

import pytest

from router.stream_pace import StreamPace


def stream(tokens: int, *, tpot_s: float, reads_s: float = 0.0) -> tuple[StreamPace, float]:
    """A stream with a token in each frame, whose client takes ``reads_s`` for each; and when that was."""
    pace, now_s = StreamPace(), 100.0
    pace.wait(now_s)
    now_s += 7.0  # to the first token
    pace.frame(1, now_s)
    for _ in range(tokens):
        now_s += reads_s
        pace.wait(now_s)
        now_s += max(0.0, tpot_s - reads_s)
        pace.frame(1, now_s)
    return pace, now_s


def test_an_answer_in_one_piece_has_no_pace() -> None:
    pace = StreamPace()
    pace.wait(0.0)
    pace.frame(500, 3.0)
    assert pace.judged_s(3.0, has_ended=True) is None


@pytest.mark.parametrize(
    ("tokens", "has_ended", "is_judged"), [(7, True, False), (8, True, True), (63, False, False), (64, False, True)]
)
def test_a_stream_is_judged_where_it_ends_or_once_enough_has_come(
    tokens: int, has_ended: bool, is_judged: bool
) -> None:
    pace, now_s = stream(tokens, tpot_s=2.0)
    assert pace.judged_s(now_s, has_ended=has_ended) == (2.0 if is_judged else None)
    assert pace.judged_s(now_s, has_ended=True) == (2.0 if not is_judged and tokens >= 8 else None)  # once


def test_what_does_not_come_counts_as_well() -> None:
    pace, now_s = stream(10, tpot_s=0.1)
    pace.wait(now_s)
    assert pace.judged_s(now_s + 59.0, has_ended=True) == pytest.approx(6.0)  # 1 s for ten and 59 for none


def test_who_reads_slowly_speaks_against_nobody() -> None:
    pace, now_s = stream(100, tpot_s=0.02, reads_s=1.0)  # everything was there long before
    assert pace.judged_s(now_s, has_ended=True) is None
    pace, now_s = stream(100, tpot_s=1.0, reads_s=0.4)
    assert pace.judged_s(now_s, has_ended=True) == pytest.approx(0.6)
