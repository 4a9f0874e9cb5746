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


# The routes that Tandem answers itself, and paths that are none.
_OWN = r"/v1/(chat/completions|completions|models|models/.*)|/health|/server_info|/metrics|other paths"
_ANY = r".*"
_ERROR = r"body(\[\])?\.error"

EXPECTED: tuple[Expected, ...] = (
    Expected(
        reason="Tandem names every answer, so that its line in a log can be found.",
        kind="header",
        where="x-request-id",
        route=_ANY,
        vllm="",
    ),
    Expected(
        reason="An error's type is OpenAI's (CONVENTIONS, errors); vLLM's is the name of a class or of a status.",
        kind="value",
        where=rf"{_ERROR}\.type",
        route=_OWN,
        vllm="BadRequestError|Bad Request|NotFoundError|InternalServerError",
        tandem="invalid_request_error|server_error",
    ),
    Expected(
        reason="An error's code is OpenAI's, which is a word or null; vLLM repeats the status.",
        kind="type|value",
        where=rf"{_ERROR}\.code",
        route=_OWN,
        vllm=r"\d+|int",
    ),
    Expected(
        reason="Tandem names the wrong field where vLLM names none.",
        kind="type|value",
        where=rf"{_ERROR}\.param",
        route=_OWN,
        vllm="None|null",
    ),
    Expected(
        reason="An error's param is the name of a field, as OpenAI has it; vLLM writes its place in the HTTP request.",
        kind="type|value",
        where=rf"{_ERROR}\.param",
        route=_OWN,
        vllm=r"'?body.*",
    ),
    Expected(
        reason="One sentence says what was wrong; vLLM prints pydantic's list.",
        kind="value",
        where=rf"{_ERROR}\.message",
        route=_OWN,
        vllm=r"\d+ validation errors?:.*",
    ),
    Expected(
        reason="Errors of paths and methods are OpenAI's too; vLLM has FastAPI's there.",
        kind="missing|extra",
        where=r"body\.(detail|error)",
        route=_OWN,
    ),
    Expected(
        reason="A body that is no JSON by its header is 415, as HTTP has it; vLLM says 400 or reads it all the same.",
        kind="status",
        where="",
        route=_OWN,
        vllm="(400|200) .*",
        tandem="415 .*",
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
        reason="A beam search with the prompt's logprobs is refused; vLLM fails.",
        kind="status",
        where="",
        route="/v1/completions",
        shape=".*beam search with echo",
        vllm="500 .*",
        tandem="400 .*",
    ),
)


def rule_of(shape: Shape, difference: Difference, rules: Iterable[Expected] = EXPECTED) -> Expected | None:
    """The first rule that explains a difference; ``None``: none does."""
    return next((rule for rule in rules if rule.holds(shape, difference)), None)
