"""An endpoint that wants keys, on emulated engines: who is let in, and when a change holds."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from deployments.api_keys import key_line, new_key
from tests.engines.endpoint import emulated_document

pytestmark = [pytest.mark.ray, pytest.mark.vllm]

BODY = {"model": "llama-70b", "prompt": [100] * 50, "max_tokens": 4}


@pytest.fixture(scope="module", name="file")
def _file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys"


@pytest.fixture(scope="module", name="url")
def _url(file: Path) -> Iterator[str]:
    from serve_app.sdk import deploy

    file.write_text(key_line("first", "unused") + "\n")
    with deploy(emulated_document(api_keys_file=str(file), metrics_on_public_port=True)) as app:
        yield app.url


def asked(url: str, path: str, key: str | None) -> requests.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    if path.startswith("/v1/") and not path.startswith("/v1/models"):
        return requests.post(url + path, json=BODY, headers=headers, timeout=60)
    return requests.get(url + path, headers=headers, timeout=60)


def test_without_a_key_only_health_answers(url: str, file: Path) -> None:
    key = new_key()
    file.write_text(key_line("mine", key) + "\n")
    time.sleep(1.5)  # a change holds after a second
    for path in ("/v1/completions", "/v1/models", "/v1/models/llama-70b", "/metrics"):
        assert asked(url, path, key).status_code == 200
        for wrong in (None, "unused", new_key()):
            answer = asked(url, path, wrong)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert asked(url, "/v1/chat/completions", None).status_code == 401
    assert asked(url, "/health", None).status_code == 200


def test_a_key_that_is_withdrawn_ends_without_a_restart(url: str, file: Path) -> None:
    key, other = new_key(), new_key()
    file.write_text(key_line("a", key) + "\n" + key_line("b", other) + "\n")
    time.sleep(1.5)
    assert asked(url, "/v1/models", key).status_code == 200
    file.write_text(key_line("b", other) + "\n")
    time.sleep(1.5)
    assert asked(url, "/v1/models", key).status_code == 401
    assert asked(url, "/v1/models", other).status_code == 200


def test_pythons_own_client_sends_its_key(url: str, file: Path) -> None:
    from openai import AuthenticationError, OpenAI

    key = new_key()
    file.write_text(key_line("a", key) + "\n")
    time.sleep(1.5)
    client: Any = OpenAI(base_url=f"{url}/v1", api_key=key)
    assert client.completions.create(**BODY).usage.completion_tokens == 4
    with pytest.raises(AuthenticationError):
        OpenAI(base_url=f"{url}/v1", api_key="wrong").models.list()
