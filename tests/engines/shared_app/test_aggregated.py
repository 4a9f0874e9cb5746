"""Two services on real engines in one application: one of prefill and decode, one whose decode replica does both."""

from typing import Any

import openai
import pytest
import requests

from tests.engines.endpoint import prompt_ids, total

pytestmark = [pytest.mark.ray, pytest.mark.vllm]

LENGTHS = (5, 400, 2500)  # the first is short: its decode replica prefills it in any group


def path_counts(app: Any) -> dict[str, float]:
    return {why: total(app, "tandem_prefill_path_total", reason=why) for why in ("short", "long", "aggregated")}


def test_each_service_is_listed_and_no_other_model_exists(app: Any) -> None:
    client = app.client()
    assert [model.id for model in client.models.list().data] == ["tiny", "offline"]
    with pytest.raises(openai.NotFoundError, match="serves 'tiny', 'offline'"):
        client.completions.create(model="other", prompt="Hello", max_tokens=1)
    assert requests.get(f"{app.url}/health", timeout=10).status_code == 200


@pytest.mark.parametrize("length", LENGTHS)
def test_an_aggregated_group_gives_the_same_answer_without_prefill(app: Any, length: int) -> None:
    client = app.client()
    before = path_counts(app)

    def ask(model: str) -> str:
        choice = client.completions.create(
            model=model, prompt=prompt_ids(length, seed=length), max_tokens=16, temperature=0.0
        ).choices[0]
        assert choice.finish_reason == "length"
        text: str = choice.text
        return text

    assert ask("offline") == ask("tiny")
    after = path_counts(app)
    both = "short" if length <= 128 else "long"
    moved = {why: after[why] - before[why] for why in after if after[why] != before[why]}
    assert moved == {both: 1.0, "aggregated": 1.0}


def test_a_stream_of_an_aggregated_group_comes_token_by_token(app: Any) -> None:
    stream = app.client().chat.completions.create(
        model="offline", messages=[{"role": "user", "content": "Hello " * 300}], max_tokens=12, stream=True
    )
    chunks = [chunk for chunk in stream if chunk.choices and chunk.choices[0].delta.content]
    assert len(chunks) > 1


def test_status_lists_the_running_replicas_of_each_service(app: Any) -> None:
    from serve_app.running.ray_control import status_of

    running = {
        name: {str(pool): len(names) for pool, names in service.last.running.items()}
        for name, service in status_of(app.name).services.items()
        if service.last is not None
    }
    assert running == {"tiny": {"prefill:g0": 1, "decode:g0": 1}, "offline": {"decode:offline": 1}}
