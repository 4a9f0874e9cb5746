"""What the endpoint reads of a body besides the prompt, with the types that vLLM gives these fields.

vLLM's request models convert values: ``n`` may be ``1.0``, ``stream`` may be ``"true"``. Admission must know the values
that the engine will use, so pydantic converts them here by the same rules.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from deployments.wire.openai_errors import wrong_type

_MOST_ANSWERS = 10_000  # bound of the estimate; decode refuses a request for more


class RequestedAnswer(BaseModel):
    """The fields of a completion. Types are those of vLLM's request model; vLLM refuses some values on decode."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    model: str | None = None
    stream: bool | None = None
    n: int | None = None
    max_tokens: int | None = None

    @property
    def most_output_tokens(self) -> int | None:
        """Limit of the output, at least 1 token; ``None``: no limit, or one that decode will refuse.

        With a limit of 0, which asks for an echo of the prompt, the engine computes one token.
        """
        return self._limit(self.max_tokens)

    def answers(self, prompts: int) -> int:
        """Number of answers to this number of prompts."""
        return min(_MOST_ANSWERS, prompts * max(1, self.n or 1))

    def _limit(self, tokens: int | None) -> int | None:
        return None if tokens is None or tokens < 0 else max(1, tokens)


class RequestedChatAnswer(RequestedAnswer):
    """The fields of a chat completion."""

    max_completion_tokens: int | None = None

    @property
    def most_output_tokens(self) -> int | None:
        """Limit of the output, tokens: the newer field if both are set."""
        return self._limit(self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens)


_ANSWERS: dict[str, type[RequestedAnswer]] = {"chat": RequestedChatAnswer, "completions": RequestedAnswer}


def requested_answer(endpoint: str, body: dict[str, Any], *, is_checked: bool = True) -> RequestedAnswer:
    """The fields of a request to ``endpoint`` (``chat`` or ``completions``).

    ``is_checked``: whether a field of a wrong type raises OpenAIError, 400. Otherwise the fields of such a body are
    left out, since their names are those of another route, and vLLM refuses the body by its own names.
    """
    try:
        return _ANSWERS[endpoint].model_validate(body)
    except ValidationError as error:
        if is_checked:
            raise wrong_type(error) from None
        return _ANSWERS[endpoint]()
