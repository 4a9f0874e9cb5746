"""When a stream shows the pace of its replica, and which pace it shows."""

import pytest

from router.stream_pace import StreamPace


def stream(tokens: int, *, tpot_s: float, reads_s: float = 0.0) -> tuple[StreamPace, list[float | None], float]:
    """A stream with a token in each frame, whose client takes ``reads_s`` for each; the paces, and the end."""
    pace, now_s, shown = StreamPace(), 107.0, []
    assert pace.frame(1, 7.0, now_s) is None  # the first token
    for _ in range(tokens):
        waited_s = max(0.0, tpot_s - reads_s)
        now_s += reads_s + waited_s
        shown.append(pace.frame(1, waited_s, now_s))
    return pace, shown, now_s


def test_an_answer_in_one_piece_has_no_pace() -> None:
    pace = StreamPace()
    assert pace.frame(500, 3.0, 3.0) is None
    assert pace.ended(0.0, 3.0) is None


@pytest.mark.parametrize(("tokens", "at_end", "on_the_way"), [(7, None, None), (8, 2.0, None), (64, None, 2.0)])
def test_a_stream_is_judged_once_at_its_end_or_as_soon_as_enough_tokens_have_come(
    tokens: int, at_end: float | None, on_the_way: float | None
) -> None:
    pace, shown, now_s = stream(tokens, tpot_s=2.0)
    assert shown == [None] * (tokens - 1) + [on_the_way]
    assert pace.ended(0.0, now_s) == at_end
    assert pace.ended(0.0, now_s) is None


def test_time_without_a_token_counts_as_well() -> None:
    pace, _, now_s = stream(10, tpot_s=0.1)
    assert pace.ended(59.0, now_s + 59.0) == pytest.approx(6.0)  # 1 s for ten tokens, and 59 s without one


def test_a_client_that_reads_slowly_is_no_sign_against_a_replica() -> None:
    pace, shown, now_s = stream(100, tpot_s=0.02, reads_s=1.0)  # all tokens had come long before
    assert set(shown) == {None}
    assert pace.ended(0.0, now_s) is None
    _, shown, _ = stream(100, tpot_s=1.0, reads_s=0.4)
    assert [pace_s for pace_s in shown if pace_s is not None] == [pytest.approx(0.6)]
