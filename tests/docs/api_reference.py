"""Writes docs/api.md from the endpoint's tables of routes and vLLM's request models: ``make docs``."""

from pathlib import Path
from typing import Any

from deployments.endpoint.routes import ABSENT, CHAT, COMPLETIONS, NATIVE, OWN, Work

PAGE = Path(__file__).parents[2] / "docs" / "api.md"

HEADER = """\
# Which routes and parameters does the endpoint have?

This page is generated from `deployments/endpoint/routes.py` and vLLM's request models. Run `make docs` to write it
again. A test keeps them equal, and another one fails if the pinned vLLM has a route that is not here.

What speaks to `vllm serve` speaks to Tandem. A decode replica answers with vLLM's own code: texts, events, fields and
refusals are vLLM's. Below that code each prompt takes Tandem's path: the length rule, prefill, the handoff, retries.
[differences.md](differences.md) lists what is answered otherwise, and why.

## How requests are treated

- **Keys.** With `ingress.api_keys_file` each route needs a key, but for `/health`, `/ping`, `/version`, `/docs` and
  `/openapi.json`. A key is sent as `Authorization: Bearer KEY`, or as `X-API-Key: KEY`, as Anthropic's clients do.
- **Queue.** A request for tokens, or for a pass of a pooling model, waits for its turn and may be refused (429). Other
  requests do not wait, and count only against the limits of their key.
- **Lost replicas.** Another replica answers a request whose decode replica is lost. It continues a stream without a
  difference, also one of `/v1/responses`, `/v1/messages` and `/inference/v1/generate`. Where this is not possible (see
  [failures.md](failures.md)), the stream ends with the error event of its API.
- **Errors** have the form of their API: OpenAI's, or Anthropic's on the routes of messages.
- **A pool that cannot serve a route** answers 404, and names the tasks that its engine supports. Embeddings, scores and
  the other pooling routes need a service of their own ([pooling.md](pooling.md)).
- **Web pages** of other sites may call the API if `ingress.cors` is set.
- **The API's description** is at `/docs` and `/openapi.json` if `ingress.docs` is set.

### Stored responses

vLLM stores a response in the memory of the replica that made it, if the decode role has
`env: {VLLM_ENABLE_RESPONSES_API_STORE: "1"}`. Without it, as with vLLM's own default, `store` is ignored and
`background` is refused. `GET /v1/responses/{id}` and its `cancel` need no name of a model: they and
`previous_response_id` go to the replica that has the response. If that replica has ended or is about to end, the
response is gone (404). A replica that stops first computes its responses in the background to their end, for at most
`graceful_shutdown_timeout_s`: a client that streams one gets all of it. A response belongs to the API key that created
it; for other keys it is not there. vLLM never removes stored responses, so a replica's memory grows.

## Routes

| route | answer | work of an engine |
|---|---|---|
"""

_WORK = {Work.ANSWER: "tokens", Work.PROMPT: "one pass (pooling models)", Work.NONE: "none"}

_PARAMETERS = """
## Parameters

The names are vLLM's. A parameter that vLLM does not know is ignored. The endpoint removes those in *italics*, since no
client may set them ([differences.md](differences.md)).

| route | parameters |
|---|---|
"""

_ABSENT = """
## Routes of vLLM that Tandem does not have

They answer 404 with the reason.

| route | reason |
|---|---|
"""

_REMOVED = ("kv_transfer_params", "ec_transfer_params", "request_id", "priority", "kv_cache_report_mode")


def page() -> str:
    """The whole page."""
    routes = (CHAT, COMPLETIONS, *NATIVE)
    rows = [f"| `{route.method} {route.path}` | {route.what} | {_WORK[route.work]} |\n" for route in routes]
    rows += [f"| `{place}` | {what} | none |\n" for place, what in OWN.items()]
    names = parameters()
    bodies = [(route, names[route.path]) for route in routes if route.path in names]
    parameter_rows = [f"| `{route.path}` | {', '.join(map(_marked, found))} |\n" for route, found in bodies]
    absent = [f"| `{path}` | {why[0].upper()}{why[1:]}. |\n" for path, why in ABSENT.items()]
    return f"{HEADER}{''.join(rows)}{_PARAMETERS}{''.join(parameter_rows)}{_ABSENT}{''.join(absent)}"


def parameters() -> dict[str, list[str]]:
    """Names of the body's fields by path, from vLLM's request models."""
    from fastapi.routing import APIRoute
    from vllm.entrypoints.generate.generative_scoring.serving import GenerativeScoringRequest

    found = {"/generative_scoring": sorted(_fields(GenerativeScoringRequest))}
    for route in vllm_routes():
        if isinstance(route, APIRoute) and route.body_field is not None:
            found[route.path] = sorted(_fields(route.body_field.field_info.annotation))
    return found


def vllm_routes() -> list[Any]:
    """Routes of vLLM's application for all kinds of models, without an engine."""
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.entrypoints.pooling.classify.api_router import router as classify
    from vllm.entrypoints.pooling.embed.api_router import router as embed
    from vllm.entrypoints.pooling.pooling.api_router import router as pooling
    from vllm.entrypoints.pooling.scoring.api_router import router as scoring
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    app = build_app(arguments, supported_tasks=("generate",))
    return [route for router in (app, classify, embed, pooling, scoring) for route in router.routes]


def _fields(model: Any) -> set[str]:
    """The fields of a request model, or of all models of a union."""
    fields = getattr(model, "model_fields", None)
    if fields is not None:
        return {field.alias or name for name, field in fields.items()}
    return set().union(*map(_fields, getattr(model, "__args__", ())))


def _marked(name: str) -> str:
    return f"*`{name}`*" if name in _REMOVED else f"`{name}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
