"""How the soak judges answers and the growth of memory, and how much load it sends to the engines."""

from pathlib import Path

import pytest

from autoscale.engines.profile import EngineProfile
from tests.lab.drill.apis import OUTPUT_TOKENS, Answer
from tests.lab.drill.load import prompts
from tests.lab.drill.soak import _KINDS, _RATE, document, grown
from tests.lab.drill.verdict import VERDICTS

ROW = {"first_third_mib": 100.0, "last_third_mib": 104.0, "growth_frac": 0.04, "steady_mib": 0.0}
GROWN = {"first_third_mib": 100.0, "last_third_mib": 106.0, "growth_frac": 0.06, "steady_mib": 0.0}


@pytest.mark.vllm
def test_every_kind_of_wrong_answer_is_counted() -> None:
    from deployments.emulated.text import next_tokens
    from tests.lab.drill.soak import judged

    (prompt,) = prompts(0, 1)
    right = next_tokens(prompt[-1], OUTPUT_TOKENS)
    answers = {
        "right": Answer(token_ids=right, is_ended=True),
        "lost": Answer(error="HTTP 500"),
        "duplicated": Answer(token_ids=[*right, right[-1]], is_ended=True),
        "truncated": Answer(token_ids=right[:-1], is_ended=True),
        "wrong_tokens": Answer(token_ids=[*right[:8], *right[:-8]], is_ended=True),
        "cut_at_front": Answer(token_ids=right[:5], is_cut=True, span_s=(90.0, 101.0)),
    }
    for name, answer in answers.items():
        row = judged([answer], 0, [(100.0, 100.1)])
        assert {one: row[one] for one in VERDICTS} == {one: int(one == name) for one in VERDICTS}


def test_growth_and_kinds_without_a_sample_are_findings() -> None:
    everything = dict.fromkeys(_KINDS, ROW)
    assert grown(everything, {}) == grown({}, everything) == []
    assert grown({**everything, "ingress": GROWN}, {}) == ["one ingress grew by 6.0% (6.0 MiB)"]
    assert grown(everything, {"ingress": GROWN}) == ["ingress, on average, grew by 6.0% (6.0 MiB)"]
    little = {"first_third_mib": 34.6, "last_third_mib": 36.9, "growth_frac": 0.066, "steady_mib": 0.0}
    assert grown({**everything, "raylet": little}, {}) == ["one raylet grew by 6.6% (2.3 MiB)"]
    steady = {**ROW, "growth_frac": 0.013, "last_third_mib": 101.3, "steady_mib": 9.0}
    assert grown({**everything, "ingress": steady}, {}) == ["one ingress grew by 1.3% (1.3 MiB), steadily by 9.0 MiB"]
    (line,) = grown({name: row for name, row in everything.items() if name != "decode replica"}, {})
    assert line == "nothing is known of the memory of decode replica"


def test_the_load_is_seven_tenths_of_the_capacity_of_decode() -> None:
    pool = document()["applications"][0]["args"]["groups"][0]["decode"]
    profile = EngineProfile.load(Path(pool["emulator"]["profile"]))
    running = pool["emulator"]["max_running"]
    step_s = profile.decode.seconds_for(running, 220 + OUTPUT_TOKENS / 2)  # prompts of 40 and of 400 tokens
    can_do = pool["replicas"] * running / (OUTPUT_TOKENS * step_s)
    assert pytest.approx(0.7, abs=0.04) == _RATE / can_do
