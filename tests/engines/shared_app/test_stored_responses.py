"""Stored responses of the Responses API, in an application with two models."""

import time
from typing import Any

import pytest
import requests

from tests.engines.endpoint import WAIT_S

pytestmark = [pytest.mark.ray, pytest.mark.vllm]


@pytest.fixture(name="created", params=["tiny", "offline"])
def _created(app: Any, request: pytest.FixtureRequest) -> dict[str, Any]:
    """A response of one of the models."""
    body = {"model": request.param, "input": "Hello", "max_output_tokens": 4, "store": True, "background": True}
    created = requests.post(f"{app.url}/v1/responses", json=body, timeout=60)
    assert created.status_code == 200, created.text
    answer: dict[str, Any] = created.json()
    return answer


def test_a_stored_response_is_found_without_the_name_of_its_model(app: Any, created: dict[str, Any]) -> None:
    place = f"{app.url}/v1/responses/{created['id']}"
    deadline_s = time.monotonic() + WAIT_S
    while True:
        found = requests.get(place, timeout=60)
        assert found.status_code == 200, found.text
        assert (found.json()["id"], found.json()["model"]) == (created["id"], created["model"])
        if found.json()["status"] not in ("queued", "in_progress"):
            break
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    cancelled = requests.post(f"{place}/cancel", timeout=60)
    assert cancelled.status_code == 400  # vLLM cancels no response that is complete
    body = {"model": created["model"], "input": "Go on", "max_output_tokens": 2, "previous_response_id": created["id"]}
    assert requests.post(f"{app.url}/v1/responses", json=body, timeout=60).status_code == 200


def test_a_response_that_no_model_holds_is_not_found(app: Any, created: dict[str, Any]) -> None:
    other = "resp_" + "0" * 16 + created["id"][-16:]
    for method, path in (("GET", other), ("POST", f"{other}/cancel")):
        response = requests.request(method, f"{app.url}/v1/responses/{path}", timeout=60)
        assert response.status_code == 404
        assert "is not here" in response.json()["error"]["message"]
