"""What became of one answer whose every output token is known."""

from collections.abc import Sequence

from serve_app.drill_load import Answer

VERDICTS = ("lost", "duplicated", "truncated", "wrong_tokens", "cut_at_front")
# From the end of a front's process to its clients' broken connections, on a busy machine.
_FRONT_ENDS_S = 5.0


def verdict(answer: Answer, wanted: Sequence[int], front_ended_s: Sequence[tuple[float, float]]) -> str | None:
    """One of ``VERDICTS``; ``None``: the answer is right.

    Args:
        answer: what a client saw.
        wanted: the token ids of the undisturbed answer.
        front_ended_s: of each part that cut its own streams off, when it was told to end and when it was gone, by the
            clock of ``answer.span_s``. A stream that breaks at another time is lost.
    """
    got = answer.token_ids
    if len(got) > len(wanted):
        return "duplicated"
    if got != list(wanted[: len(got)]):
        return "wrong_tokens"
    if answer.is_cut and any(told_s <= answer.span_s[1] <= gone_s + _FRONT_ENDS_S for told_s, gone_s in front_ended_s):
        return "cut_at_front"
    if not answer.is_ended:
        return "lost"
    return "truncated" if len(got) < len(wanted) else None
