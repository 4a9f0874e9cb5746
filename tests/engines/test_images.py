"""Prompts with images on real engines: prefill computes them, and the answers are those of the decode engine alone."""

import asyncio
import base64
import io
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests
from PIL import Image

from deployments.wire.messages import DecodeRequest, Frame, SentFrames
from serve_app.local.quickstart import prefill_metrics
from tests.lab.stand.tiny_vision import build_tiny_vision

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow]

TEXT = "What do you see in this picture? " * 8
SIDE = 112  # pixels; such an image has 16 tokens
BLOCK = 32  # tokens in a block of the model's KV
ANSWER = 12
IMAGE_TOKEN = 1026  # id of the token that stands for a piece of an image
# Both paths compute in float32, but in batches of other sizes. In 12 comparisons there was no difference.
LOGPROB_ERROR = 1e-4


@pytest.fixture(scope="module", name="app")
def _app(make_document: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from serve_app.sdk import deploy

    folder = tmp_path_factory.mktemp("models") / "tiny-vision"
    build_tiny_vision(folder)
    document = make_document()
    args = document["applications"][0]["args"]
    args["model"] = {"id": "vision", "source": str(folder)}
    args["engine_kwargs"] |= {
        "limit_mm_per_prompt": {"image": 4},
        "max_model_len": 2048,
        "enable_mm_processor_stats": True,  # counts what the vision encoder does
    }
    args["router"] = {"length": {"local_max_tokens": 16, "local_cap_tokens": 16}, "max_media_bytes": 1_000_000}
    with deploy(document) as running:
        yield running


@pytest.fixture(scope="module", name="loop")
def _loop() -> Iterator[asyncio.AbstractEventLoop]:
    """The loop of all calls of replicas: Serve's handles of one process keep the first one."""
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def picture(colour: str, side: int = SIDE) -> dict[str, Any]:
    """An image of one colour as a part of a message."""
    content = io.BytesIO()
    Image.new("RGB", (side, side), colour).save(content, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def body(*pictures: dict[str, Any], **fields: Any) -> dict[str, Any]:
    parts = [{"type": "text", "text": TEXT}, *pictures, {"type": "text", "text": "Name it."}]
    common = {"max_tokens": ANSWER, "temperature": 0.0, "ignore_eos": True, "logprobs": True, "return_token_ids": True}
    return {"model": "vision", "messages": [{"role": "user", "content": parts}], **common, **fields}


def ask(app: Any, *pictures: dict[str, Any], **fields: Any) -> Any:
    response = requests.post(f"{app.url}/v1/chat/completions", json=body(*pictures, **fields), timeout=120)
    assert response.status_code == 200, response.text
    return response.json()


def scores(answer: Any) -> list[tuple[str, float]]:
    """The tokens of an answer, each with its log probability."""
    return [(token["token"], token["logprob"]) for token in answer["choices"][0]["logprobs"]["content"]]


def local(app: Any, *pictures: dict[str, Any], **fields: Any) -> Any:
    """The same without prefill: log probabilities of the prompt need a forward pass of decode's own engine."""
    return ask(app, *pictures, prompt_logprobs=0, cache_salt="local", **fields)


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


def test_cached_tokens_of_images_are_those_of_prefill(app: Any) -> None:
    red, green = picture("#ff0001"), picture("#00ff01")
    fields = {"messages": [{"role": "system", "content": TEXT}, *body(red)["messages"]]}
    first, again = ask(app, red, **fields), ask(app, red, **fields)
    assert cached(first) == 0
    tokens = first["prompt_token_ids"]
    assert cached(again) == (len(tokens) - 1) // BLOCK * BLOCK  # the last token is always computed
    assert equal(first, again)
    # An image of this size in another colour has the same tokens. Only the blocks before it may be shared.
    fields = {"messages": [{"role": "system", "content": TEXT}, *body(green)["messages"]]}
    other = ask(app, green, **fields)
    assert other["prompt_token_ids"] == tokens
    assert cached(other) == tokens.index(IMAGE_TOKEN) // BLOCK * BLOCK > 0
    assert not equal(first, other)
    assert equal(other, local(app, green, **fields))


def test_a_client_cannot_read_or_spoil_an_image_by_its_name(app: Any) -> None:
    named = [{**picture(colour), "uuid": "mine"} for colour in ("#aa0001", "#0001aa")]
    answers = [ask(app, one) for one in named]
    assert not equal(*answers)
    assert all(equal(answer, local(app, one)) for answer, one in zip(answers, named, strict=True))


def test_many_prompts_with_one_new_image_at_a_time_get_the_same_answer(app: Any) -> None:
    """Some are computed on prefill and some on decode, before either engine has the image."""
    new = picture("#123456")
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(local if number % 2 else ask, app, new) for number in range(8)]
        answers = [future.result() for future in asked]
    assert all(equal(answer, answers[0]) for answer in answers)


def test_images_beyond_the_bound_are_computed_on_decode(app: Any) -> None:
    before = paths(app)
    large = [picture(colour, side=224) for colour in ("red", "green", "blue", "white")]  # 602,112 bytes each
    assert equal(ask(app, *large), local(app, *large))
    after = paths(app)
    assert after["local/media_too_large"] == before.get("local/media_too_large", 0) + 1
    assert after["remote/long"] == before.get("remote/long", 0)


def test_a_stream_with_an_image_goes_on_from_another_replica(app: Any, loop: asyncio.AbstractEventLoop) -> None:
    from ray import serve

    def frames(pictured: Any, sent: Any = None) -> list[Frame]:
        fields = body(pictured, stream=True, logprobs=False)
        request = DecodeRequest(
            endpoint="chat",
            body=json.dumps(fields).encode(),
            request_id="r-1",
            id_seed="s",
            arrived_at_s=time.time(),
            sent=sent,
        )

        async def stream() -> list[Frame]:
            handle = serve.get_deployment_handle("decode:g0", "tandem").options(method_name="respond", stream=True)
            return [frame async for frame in handle.remote(request)]

        return loop.run_until_complete(stream())

    orange = picture("orange")
    whole = frames(orange)
    assert [frame.error for frame in whole] == [None] * len(whole)
    for at in (2, 7):
        record = SentFrames()
        for frame in whole[:at]:
            record.add(frame.text, frame.outputs, frame.usage)
        rest = frames(orange, record.sent())
        assert [frame.outputs for frame in rest if frame.text] == [frame.outputs for frame in whole[at:] if frame.text]
        (failed,) = frames(picture("black"), record.sent())
        assert failed.error == "not_resumable" and "another image" in failed.text


def test_decode_runs_no_vision_encoder_for_a_prompt_of_prefill(app: Any, loop: asyncio.AbstractEventLoop) -> None:
    from ray import serve

    from deployments.serve_seam.calls import answers_in_time

    def encoded(role: str) -> int:
        """Images that a role's engine has encoded since the last call."""
        handle = serve.get_deployment_handle(f"{role}:g0", "tandem")
        answers = loop.run_until_complete(answers_in_time(handle, "worker_answers", 60.0, "get_encoder_timing_stats"))
        return len(answers[0][0])

    new, counts = picture("#654321"), {}
    encoded("prefill"), encoded("decode")
    for asked in (ask, local):
        asked(app, new)
        counts[asked.__name__] = (encoded("prefill"), encoded("decode"))
    assert counts == {"ask": (1, 0), "local": (0, 1)}
