"""LoRA adapters on real engines: the remote path computes with them, and both roles load and unload them."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from serve_app.local.tiny_model import Shape
from tests.engines.endpoint import replica_processes, total
from tests.lab.stand.tiny_adapter import build_adapter

pytestmark = [pytest.mark.ray, pytest.mark.vllm]

RANDOM = random.Random(7)
PROMPT = [RANDOM.randrange(10, 1000) for _ in range(200)]  # longer than what decode prefills itself
ANSWER = 12


@pytest.fixture(scope="module", name="folder")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The allowed folder, with sound adapters and others; beside it one that is not allowed."""
    folder = tmp_path_factory.mktemp("adapters") / "allowed"
    build_adapter(folder / "blue", seed=2)
    build_adapter(folder / "green", seed=3)
    build_adapter(folder / "high", seed=3, rank=64)
    build_adapter(folder / "small", seed=3, shape=Shape(hidden=128))
    build_adapter(folder / "large", seed=3, shape=Shape(hidden=512))
    build_adapter(folder / "broken", seed=3)
    (folder / "broken" / "adapter_model.safetensors").write_bytes(b"no weights")
    build_adapter(folder / "half", seed=3)
    (folder / "half" / "adapter_model.safetensors").unlink()
    outside = build_adapter(folder.parent / "outside", seed=4)
    (folder / "link").symlink_to(outside)
    return folder


@pytest.fixture(scope="module", name="app")
def _app(make_document: Any, folder: Path) -> Iterator[Any]:
    """``tiny`` on prefill and decode, with the adapter ``red`` from the start."""
    from serve_app.sdk import deploy

    document = make_document()
    args = document["applications"][0]["args"]
    red = build_adapter(folder.parent / "configured", seed=1)
    args["model"] |= {"adapters": [{"id": "red", "path": str(red)}], "adapters_folder": str(folder)}
    args["engine_kwargs"] |= {"max_cpu_loras": 3}
    args["router"] = {"policy": "prefix", "length": {"local_max_tokens": 16, "local_cap_tokens": 16}}
    with deploy(document) as running:
        yield running


def complete(app: Any, model: str, prompt: list[int] = PROMPT, **fields: Any) -> requests.Response:
    body = {"model": model, "prompt": prompt, "max_tokens": ANSWER, "temperature": 0.0, "ignore_eos": True, **fields}
    return requests.post(f"{app.url}/v1/completions", json={"return_token_ids": True, **body}, timeout=120)


def ids(app: Any, model: str, prompt: list[int] = PROMPT, **fields: Any) -> list[int]:
    """The answer's tokens."""
    response = complete(app, model, prompt, **fields)
    assert response.status_code == 200, response.text
    assert response.json()["model"] == model
    return list(response.json()["choices"][0]["token_ids"])


def local_ids(app: Any, model: str, prompt: list[int] = PROMPT) -> list[int]:
    """The same without prefill: its logprobs need a forward pass of decode's own engine."""
    return ids(app, model, prompt, prompt_logprobs=1, cache_salt="local")


def change(app: Any, what: str, name: str, **fields: Any) -> requests.Response:
    return requests.post(f"{app.url}/v1/{what}_lora_adapter", json={"lora_name": name, **fields}, timeout=300)


def load(app: Any, name: str, path: Path | str, **fields: Any) -> requests.Response:
    return change(app, "load", name, lora_path=str(path), **fields)


def remote(app: Any) -> float:
    return total(app, "tandem_prefill_path_total", path="remote")


def listed(app: Any) -> dict[str, Any]:
    return {card["id"]: card for card in requests.get(f"{app.url}/v1/models", timeout=60).json()["data"]}


def error(response: requests.Response) -> str:
    return str(response.json()["error"]["message"])


def test_the_remote_path_computes_with_the_adapter_and_keeps_its_cache_apart(app: Any) -> None:
    before = remote(app)
    with_adapter, base = ids(app, "red"), ids(app, "tiny")
    assert remote(app) == before + 2
    assert with_adapter != base
    assert (local_ids(app, "red"), local_ids(app, "tiny")) == (with_adapter, base)
    # Again, now from the caches of both engines.
    assert (ids(app, "red"), ids(app, "tiny")) == (with_adapter, base)
    assert total(app, "tandem_prefill_failures_total") == 0


def test_a_configured_adapter_is_listed_and_stays(app: Any, folder: Path) -> None:
    card = listed(app)["red"]
    assert (card["parent"], card["root"]) == ("tiny", str(folder.parent / "configured"))
    assert requests.get(f"{app.url}/v1/models/red", timeout=60).json() == card
    assert "is in the configuration" in error(change(app, "unload", "red"))
    assert load(app, "red", "blue").status_code == 400


