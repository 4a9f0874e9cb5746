"""Engine arguments whose values vLLM keeps in classes of its own act on the engines of an application."""

from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.engines.endpoint import prompt_ids
from tests.engines.shared_app.test_serving import paths

pytestmark = [pytest.mark.ray, pytest.mark.vllm]

BUDGET = 5


@pytest.mark.parametrize(("length", "path"), [(900, "remote"), (20, "local")])
def test_reasoning_ends_at_its_budget(app: Any, tiny_model: Any, length: int, path: str) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    start, end = (tokenizer.token_to_id(mark) for mark in ("<think>", "</think>"))
    before = paths(app)
    answer = app.client().completions.create(
        model="tiny",
        prompt=[*prompt_ids(length, seed=length), start],
        max_tokens=12,
        temperature=0.0,
        extra_body={"thinking_token_budget": BUDGET, "return_token_ids": True, "ignore_eos": True, "cache_salt": path},
    )
    assert paths(app)[path] == before[path] + 1
    ids = answer.choices[0].token_ids
    assert ids.index(end) == BUDGET
    assert len(ids) == 12


def test_structured_output_has_no_free_white_space_as_configured(app: Any) -> None:
    # disable_any_whitespace: one space after each colon, and none anywhere else
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    answer = app.client().completions.create(
        model="tiny",
        prompt=prompt_ids(40, seed=4),
        max_tokens=32,
        extra_body={"structured_outputs": {"json": schema}},
    )
    assert answer.choices[0].text in ('{"a": 1}', '{"a": 2}')
