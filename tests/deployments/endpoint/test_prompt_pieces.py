"""Pieces of prompts at the endpoint: what makes them equal, and what makes them different."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.endpoint import prompt_pieces as module
from deployments.endpoint.prompt_pieces import prompt_pieces
from router.prompt_keys import PromptKeys

TEXT = "All work and no play makes Jack a dull boy. " * 40


def pieces(endpoint: str, body: dict[str, Any], model: str = "m", tokens: int = 1) -> PromptKeys | None:
    return prompt_pieces(endpoint, body, model=model, tokens=tokens, piece_tokens=32)


def keys(endpoint: str, body: dict[str, Any], model: str = "m") -> tuple[int, ...]:
    made = pieces(endpoint, body, model)
    assert made is not None
    return made.keys


def user(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **fields}


def common(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    return sum(a == b for a, b in zip(left, right, strict=False))


def test_a_conversation_begins_with_the_keys_of_its_last_turn() -> None:
    first = [{"role": "system", "content": TEXT}, user("and then?")]
    second = [*first, {"role": "assistant", "content": "Nothing."}, user(TEXT)]
    before, after = keys("chat", {"messages": first}), keys("chat", {"messages": second})
    assert common(before, after) == len(before) == len(TEXT + "system\x1f\x1fuser\x1fand then?") // 128


def test_a_text_of_128_characters_in_a_piece_counts_four_to_a_token() -> None:
    made = pieces("completions", {"prompt": "a" * 300})
    assert made is not None
    assert (len(made.keys), made.piece_tokens, made.tokens) == (2, 32, 75)


def test_mean_characters_change_the_tokens_and_no_key() -> None:
    made = prompt_pieces(
        "completions", {"prompt": "a" * 300}, model="m", tokens=1, piece_tokens=32, chars_per_token=2.0
    )
    assert made is not None
    assert made.keys == keys("completions", {"prompt": "a" * 300})
    assert (made.piece_tokens, made.tokens) == (64, 150)


@pytest.mark.parametrize(
    "changed",
    [
        {"cache_salt": "blue"},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"documents": [{"text": "d"}]},
        {"chat_template": "{{ messages }}"},
        {"chat_template_kwargs": {"thinking": True}},
        {"messages": [{"role": "system", "content": TEXT}]},
        {"messages": [user(TEXT, name="ann")], "cache_salt": "x"},
    ],
)
def test_requests_that_render_differently_share_no_piece(changed: dict[str, Any]) -> None:
    plain = {"messages": [user(TEXT)]}
    assert common(keys("chat", plain), keys("chat", {**plain, **changed})) == 0


def test_models_share_no_piece() -> None:
    assert common(keys("completions", {"prompt": TEXT}), keys("completions", {"prompt": TEXT}, model="other")) == 0


def test_parts_of_text_are_cut_as_the_text_is() -> None:
    parts = [{"type": "text", "text": TEXT}]
    assert keys("chat", {"messages": [user(parts)]}) == keys("chat", {"messages": [user(TEXT)]})


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [user([{"type": "image_url", "image_url": {"url": "data:..."}}])]},
        {"messages": [user([{"type": "text", "text": {"deep": TEXT}}])]},
        {"messages": [user({"text": TEXT})]},
        {"messages": [user(7)]},
        {"messages": ["not a message"]},
    ],
)
def test_a_chat_with_parts_that_are_no_text_has_no_pieces(body: dict[str, Any]) -> None:
    assert pieces("chat", body) is None


@pytest.mark.parametrize(
    "prompt", [None, 7, {"a": 1}, ["one", "two"], [[1, 2], [3]], [1, "two"], [1, True], [1, -5], [1 << 40]]
)
def test_a_completion_of_several_or_malformed_prompts_has_no_pieces(prompt: Any) -> None:
    assert pieces("completions", {"prompt": prompt}) is None


def test_token_ids_are_cut_as_tokens() -> None:
    made = pieces("completions", {"prompt": list(range(100))})
    assert made is not None
    assert (len(made.keys), made.piece_tokens, made.tokens) == (3, 32, 100)


def test_the_work_for_a_long_prompt_is_bounded_and_its_whole_length_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_TOKENS", 64)
    monkeypatch.setattr(module, "_MOST_CHARS", 256)
    text = pieces("completions", {"prompt": TEXT}, tokens=440)
    assert text is not None
    assert (len(text.keys), text.tokens) == (2, 440)
    chat = pieces("chat", {"messages": [user(TEXT), *[user(TEXT)] * 3]}, tokens=2000)
    assert chat is not None
    assert (len(chat.keys), chat.tokens) == (2, 2000)
    ids = pieces("completions", {"prompt": list(range(1000))})
    assert ids is not None
    assert (len(ids.keys), ids.tokens) == (2, 1000)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5) | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["messages", "prompt", "tools", "cache_salt", "chat_template"]), JSON))
def test_no_body_makes_an_error(body: dict[str, Any]) -> None:
    for endpoint in ("chat", "completions"):
        made = pieces(endpoint, body)
        assert made is None or made.tokens >= 0


def test_a_chat_of_token_ids_is_cut_like_a_completion_of_these_ids() -> None:
    ids = list(range(300, 430))
    chat = {"messages": [user(TEXT)], "kv_transfer_params": {"prompt_token_ids": ids}}
    assert pieces("chat", chat) == pieces("completions", {"prompt": ids})
    assert pieces("chat", {**chat, "kv_transfer_params": {"prompt_token_ids": "abc"}}) is None
    assert pieces("chat", {**chat, "kv_transfer_params": {"prompt_token_ids": []}}) == pieces(
        "chat", {"messages": [user(TEXT)]}
    )
