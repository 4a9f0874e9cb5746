"""How the soak judges answers, and what it takes for grown."""

import pytest

from serve_app.drill_load import OUTPUT_TOKENS, Answer, prompts
from serve_app.fuzz_memory import _thirds

pytestmark = pytest.mark.vllm


def test_every_kind_of_wrong_answer_is_counted() -> None:
    from deployments.emulator import next_tokens
    from serve_app.soak import judged

    (prompt,) = prompts(0, 1)
    right = next_tokens(prompt[-1], OUTPUT_TOKENS)
    answers = {
        "right": Answer(token_ids=right, is_ended=True),
        "lost": Answer(error="HTTP 500"),
        "duplicated": Answer(token_ids=[*right, right[-1]], is_ended=True),
        "truncated": Answer(token_ids=right[:-1], is_ended=True),
        "wrong_tokens": Answer(token_ids=[right[0] + 1, *right[1:]], is_ended=True),
        "cut_at_front": Answer(token_ids=right[:5], is_cut=True, span_s=(90.0, 101.0)),
    }
    for name, answer in answers.items():
        row = judged([answer], 0, [100.0])
        assert {one: row[one] for one in answers if one != "right"} == {
            one: int(one == name) for one in answers if one != "right"
        }


@pytest.mark.parametrize("fronts_s", [[], [80.0, 102.0]])
def test_a_stream_that_breaks_while_its_front_lives_is_lost(fronts_s: list[float]) -> None:
    from serve_app.soak import judged

    row = judged([Answer(token_ids=[], is_cut=True, span_s=(90.0, 101.0))], 0, fronts_s)
    assert (row["cut_at_front"], row["lost"]) == (0, 1)


def test_growth_is_of_thirds_after_the_warm_up() -> None:
    mib = 2**20
    samples = [(done / 100, (100 if done < 60 else 110) * mib) for done in range(15, 101)]
    row = _thirds([(0.0, 500 * mib), *samples])
    assert row is not None
    assert row["growth_frac"] == pytest.approx(0.1)
