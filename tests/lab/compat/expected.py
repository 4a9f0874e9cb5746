"""The differences that stay, each by a rule with its reason."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from tests.lab.compat.compare import Difference
from tests.lab.compat.shape import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """One rule; every pattern must match the whole of its text.

    Attributes:
        reason: why Tandem's answer is right.
        kind: kind of the difference.
        where: place of the difference.
        route: route of the shape.
        shape: name of the shape.
        vllm: what vLLM has.
        tandem: what Tandem has.
    """

    reason: str
    kind: str
    where: str
    route: str
    shape: str = ".*"
    vllm: str = ".*"
    tandem: str = ".*"

    def holds(self, shape: Shape, difference: Difference) -> bool:
        """Whether this rule explains a difference."""
        pairs = (
            (self.kind, difference.kind),
            (self.where, difference.where),
            (self.route, shape.route),
            (self.shape, shape.name),
            (self.vllm, difference.vllm),
            (self.tandem, difference.tandem),
        )
        return all(re.fullmatch(pattern, text, re.DOTALL) for pattern, text in pairs)


_ANY = r".*"
_ERROR = r"body(\[\])?\.error"
_ANTHROPIC = r"/v1/messages.*"
# Fields that name a request inside the engines, or say how its KV moves.
_INTERNAL = "request_id|priority|kv_transfer_params|ec_transfer_params"

EXPECTED: tuple[Expected, ...] = (
    Expected(
        reason="An error's type is OpenAI's or Anthropic's (CONVENTIONS, errors); vLLM's is the name of a class.",
        kind="value",
        where=rf"{_ERROR}\.type",
        route=_ANY,
        vllm="BadRequestError|Bad Request|NotFoundError|InternalServerError|NotImplementedError|Internal Server Error",
        tandem="invalid_request_error|not_found_error|server_error",
    ),
    Expected(
        reason="Errors of Anthropic's API have its form; vLLM's have OpenAI's if the body is wrong.",
        kind="missing|extra",
        where=rf"body\.type|{_ERROR}\.(code|param)",
        route=_ANTHROPIC,
    ),
    Expected(
        reason="An error's code is OpenAI's, which is a word or null; vLLM repeats the status.",
        kind="type|value",
        where=rf"{_ERROR}\.code",
        route=_ANY,
        vllm=r"\d+|int",
    ),
    Expected(
        reason="Tandem names the wrong field where vLLM names none.",
        kind="type|value",
        where=rf"{_ERROR}\.param",
        route=_ANY,
        vllm="None|null",
    ),
    Expected(
        reason="An error's param is the name of a field, as OpenAI has it; vLLM writes its place, or its own name.",
        kind="type|value",
        where=rf"{_ERROR}\.param",
        route=_ANY,
        vllm=r"'?body.*|input_tokens",
    ),
    Expected(
        reason="An error names the field that the client has sent.",
        kind="value",
        where=rf"{_ERROR}\.param",
        route="/v1/chat/completions|/v1/responses",
        vllm="max_tokens|response_id",
        tandem="max_completion_tokens|previous_response_id",
    ),
    Expected(
        reason="One sentence says what was wrong; vLLM prints pydantic's list, or what its parser has raised.",
        kind="value",
        where=rf"{_ERROR}\.message",
        route=_ANY,
        vllm=r"\d+ validation errors?( for .* model)?\s.*|\d+ validation errors?:.*",
    ),
    Expected(
        reason="A body that is no JSON object is told as that; vLLM prints what its code has raised.",
        kind="value",
        where=rf"{_ERROR}\.message",
        route="/generative_scoring|/invocations",
        tandem="the body (is not valid JSON: |must be a JSON object, got ).*",
    ),
    Expected(
        reason="Tandem names the field that is missing or empty; vLLM prints what failed later.",
        kind="value",
        where=rf"{_ERROR}\.message",
        route="/v1/chat/completions|/v1/completions",
        tandem="(messages|prompt) is (missing|empty).*",
    ),
    Expected(
        reason="An unknown model's error names those that there are.",
        kind="value",
        where=rf"{_ERROR}\.message",
        route=_ANY,
        vllm="The model `.*` does not exist.",
    ),
    Expected(
        reason="A response's error says why it may be missing.",
        kind="value",
        where=rf"{_ERROR}\.message",
        route="/v1/responses.*",
        vllm="Response with id .* not found.",
    ),
    Expected(
        reason="An error tells which byte is not UTF-8.",
        kind="value",
        where=rf"{_ERROR}\.message",
        route=_ANY,
        vllm="'utf-8' codec can't decode.*",
    ),
    Expected(
        reason="Errors of paths, methods and wrong encodings have the API's form too; vLLM has FastAPI's there.",
        kind="missing|extra",
        where=r"body\.(detail|error|type)",
        route=_ANY,
    ),
    Expected(
        reason="A body that is no JSON by its header is 415, as HTTP has it; vLLM says 400 or reads it all the same.",
        kind="status",
        where="",
        route=_ANY,
        vllm="(400|200) .*",
        tandem="415 .*",
    ),
    Expected(
        reason="A stream that is refused before its first token has the error's status; vLLM has sent 200 by then.",
        kind="status",
        where="",
        route=_ANY,
        vllm=r"200 \[\{'error'.*",
        tandem="400 .*",
    ),
    Expected(
        reason="Tandem names requests itself, orders them by their API keys and moves their KV, and so ignores what a "
        "client says of that (CONVENTIONS, errors: bad input leaks nothing).",
        kind="status",
        where="",
        route=_ANY,
        shape=rf".* ({_INTERNAL}) .*",
        vllm="400 .*",
        tandem="200 .*",
    ),
    Expected(
        reason="A client cannot choose the id of an answer: it names work in all engines.",
        kind="value",
        where=r"body.*id",
        route=_ANY,
        shape=".* request_id .*",
    ),
    Expected(
        reason="The model's name is read first, on every route alike.",
        kind="status",
        where="",
        route=_ANY,
        shape=".* model .*",
        tandem="(400 model must be a string|400 model: |404 the model ).*",
    ),
    Expected(
        reason="OpenAI has the route of one model; vLLM does not.",
        kind="status",
        where="",
        route="/v1/models/.*|other paths",
        shape=".*/v1/models/.*",
        vllm="404.*",
    ),
    Expected(
        reason="Models are Tandem's.",
        kind="value",
        where=r"body\.data\[\]\.(owned_by|permission\[\]\.id)",
        route="/v1/models",
    ),
    Expected(
        reason="The routes of pooling models are there with every model, and say what its engine can do.",
        kind="status",
        where="",
        route="other paths",
        vllm="404 .*",
        tandem="(405|415|400) .*",
    ),
    Expected(
        reason="A route that Tandem does not have says so (docs/api.md).",
        kind="status",
        where="",
        route=_ANY,
        tandem="404 .*Tandem does not have it: .*",
    ),
    Expected(
        reason="HTTP's HEAD is answered where GET is.",
        kind="status|header",
        where="|allow",
        route="/health|/ping",
    ),
    Expected(
        reason="The description has the endpoint's name and routes.",
        kind="value|missing|extra|type",
        where=r"body(\..*)?",
        route="/openapi.json|/docs|/redoc",
    ),
    Expected(
        reason="The metrics are Tandem's, and those of all its processes.",
        kind="value|header|status",
        where="body|content-type|",
        route="/metrics",
        tandem="(?!404).*",
    ),
    Expected(
        reason="A beam search with the prompt's logprobs is refused; vLLM fails.",
        kind="status",
        where="",
        route="/v1/completions",
        shape=".*beam search with echo",
        vllm="500 .*",
        tandem="400 .*",
    ),
    Expected(
        reason="Of two faults of a request, Tandem names the other one.",
        kind="value",
        where=rf"{_ERROR}\.message",
        route="/v1/completions",
        shape=".*beam search with echo streamed",
    ),
    Expected(
        reason="Bytes that are no tensor are the client's fault; vLLM fails.",
        kind="status",
        where="",
        route="/v1/completions",
        shape=".* prompt_embeds .*",
        vllm="500 .*",
        tandem="400 .*",
    ),
    Expected(
        reason="A stream that fails ends with the API's event for it; vLLM cuts the connection.",
        kind="cut",
        where="",
        route="/v1/responses",
    ),
    Expected(
        reason="A response that was no stream cannot be read as one; vLLM cuts the connection.",
        kind="status",
        where="",
        route="/v1/responses/.*",
        vllm="(0|200) .*",
        tandem="400 Unknown response_id.*",
    ),
)


def rule_of(shape: Shape, difference: Difference, rules: Iterable[Expected] = EXPECTED) -> Expected | None:
    """The first rule that explains a difference; ``None``: none does."""
    return next((rule for rule in rules if rule.holds(shape, difference)), None)
