"""Shapes by hand: what no request model tells, and fields that work together."""

import json
from collections.abc import Iterator
from typing import Any

from tests.lab.compat.request_models import CHAT, COMPLETION, RESPONSE, TOKENS, USER
from tests.lab.compat.schema_shapes import named
from tests.lab.compat.shape import ID, Shape, bare, post
from tests.lab.compat.values import FUNCTION, SHORT, TOOL

_COUNT = {"model": "tiny", "messages": CHAT["messages"]}
# A valid body of each route that takes one.
VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/responses": RESPONSE,
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": _COUNT,
    "/v1/chat/completions/batch": CHAT | {"messages": [[USER], [USER]]},
    "/inference/v1/generate": TOKENS,
    "/tokenize": {"model": "tiny", "prompt": "{name}"},
    "/detokenize": {"model": "tiny", "tokens": [300]},
    "/generative_scoring": {
        "model": "tiny",
        "query": "{name}: may I copy it?",
        "items": ["yes", "no"],
        "label_token_ids": [300, 301],
    },
    "/invocations": CHAT,
    "/v1/chat/completions/render": CHAT,
    "/v1/completions/render": COMPLETION,
    "/v1/messages/render": CHAT,
}
_GETS = ("/v1/models", "/v1/models/tiny", "/v1/models/unknown", "/version", "/ping", "/load", "/health",
         "/tokenizer_info", "/openapi.json", "/docs", "/redoc", "/metrics", "/server_info")  # fmt: skip
_UNKNOWN = ("/", "/v1", "/v1/", "/v1/unknown", "/v1/audio/speech", "/v1/embeddings", "/pooling", "/score", "/v1/rerank",
            "/classify", "/start_profile", "/scale_elastic_ep", "/v1/load_lora_adapter", "/v1/moderations",
            "/reset_prefix_cache", "/sleep")  # fmt: skip
_ORIGIN = {"origin": "https://chat.example"}


def written_shapes() -> Iterator[Shape]:
    """All shapes by hand."""
    for route, body in VALID.items():
        yield from _envelopes(route, body)
    yield from _plain_routes()
    yield from _sequences()
    for route, name, change in _combinations():
        yield post(f"{route} {name}", route, named(VALID[route] | change, f"{route} {name}"))
    for route in ("/generative_scoring", "/invocations", "/v1/messages/render"):
        for field in VALID[route]:
            for kind, value in (("wrong type", {"wrong": [1.5]}), ("null", None)):
                name = f"{route} {field} {kind}"
                body = named(VALID[route], name) | SHORT.get(field, {}) | {field: value}
                yield post(name, route, body, is_determined=body.get("temperature", 0) is not None)


def _envelopes(route: str, body: dict[str, Any]) -> Iterator[Shape]:
    """One route: its valid body, wrong methods, headers, and bodies that are no such JSON."""
    yield post(f"{route} valid", route, named(body, f"{route} valid"))
    raw = json.dumps(named(body, f"{route} envelope")).encode()
    bodies = {
        "without a body": None,
        "empty body": b"",
        "broken JSON": raw[:-5],
        "a list": b"[" + raw + b"]",
        "null as body": b"null",
        "a string as body": b'"x"',
        "not UTF-8": b'{"model": "\xff"}',
        "NaN": raw[:-1] + b', "temperature": NaN}',
        "unknown field": raw[:-1] + b', "unknown_field": 1}',
        "field twice": raw[:-1] + b', "model": "tiny"}',
    }
    for name, each in bodies.items():
        yield Shape(name=f"{route} {name}", route=route, path=route, raw=each)
    headers = {
        "without content type": {},
        "text/plain": {"content-type": "text/plain"},
        "JSON in UTF-8": {"content-type": "application/json; charset=utf-8"},
        "JSON of a vendor": {"content-type": "application/vnd.x+json"},
        "form": {"content-type": "application/x-www-form-urlencoded"},
        "own request id": {"content-type": "application/json", "x-request-id": "mine"},
        "ORCA": {"content-type": "application/json", "endpoint-load-metrics-format": "JSON"},
        "from a page": {"content-type": "application/json", **_ORIGIN},
        "a key though there are none": {"content-type": "application/json", "authorization": "Bearer x"},
    }
    for name, each_headers in headers.items():
        yield Shape(name=f"{route} {name}", route=route, path=route, raw=raw, headers=each_headers)
    for method in ("GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS"):
        yield bare(f"{method} {route}", method, route)
    yield _preflight(route, "POST")
    yield Shape(name=f"{route} with a slash", route=route, path=route + "/", raw=raw)
    yield Shape(name=f"{route} with a query", route=route, path=route + "?x=1", raw=raw)


