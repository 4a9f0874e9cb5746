"""The routes that are fuzzed: their paths, and a valid body of each."""

import re
from collections.abc import Callable
from typing import Any

from deployments.endpoint.routes import CHAT, COMPLETIONS, NATIVE, OPENAPI, OWN, Work

Body = dict[str, Any]

# Route of requests to the server of ``ingress.metrics_port``, which is not the endpoint.
METRICS_PORT = "metrics port"
OPENAPI_ROUTE = OPENAPI.path
# Route of requests to every path that the endpoint does not serve.
OTHER_ROUTE = "other"
_POSTED = tuple(route for route in (CHAT, COMPLETIONS, *NATIVE) if route.has_body)
# Routes with a body; by these paths the bodies are drawn.
BODY_ROUTES = tuple(route.path for route in _POSTED)
# Routes of pooling models, which the engines here do not have.
POOLING_ROUTES = tuple(route.path for route in _POSTED if route.work is Work.PROMPT)
_OWN_PATHS = tuple(dict.fromkeys(place.partition(" ")[2] for place in OWN))
API_ROUTES = (CHAT.path, COMPLETIONS.path, *(route.path for route in NATIVE), *_OWN_PATHS)
ROUTES = (*API_ROUTES, METRICS_PORT, OTHER_ROUTE)
# Routes whose answers are no JSON objects: texts, pages, nothing, or (SageMaker's) those of another route.
_NO_JSON_ROUTES = frozenset({"/health", "/ping", "/docs", "/redoc", "/metrics"})
JSON_ROUTES = frozenset(API_ROUTES) - _NO_JSON_ROUTES
_PUBLIC_ROUTES = frozenset({"/health", "/ping", "/version", "/docs", "/redoc", "/openapi.json"})
KEYED_ROUTES = frozenset(API_ROUTES) - _PUBLIC_ROUTES
_PATTERNS = {path: re.compile(re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(path))) for path in API_ROUTES if "{" in path}
# The name of a model may have slashes.
_PATTERNS["/v1/models/{model}"] = re.compile("/v1/models/.+")


def route_of(path: str) -> str:
    """The route to which a path belongs; the query does not count."""
    plain = path.partition("?")[0]
    if plain in API_ROUTES:
        return plain
    return next((route for route, pattern in _PATTERNS.items() if pattern.fullmatch(plain)), OTHER_ROUTE)


def valid_body(route: str, model: str, text: str, max_tokens: int) -> Body:
    """A body that the route accepts: a prompt of this text, and an answer of at most this number of tokens."""
    fields = _BODIES[route](text)
    if route == "/inference/v1/generate":
        fields["sampling_params"] = {"max_tokens": max_tokens}
    elif route == "/v1/responses":
        fields["max_output_tokens"] = max_tokens
    elif route not in _NO_LIMIT:
        fields["max_tokens"] = max_tokens
    return {"model": model, **fields}


def _said(text: str) -> list[Body]:
    return [{"role": "user", "content": text}]


def _ids(text: str) -> list[int]:
    """Token ids of the tiny model, one for each four letters, which are about as many tokens."""
    return [300 + len(text) % 700] * max(1, len(text) // 4)


def _generated(text: str) -> Body:
    return {"choices": [{"index": 0, "token_ids": _ids(text), "finish_reason": "stop"}]}


_BODIES: dict[str, Callable[[str], Body]] = {
    **dict.fromkeys(
        ("/v1/chat/completions", "/v1/chat/completions/render", "/invocations"), lambda text: {"messages": _said(text)}
    ),
    **dict.fromkeys(("/v1/messages", "/v1/messages/render"), lambda text: {"messages": _said(text)}),
    **dict.fromkeys(("/v1/completions", "/v1/completions/render"), lambda text: {"prompt": text}),
    "/v1/messages/count_tokens": lambda text: {"messages": _said(text)},
    "/v1/responses": lambda text: {"input": text},
    "/v1/chat/completions/batch": lambda text: {"messages": [_said(text), _said("y")]},
    "/inference/v1/generate": lambda text: {"token_ids": _ids(text)},
    "/generative_scoring": lambda text: {"query": text, "items": ["x", "y"], "label_token_ids": [300, 301]},
    "/tokenize": lambda text: {"prompt": text},
    "/detokenize": lambda text: {"tokens": _ids(text)},
    "/v1/chat/completions/derender": lambda text: {"generate_response": _generated(text)},
    "/v1/completions/derender": lambda text: {"generate_responses": [_generated(text)]},
    **dict.fromkeys(("/v1/embeddings", "/pooling", "/classify"), lambda text: {"input": text}),
    "/v2/embed": lambda text: {"texts": [text], "input_type": "search_query"},
    **dict.fromkeys(("/score", "/v1/score"), lambda text: {"text_1": text, "text_2": "x"}),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), lambda text: {"query": text, "documents": ["x", "y"]}),
}
# Routes whose answers have no tokens, so that a limit would be one more field that vLLM ignores.
_NO_LIMIT = frozenset(
    {route.path for route in _POSTED if route.work is not Work.ANSWER and not route.path.endswith("/render")}
    | {"/generative_scoring"}
)
