"""A service with a pooling model on a real engine, beside an emulated one that generates."""

import base64
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests

from tests.engines.endpoint import emulated_pool

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow]

TEXTS = ["Hello world", "It was the best of times", "a b c"]


@pytest.fixture(scope="module", name="app")
def _app(make_document: Any) -> Iterator[Any]:
    """``embed`` pools; ``talk`` generates."""
    from serve_app.sdk import deploy

    document = make_document()
    application = document["applications"][0]
    application["autoscaling_policy"] = {"policy_function": "autoscale.ray_policy:JointPolicy"}
    args = application["args"]
    source, group = args.pop("model")["source"], args.pop("groups")[0]
    kwargs = {name: value for name, value in args.pop("engine_kwargs").items() if "pars" not in name}
    del kwargs["enable_auto_tool_choice"]
    embed = {
        "model": {"id": "embed", "source": source},
        "engine_kwargs": {**kwargs, "runner": "pooling", "convert": "embed"},
        "groups": [{"name": "e0", "prefill": None, "decode": {**group["decode"], "max_replicas": 1}}],
        "autoscale": {"pd_ratio": "0:1", "policy": {"kind": "wva"}, "slo": {"ttft_s": 5.0}},
    }
    pool = emulated_pool("H100", lowest=1, most=1, time_factor=10.0)
    del pool["placement"]["accelerator_type"]
    talk = {
        "model": {"id": "talk", "source": "emulated/talk"},
        "engine_kwargs": {"max_model_len": 4096},
        "groups": [{"name": "t0", "prefill": None, "decode": pool}],
        "autoscale": {"pd_ratio": "0:1", "policy": {"kind": "static", "prefill": 0, "decode": 1}},
    }
    args["services"] = [embed, talk]
    with deploy(document) as running:
        yield running


def post(app: Any, path: str, **fields: Any) -> requests.Response:
    return requests.post(f"{app.url}{path}", json=fields, timeout=60)


def embeddings(app: Any, **fields: Any) -> list[list[float]]:
    response = post(app, "/v1/embeddings", model="embed", **fields)
    assert response.status_code == 200, response.text
    return [item["embedding"] for item in response.json()["data"]]


@pytest.fixture(scope="module", name="expected")
def _expected(tiny_model: Path) -> Any:
    """The last token's hidden state of each text, of length 1, by the transformers library."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(tiny_model), AutoModel.from_pretrained(tiny_model)
    vectors = []
    with torch.inference_mode():
        for text in TEXTS:
            last = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0, -1]
            vectors.append((last / last.norm()).numpy())
    return np.array(vectors)


def test_embeddings_are_those_of_the_model(app: Any, expected: Any) -> None:
    found = np.array(embeddings(app, input=TEXTS))
    assert np.allclose(found, expected, atol=1e-5)  # float32, and sums in another order


def test_each_form_of_the_input_and_the_output_has_the_same_vector(app: Any, expected: Any) -> None:
    ids = post(app, "/tokenize", model="embed", prompt=TEXTS[0]).json()["tokens"]
    (coded,) = embeddings(app, input=TEXTS[0], encoding_format="base64")
    raw = post(app, "/v1/embeddings", model="embed", input=TEXTS[0], encoding_format="bytes", embed_dtype="float32")
    vectors = [
        embeddings(app, input=TEXTS[0])[0],
        embeddings(app, input=[ids])[0],
        np.frombuffer(base64.b64decode(coded), np.float32),
        np.frombuffer(raw.content, np.float32),
        post(app, "/pooling", model="embed", input=TEXTS[0]).json()["data"][0]["data"],
        post(app, "/v2/embed", model="embed", texts=TEXTS[:1]).json()["embeddings"]["float"][0],
        post(app, "/invocations", model="embed", input=TEXTS[0]).json()["data"][0]["embedding"],
    ]
    for vector in vectors:
        assert np.allclose(vector, expected[0], atol=1e-5)


def test_scores_are_the_cosines_of_the_vectors(app: Any, expected: Any) -> None:
    cosines = expected[0] @ expected[1:].T
    score = post(app, "/score", model="embed", text_1=TEXTS[0], text_2=TEXTS[1:]).json()["data"]
    assert [item["score"] for item in score] == pytest.approx(list(cosines), abs=1e-5)
    ranked = post(app, "/v1/rerank", model="embed", query=TEXTS[0], documents=TEXTS[1:]).json()["results"]
    assert [item["index"] for item in ranked] == list(np.argsort(-cosines))


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"max_tokens": 1}}),
        ("/classify", {"input": "hi"}),
    ],
)
def test_what_the_model_cannot_do_is_refused_with_what_it_can(app: Any, path: str, fields: dict[str, Any]) -> None:
    response = post(app, path, model="embed", **fields)
    assert response.status_code == 404
    message = response.json()["error"]["message"]
    assert message == (
        f"POST {path}: the engine of this model cannot serve it; it supports these tasks: embed, token_embed"
    )


def test_the_other_service_generates_and_embeds_nothing(app: Any) -> None:
    chat = post(app, "/v1/chat/completions", model="talk", messages=[{"role": "user", "content": "hi"}], max_tokens=3)
    assert chat.json()["usage"]["completion_tokens"] == 3
    refused = post(app, "/v1/embeddings", model="talk", input="hi")
    assert refused.status_code == 404
    assert "an emulated engine answers /v1/chat/completions" in refused.json()["error"]["message"]


def test_limits_hold_for_each_text(app: Any) -> None:
    many = post(app, "/v1/embeddings", model="embed", input=["a"] * 1025)
    assert (many.status_code, "at most 1024" in many.text) == (400, True)
    documents = post(app, "/v1/rerank", model="embed", query="a", documents=["b"] * 1024)
    assert (documents.status_code, "at most 1024" in documents.text) == (400, True)
    long = post(app, "/v1/embeddings", model="embed", input=[7] * 5000)
    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_the_autoscaler_sees_texts_and_no_output_tokens(app: Any) -> None:
    from ray import serve

    handle = serve.get_deployment_handle("decode:e0", app.name).options(method_name="record_autoscaling_stats")
    before = await handle.remote()
    embeddings(app, input=TEXTS)
    after = await handle.remote()
    grown = {name: after[name] - before[name] for name in ("requests", "first_tokens", "input_tokens", "output_tokens")}
    tokens = sum(len(post(app, "/tokenize", model="embed", prompt=text).json()["tokens"]) for text in TEXTS)
    assert grown == {"requests": 3.0, "first_tokens": 3.0, "input_tokens": float(tokens), "output_tokens": 0.0}
    assert after["running_requests"] == 0.0
    assert all(math.isfinite(value) for value in after.values())