def test_an_adapter_comes_and_goes_at_run_time(app: Any, folder: Path) -> None:
    assert complete(app, "blue").status_code == 404
    response = load(app, "blue", folder / "blue")
    assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'blue' added successfully.")
    before = remote(app)
    blue = ids(app, "blue")
    assert remote(app) == before + 1
    assert blue == local_ids(app, "blue")
    assert blue not in (ids(app, "red"), ids(app, "tiny"))
    assert listed(app)["blue"]["root"] == str(folder / "blue")
    assert "already loaded" in error(load(app, "blue", folder / "blue"))
    assert change(app, "unload", "blue").status_code == 200
    response = complete(app, "blue")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    assert change(app, "unload", "blue").status_code == 404
    # Another adapter under the same name has no KV of the first one.
    assert load(app, "blue", "green").status_code == 200
    green = ids(app, "blue")
    assert green == local_ids(app, "blue") != blue
    assert load(app, "blue", "blue", load_inplace=True).status_code == 200
    assert ids(app, "blue") == blue
    assert change(app, "unload", "blue").status_code == 200


def test_beams_streams_and_chats_have_the_adapter(app: Any) -> None:
    beams = {"use_beam_search": True, "n": 2, "prompt": PROMPT[:40]}
    assert complete(app, "red", **beams).json()["choices"] != complete(app, "tiny", **beams).json()["choices"]
    body = {"model": "red", "messages": [{"role": "user", "content": "the licence " * 30}], "max_tokens": 8}
    answer = requests.post(f"{app.url}/v1/chat/completions", json=body | {"temperature": 0.0}, timeout=60).json()
    assert answer["model"] == "red"
    streamed = requests.post(f"{app.url}/v1/chat/completions", json=body | {"stream": True}, timeout=60).text
    assert '"model":"red"' in streamed and streamed.endswith("data: [DONE]\n\n")


REFUSED = {
    "high": (400, "has rank 64, and the engines take at most 16: set max_lora_rank"),
    "small": (400, "is not of this model"),
    "large": (400, "is not of this model"),
    "broken": (400, "is no safetensors file"),
    "half": (404, "has no file adapter_model.safetensors"),
    "nothing": (404, "has no file adapter_config.json"),
    "link": (400, "outside of the allowed folder"),
    "../outside": (400, "outside of the allowed folder"),
    "/etc": (400, "outside of the allowed folder"),
    ".": (400, "outside of the allowed folder"),
}


@pytest.mark.parametrize("path", REFUSED)
def test_an_adapter_that_cannot_be_loaded_is_refused_by_name(app: Any, path: str) -> None:
    response = load(app, "bad", path)
    assert (response.status_code, REFUSED[path][1] in error(response)) == (REFUSED[path][0], True), response.text
    assert complete(app, "bad").status_code == 404
    assert ids(app, "red") and set(listed(app)) == {"tiny", "red"}


def test_models_stay_and_a_full_engine_takes_no_further_adapter(app: Any) -> None:
    assert "is a model" in error(change(app, "unload", "tiny"))
    assert "is the name of a model" in error(load(app, "tiny", "blue"))
    assert [load(app, name, "blue").status_code for name in ("one", "two", "three")] == [200, 200, 400]
    assert "keep no more" in error(load(app, "three", "blue"))
    assert ids(app, "one") == ids(app, "two") != ids(app, "red")
    assert [change(app, "unload", name).status_code for name in ("one", "two")] == [200, 200]


def test_an_adapter_of_one_role_is_refused_before_any_work(app: Any) -> None:
    """A prefill replica that stands still has not loaded what decode has."""
    (prefill,) = replica_processes(app, "prefill")
    before = remote(app), total(app, "vllm:request_success_total")
    prefill.suspend()
    try:
        with ThreadPoolExecutor(1) as other:
            loading = other.submit(load, app, "blue", "blue")
            response = complete(app, "blue")
            while response.status_code == 404 or "its replicas do not" in error(response):
                response = complete(app, "blue")
            assert (response.status_code, response.json()["error"]["code"]) == (503, "adapter_not_loaded")
            assert "its prefill replicas do not have it" in error(response)
            prefill.resume()
            assert loading.result().status_code == 200
    finally:
        prefill.resume()
    assert (remote(app), total(app, "vllm:request_success_total")) == before
    assert ids(app, "blue") == local_ids(app, "blue")
    assert change(app, "unload", "blue").status_code == 200
