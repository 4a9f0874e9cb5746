"""What vLLM's Responses API keeps of earlier responses, in the memory of its process."""

from typing import Any


def has_response(app: Any, response_id: str) -> bool:
    """Whether a response is stored; ``app``: vLLM's HTTP application.

    Needs: ``openai_serving_responses.response_store`` in the application's state, a dict by id.
    Without it: stored responses are not found.
    """
    serving = getattr(app.state, "openai_serving_responses", None)
    return response_id in getattr(serving, "response_store", ())
