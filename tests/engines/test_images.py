"""Prompts with images on real engines: prefill computes them, and the answers are those of the decode engine alone."""

import base64
import io
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from PIL import Image

from serve_app.local.quickstart import prefill_metrics
from tests.lab.stand.tiny_vision import build_tiny_vision

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow]

TEXT = "What do you see in this picture? " * 8
SIDE = 112  # pixels; such an image has 16 tokens
BLOCK = 32  # tokens in a block of the model's KV
ANSWER = 12
# The two paths compute in other batches: the largest difference was 3e-6 in 20 runs.
LOGPROB_ERROR = 1e-4


@pytest.fixture(scope="module", name="app")
def _app(make_document: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from serve_app.sdk import deploy

    folder = tmp_path_factory.mktemp("models") / "tiny-vision"
    build_tiny_vision(folder)
    document = make_document()
    args = document["applications"][0]["args"]
    args["model"] = {"id": "vision", "source": str(folder)}
    args["engine_kwargs"] |= {"limit_mm_per_prompt": {"image": 4}, "max_model_len": 2048}
    args["router"] = {"length": {"local_max_tokens": 16, "local_cap_tokens": 16}, "max_media_bytes": 1_000_000}
    with deploy(document) as running:
        yield running


def picture(colour: str, side: int = SIDE) -> dict[str, Any]:
    """An image of one colour as a part of a message."""
    content = io.BytesIO()
    Image.new("RGB", (side, side), colour).save(content, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def body(*pictures: dict[str, Any], **fields: Any) -> dict[str, Any]:
    parts = [{"type": "text", "text": TEXT}, *pictures, {"type": "text", "text": "Name it."}]
    common = {"max_tokens": ANSWER, "temperature": 0.0, "ignore_eos": True, "logprobs": True}
    return {"model": "vision", "messages": [{"role": "user", "content": parts}], **common, **fields}


def ask(app: Any, *pictures: dict[str, Any], **fields: Any) -> Any:
    response = requests.post(f"{app.url}/v1/chat/completions", json=body(*pictures, **fields), timeout=120)
    assert response.status_code == 200, response.text
    return response.json()


def scores(answer: Any) -> list[tuple[str, float]]:
    """The tokens of an answer, each with its log probability."""
    return [(token["token"], token["logprob"]) for token in answer["choices"][0]["logprobs"]["content"]]


def local(app: Any, *pictures: dict[str, Any], salt: str = "local") -> Any:
    """The same without prefill: log probabilities of the prompt need a forward pass of decode's own engine."""
    return ask(app, *pictures, prompt_logprobs=0, cache_salt=salt)


def paths(app: Any) -> dict[str, int]:
    """Prompts by where they were computed and why."""
    counts = prefill_metrics(app.metrics_url)
    return {"/".join(key[1:]): int(count) for key, count in counts.items() if key[0] == "path"}


def cached(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def equal(one: Any, other: Any) -> bool:
    return [token for token, _ in scores(one)] == [token for token, _ in scores(other)] and [
        score for _, score in scores(one)
    ] == pytest.approx([score for _, score in scores(other)], abs=LOGPROB_ERROR)


def test_an_answer_over_prefill_is_that_of_decode_alone(app: Any) -> None:
    red, blue = picture("red"), picture("blue")
    before = paths(app)
    answers = {"red": ask(app, red), "blue": ask(app, blue), "both": ask(app, red, blue)}
    assert paths(app)["remote/long"] == before.get("remote/long", 0) + 3
    alone = {"red": local(app, red), "blue": local(app, blue), "both": local(app, red, blue)}
    assert paths(app)["local/not_transferable"] == before.get("local/not_transferable", 0) + 3
    for name, answer in answers.items():
        assert equal(answer, alone[name]), name
    # The prompts of both colours have the same tokens: only the images differ.
    assert answers["red"]["usage"]["prompt_tokens"] == answers["blue"]["usage"]["prompt_tokens"]
    assert not equal(answers["red"], answers["blue"])
