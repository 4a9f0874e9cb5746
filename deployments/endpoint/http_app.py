"""The endpoint's HTTP application: its errors, and which web pages may call it."""

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from ray import serve
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from deployments.endpoint.client_request import error_response, path_of
from deployments.endpoint.config import CorsConfig
from deployments.endpoint.routes import ABSENT, error_form
from deployments.wire.openai_errors import OpenAIError

app = FastAPI(title="Tandem", docs_url=None, redoc_url=None, openapi_url=None)


@app.exception_handler(OpenAIError)
async def _openai_error(request: Request, error: OpenAIError) -> Response:
    return error_response(error, error_form(path_of(request)))


@app.exception_handler(HTTPException)
async def _http_error(request: Request, error: HTTPException) -> Response:
    path = path_of(request)
    why = f"Tandem does not have it: {ABSENT[path]}" if path in ABSENT else error.detail
    response = error_response(OpenAIError(error.status_code, f"{request.method} {path}: {why}"), error_form(path))
    response.headers.update(error.headers or {})  # such as Allow, if the method is wrong
    return response


@app.exception_handler(Exception)
async def _unexpected_error(request: Request, error: Exception) -> Response:
    """Starlette raises the error again after this response, so Serve logs its traceback."""
    failure = OpenAIError(500, f"the endpoint failed: {type(error).__name__}; its log has the traceback")
    return error_response(failure, error_form(path_of(request)))


class ConfiguredCors:
    """Starlette's CORS middleware with the settings of ``ingress.cors``; without settings it changes nothing.

    The application is made before the endpoint's replica knows its configuration, so it is read at the first request.
    """

    def __init__(self, app: Any, settings: Callable[[], CorsConfig | None]) -> None:
        self._app = app
        self._settings = settings
        self._with_cors: Any = None  # the application that answers; ``None`` before the first request

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Serve one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._with_cors is None:
            cors = self._settings()
            self._with_cors = self._app if cors is None else CORSMiddleware(self._app, **cors.middleware_arguments())
        await self._with_cors(scope, receive, send)


def _replica_settings() -> CorsConfig | None:
    cors: CorsConfig | None = serve.get_replica_context().servable_object.cors
    return cors


app.add_middleware(ConfiguredCors, settings=_replica_settings)
