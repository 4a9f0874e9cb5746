"""The token ids that a client may give as the prompt of a chat, in place of its messages.

vLLM reads them in ``kv_transfer_params.prompt_token_ids``. They are the prompt, as the ids of a completion are.
All other keys of ``kv_transfer_params`` belong to the handoff, and no client may set them.
"""

from typing import Any

PARAMETERS = "kv_transfer_params"
KEY = "prompt_token_ids"


def chat_prompt_ids(endpoint: str, body: dict[str, Any]) -> Any:
    """What a chat gives as its prompt's ids, not checked yet; ``None``: the messages are the prompt."""
    parameters = body.get(PARAMETERS) if endpoint == "chat" else None
    return (parameters.get(KEY) or None) if isinstance(parameters, dict) else None