def _preflight(route: str, method: str) -> Shape:
    asked = {"access-control-request-method": method, "access-control-request-headers": "authorization, content-type"}
    return bare(f"preflight {method} {route}", "OPTIONS", route, headers=_ORIGIN | asked)


def _plain_routes() -> Iterator[Shape]:
    """Routes without a body, in every method, and paths that are no routes."""
    for path in _GETS:
        for method in ("GET", "HEAD", "POST", "PUT", "OPTIONS"):
            yield bare(f"{method} {path}", method, path)
        yield bare(f"GET {path} from a page", "GET", path, headers=_ORIGIN)
        yield _preflight(path, "GET")
    for path in _UNKNOWN:
        for method in ("GET", "POST"):
            yield bare(f"{method} {path}", method, path, route="other paths")
    yield bare("DELETE /v1/models/tiny", "DELETE", "/v1/models/tiny", route="other paths")


def _sequences() -> Iterator[Shape]:
    """Responses that are stored: read, cancelled, continued; and ids that no response has."""
    route = "/v1/responses"
    one, cancel = "/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel"
    stored = {
        "stored": {"store": True},
        "background": {"store": True, "background": True},
        "streamed and stored": {"store": True, "stream": True},
        "streamed in the background": {"store": True, "stream": True, "background": True},
        "not stored": {"store": False},
    }
    for name, change in stored.items():
        yield post(name, route, named(RESPONSE, name) | change)
        yield bare(f"{name}, read", "GET", f"{route}/{ID}", route=one, after=name)
        yield bare(f"{name}, read as a stream", "GET", f"{route}/{ID}?stream=true", route=one, after=name)
        yield bare(
            f"{name}, read from event 2", "GET", f"{route}/{ID}?stream=true&starting_after=2", route=one, after=name
        )
        following = named(RESPONSE, f"{name}, continued") | {"previous_response_id": ID}
        yield post(f"{name}, continued", route, following, after=name)
        yield bare(f"{name}, cancelled", "POST", f"{route}/{ID}/cancel", route=cancel, after=name)
    long = named(RESPONSE, "long") | {"store": True, "background": True, "max_output_tokens": 2000}
    yield post("long in the background", route, long)
    for action, method, end, path in (
        ("cancelled", "POST", "/cancel", cancel),
        ("cancelled again", "POST", "/cancel", cancel),
        ("read after that", "GET", "", one),
    ):
        yield bare(f"long, {action}", method, f"{route}/{ID}{end}", route=path, after="long in the background")
    for name in ("resp_unknown", "unknown", "resp_%00", "a%2Fb"):
        yield bare(f"read {name}", "GET", f"{route}/{name}", route=one)
        yield bare(f"cancel {name}", "POST", f"{route}/{name}/cancel", route=cancel)
    for method in ("DELETE", "PUT", "OPTIONS"):
        yield bare(f"{method} a response", method, f"{route}/resp_unknown", route=one)


