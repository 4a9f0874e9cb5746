"""The limit of answers to one request (pure)."""

from deployments.wire.openai_errors import OpenAIError

# Most answers of a request (prompts times n): each is a request of its own to the engine. vLLM has the same limit for
# prompts, and a far higher one for n.
_MOST_ANSWERS = 1024


def check_answers(answers: int, param: str | None) -> None:
    """Raises OpenAIError: 400, a request asks for too many answers; ``param``: the field at fault, if it is known."""
    if answers > _MOST_ANSWERS:
        message = f"{answers} answers were asked for in one request: ask for at most {_MOST_ANSWERS}"
        raise OpenAIError(400, message, param=param)
