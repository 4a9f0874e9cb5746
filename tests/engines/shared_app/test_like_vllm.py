"""What clients of vLLM send beyond OpenAI's own fields and types, and what they read beyond OpenAI's answers."""

import json
from typing import Any

import pytest
import requests

from tests.engines.endpoint import prompt_ids

pytestmark = [pytest.mark.ray, pytest.mark.vllm]

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}


def test_a_prompt_is_scored_without_an_answer(app: Any) -> None:
    """`max_tokens` 0 with `echo` and `logprobs`: each token of the prompt after the first has a log probability."""
    common: dict[str, Any] = {"model": "tiny", "temperature": 0.0, "echo": True, "max_tokens": 0}
    for length in (20, 700):
        ids = prompt_ids(length, seed=110 + length)
        answer = app.client().completions.create(**common, prompt=ids, logprobs=1)
        scores = answer.choices[0].logprobs.token_logprobs
        assert len(scores) == length and scores[0] is None and all(score < 0.0 for score in scores[1:])
        assert answer.usage.prompt_tokens == length
        text = answer.choices[0].text
        assert app.client().completions.create(**common, prompt=ids).choices[0].text == text
        events = app.client().completions.create(**common, prompt=ids, stream=True)
        assert "".join(event.choices[0].text for event in events) == text


def test_values_that_vllm_converts_or_ignores_are_answered(app: Any) -> None:
    converted = {"model": "tiny", "prompt": "x", "n": 1.0, "max_tokens": "2", "stream": "true", "best_of": 3}
    response = requests.post(f"{app.url}/v1/completions", json=converted, timeout=60)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("data: [DONE]\n\n")
    ignored = {"functions": [{"name": "f"}], "function_call": "auto", "audio": {}, "modalities": ["audio"]}
    body = {"model": "tiny", **CHAT, **ignored, "web_search_options": {}}
    assert requests.post(f"{app.url}/v1/chat/completions", json=body, timeout=60).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_may_give_the_token_ids_of_its_prompt(app: Any, stream: bool) -> None:
    smuggled = {"do_remote_prefill": True, "remote_block_ids": [1], "remote_engine_id": "x"}
    for length in (20, 700):
        ids = prompt_ids(length, seed=120 + length)
        body = {"kv_transfer_params": {**smuggled, "prompt_token_ids": ids}, "return_token_ids": True}
        body |= {"model": "tiny", **CHAT, "stream": stream}
        text = requests.post(f"{app.url}/v1/chat/completions", json=body, timeout=60).text
        first = text.partition("\n")[0].removeprefix("data: ")
        assert json.loads(first)["prompt_token_ids"] == ids
        assert "remote_engine_id" not in text and "do_remote_prefill" not in text


@pytest.mark.parametrize(("wanted", "begin"), [("JSON", 'JSON {"named_metrics": {'), ("text", "TEXT named_metrics.")])
def test_an_answer_tells_the_load_of_the_decode_engine(app: Any, wanted: str, begin: str) -> None:
    headers = {"endpoint-load-metrics-format": wanted}
    for path, prompt in (("completions", {"prompt": "x"}), ("chat/completions", CHAT)):
        body = {"model": "tiny", "max_tokens": 1, **prompt}
        response = requests.post(f"{app.url}/v1/{path}", json=body, headers=headers, timeout=60)
        assert response.headers["endpoint-load-metrics"].startswith(begin)
        assert "kv_cache_usage_perc" in response.headers["endpoint-load-metrics"]
        body["stream"] = True  # its headers go out before the engine has done anything
        response = requests.post(f"{app.url}/v1/{path}", json=body, headers=headers, timeout=60)
        assert "endpoint-load-metrics" not in response.headers


def test_the_health_check_answers_head_requests(app: Any) -> None:
    response = requests.head(f"{app.url}/health", timeout=60)
    assert (response.status_code, response.content) == (200, b"")


def test_cards_of_models_say_where_their_files_are(app: Any) -> None:
    cards = requests.get(f"{app.url}/v1/models", timeout=60).json()["data"]
    assert all(card["root"].endswith("models/tiny") and card["parent"] is None for card in cards)
    assert requests.get(f"{app.url}/v1/models/", timeout=60).json()["data"] == cards
