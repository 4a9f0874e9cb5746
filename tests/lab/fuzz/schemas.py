"""The schemas of the bodies of all routes, from vLLM's own application without an engine."""

from typing import Any

from tests.docs.api_reference import vllm_routes

Schema = dict[str, Any]

# SageMaker's route, whose body is that of any other route. FastAPI has no schema of it.
_SAGEMAKER = "/invocations"
_SAGEMAKERS = ("/v1/chat/completions", "/v1/completions", "/inference/v1/generate", "/v1/embeddings")


def vllm_description() -> Schema:
    """The description of vLLM's API (OpenAPI), with the routes of all kinds of models."""
    from fastapi.openapi.utils import get_openapi

    return get_openapi(title="vLLM", version="0", routes=vllm_routes())


def body_schemas(description: Schema) -> dict[str, Schema]:
    """The fields of each route's body by path, and under ``$defs`` the schemas to which these refer.

    ``description``: an OpenAPI document, such as the endpoint's own.
    """
    from vllm.entrypoints.generate.generative_scoring.serving import GenerativeScoringRequest

    definitions = description["components"]["schemas"]
    found: dict[str, Schema] = {"/generative_scoring": GenerativeScoringRequest.model_json_schema()}
    for path, methods in description["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {})
        if "application/json" in content:
            fields = _fields(content["application/json"]["schema"], definitions)
            found[path] = {"properties": fields, "$defs": definitions}
    parts = [found[path]["properties"] for path in _SAGEMAKERS if path in found]
    found[_SAGEMAKER] = {
        "properties": {name: part for one in parts for name, part in one.items()},
        "$defs": definitions,
    }
    return found


def _fields(schema: Schema, definitions: Schema) -> Schema:
    """The fields of a body, or of all bodies that a route takes."""
    if "$ref" in schema:
        return _fields(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    fields: Schema = dict(schema.get("properties", {}))
    for one in schema.get("anyOf", ()):
        fields |= _fields(one, definitions)
    return fields
