"""Which web pages of other sites may call the endpoint."""

from typing import Any

import httpx
import pytest
from fastapi import FastAPI

pytestmark = pytest.mark.ray

PAGE = {"Origin": "https://chat.example.org"}
PREFLIGHT = {**PAGE, "Access-Control-Request-Method": "POST"}


async def answer(cors: Any, method: str, headers: dict[str, str]) -> httpx.Response:
    from deployments.endpoint.config import CorsConfig
    from deployments.endpoint.http_app import ConfiguredCors

    app = FastAPI()

    @app.get("/v1/models")
    async def models() -> dict[str, str]:
        return {}

    settings = None if cors is None else CorsConfig.model_validate(cors)
    transport = httpx.ASGITransport(app=ConfiguredCors(app, lambda: settings))
    async with httpx.AsyncClient(transport=transport, base_url="http://endpoint") as client:
        return await client.request(method, "/v1/models", headers=headers)


async def test_pages_of_every_site_may_call_as_in_vllm() -> None:
    assert (await answer({}, "GET", PAGE)).headers["access-control-allow-origin"] == "*"
    assert (await answer({}, "OPTIONS", PREFLIGHT)).status_code == 200


async def test_pages_of_other_sites_may_not() -> None:
    cors = {"allowed_origins": ["https://other.example.org"]}
    assert "access-control-allow-origin" not in (await answer(cors, "GET", PAGE)).headers
    assert (await answer(cors, "OPTIONS", PREFLIGHT)).status_code == 400


async def test_a_cache_learns_that_the_answer_depends_on_the_page() -> None:
    assert (await answer({}, "GET", {})).headers["vary"] == "Origin"


async def test_without_settings_nothing_is_added() -> None:
    assert not {"vary", "access-control-allow-origin"} & (await answer(None, "GET", PAGE)).headers.keys()
    assert (await answer(None, "OPTIONS", PREFLIGHT)).status_code == 405
