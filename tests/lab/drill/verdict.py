"""The verdict on one answer whose output is known."""

from collections.abc import Sequence
from typing import Any

from tests.lab.drill.apis import Answer

VERDICTS = ("lost", "duplicated", "truncated", "wrong_tokens", "cut_at_front")
# Time from the end of a front's process to the broken connections of its clients, on a busy machine, in seconds.
_FRONT_ENDS_S = 5.0


def verdict(answer: Answer, wanted: Sequence[Any], front_ended_s: Sequence[tuple[float, float]]) -> str | None:
    """One of ``VERDICTS``; ``None``: the answer is right.

    Args:
        answer: the answer as a client saw it.
        wanted: output of the undisturbed answer, token ids or text.
        front_ended_s: for each front that was ended: when the kill began and when the process was gone, by the clock of
            ``answer.span_s``. A stream that breaks at another time is lost.
    """
    received, broke_s = answer.output, answer.span_s[1]
    if len(received) > len(wanted):
        return "duplicated"
    if list(received) != list(wanted[: len(received)]):
        return "wrong_tokens"
    if answer.is_cut and any(began_s <= broke_s <= gone_s + _FRONT_ENDS_S for began_s, gone_s in front_ended_s):
        return "cut_at_front"
    if not answer.is_ended:
        return "lost"
    return "truncated" if len(received) < len(wanted) else None
