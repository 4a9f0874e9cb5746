"""The longest prompt that the endpoint takes, for answers and for pooling."""

from vllm.exceptions import VLLMValidationError


def check_prompt(input_tokens: int, most_tokens: int | None) -> None:
    """Raises VLLMValidationError: a prompt has more than ``most_tokens``; ``None``: the context is the limit."""
    if most_tokens is not None and input_tokens > most_tokens:
        raise VLLMValidationError(
            f"the prompt has {input_tokens} tokens, and this endpoint takes at most {most_tokens}: send a shorter one",
            parameter="prompt_token_ids",
            value=input_tokens,
        )
