"""The token ids that a client may give as the prompt of a chat, in place of its messages.

vLLM reads them in ``kv_transfer_params.prompt_token_ids``. They are the prompt, as the ids of a completion are.
All other keys of ``kv_transfer_params`` belong to the handoff, and no client may set them.
"""

from typing import Any

TRANSFER_PARAMS = "kv_transfer_params"
PROMPT_IDS = "prompt_token_ids"


def chat_prompt_ids(endpoint: str, body: dict[str, Any]) -> Any:
    """What a chat gives as its prompt's ids, not checked yet; ``None``: the messages are the prompt."""
    parameters = body.get(TRANSFER_PARAMS) if endpoint == "chat" else None
    return (parameters.get(PROMPT_IDS) or None) if isinstance(parameters, dict) else None