def _combinations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Fields that work together: route, name, and the fields."""
    chat, completions, messages, responses = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
    streamed: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    tool = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}}
    for is_streamed, more in ((False, {}), (True, streamed)):
        end = " streamed" if is_streamed else ""
        yield chat, f"two choices with logprobs{end}", {"n": 2, "logprobs": True, "top_logprobs": 2, **more}
        yield chat, f"named tool{end}", {**tool, "max_tokens": 60, **more}
        yield chat, f"two required tools{end}", {
            "tools": [TOOL, {"type": "function", "function": FUNCTION | {"name": "other"}}],
            "tool_choice": "required", "max_tokens": 80, **more}  # fmt: skip
        yield chat, f"tools and a schema{end}", {**tool, "response_format": {"type": "json_object"}, **more}
        yield chat, f"all that returns more{end}", {
            "logprobs": True, "top_logprobs": 1, "return_token_ids": True, "return_tokens_as_token_ids": True,
            "prompt_logprobs": 1, "return_prompt_text": True, **more}  # fmt: skip
        yield chat, f"seeded sampling{end}", {"temperature": 1.0, "seed": 5, "top_p": 0.9, "top_k": 50, **more}
        yield chat, f"stop string kept{end}", {"stop": ["e"], "include_stop_str_in_output": True, **more}
        yield chat, f"longer than the context{end}", {"messages": [{"role": "user", "content": "you may " * 9000}],
                                                      **more}  # fmt: skip
        yield chat, f"old functions{end}", {"functions": [FUNCTION], "function_call": "auto", **more}
        yield chat, f"other people's fields{end}", {
            "web_search_options": {}, "modalities": ["text"], "audio": {"voice": "x", "format": "wav"},
            "store": False, "metadata": {"a": "b"}, "service_tier": "auto", "prediction": None,
            "verbosity": "low", "safety_identifier": "x", "prompt_cache_key": "k", **more}  # fmt: skip
        yield completions, f"two prompts, two choices{end}", {
            "prompt": ["{name} one", "{name} two"], "n": 2, "logprobs": 1, **more}  # fmt: skip
        yield completions, f"echo of two prompts{end}", {
            "prompt": ["{name} one", "{name} two"], "echo": True, "logprobs": 2, **more}  # fmt: skip
        yield completions, f"scores a prompt{end}", {"echo": True, "logprobs": 1, "max_tokens": 0, **more}
        yield completions, f"best of two{end}", {"n": 2, "best_of": 2, **more}
        yield completions, f"token ids back{end}", {"return_token_ids": True, "prompt_logprobs": 0, **more}
        yield completions, f"a long answer{end}", {"max_tokens": 200, "ignore_eos": True, **more}
        yield completions, f"longer than the context{end}", {"prompt": [300] * 9000, **more}
        yield completions, f"beam search with echo{end}", {
            "use_beam_search": True, "n": 2, "echo": True, "logprobs": 1, **more}  # fmt: skip
        yield completions, f"cold prompt of 100 ids{end}", {"prompt": [*range(400, 500)], "max_tokens": 3, **more}
        yield completions, f"the same prompt again{end}", {"prompt": [*range(400, 500)], "max_tokens": 3, **more}
        yield completions, f"a longer prompt{end}", {"prompt": [*range(400, 580)], "max_tokens": 3, **more}
        stream = {"stream": True} if is_streamed else {}
        yield messages, f"tool and system{end}", {
            "system": "{name}", "tools": [{"name": "get_weather", "input_schema": FUNCTION["parameters"]}],
            "tool_choice": {"type": "any"}, "max_tokens": 60, **stream}  # fmt: skip
        yield messages, f"stop sequence{end}", {"stop_sequences": ["e"], "max_tokens": 20, **stream}
        yield messages, f"thinking{end}", {"thinking": {"type": "enabled", "budget_tokens": 1024}, **stream}
        yield messages, f"longer than the context{end}", {
            "messages": [{"role": "user", "content": "you may " * 9000}], **stream}  # fmt: skip
        response_tool = {"type": "function", "name": "get_weather", "parameters": FUNCTION["parameters"]}
        yield responses, f"required tool{end}", {
            "tools": [response_tool], "tool_choice": "required", "max_output_tokens": 60, **stream}  # fmt: skip
        yield responses, f"parsed{end}", {
            "text": {"format": {"type": "json_schema", "name": "x", "strict": True, "schema": {
                "type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
                "additionalProperties": False}}}, "max_output_tokens": 30, **stream}  # fmt: skip
        yield responses, f"longer than the context{end}", {"input": "you may " * 9000, **stream}
        yield responses, f"logprobs{end}", {
            "include": ["message.output_text.logprobs"], "top_logprobs": 2, **stream}  # fmt: skip
