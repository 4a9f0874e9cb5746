"""What vLLM's Responses API keeps in the memory of its process: earlier responses, and work in the background."""

import asyncio
from typing import Any


def has_response(app: Any, response_id: str) -> bool:
    """Whether a response is stored; ``app``: vLLM's HTTP application.

    Needs: ``openai_serving_responses.response_store`` in the application's state, a dict by id.
    Without it: stored responses are not found.
    """
    return response_id in getattr(_serving(app), "response_store", ())


def background_work(app: Any) -> list[asyncio.Task[Any]]:
    """The tasks that compute responses in the background; ``app``: vLLM's HTTP application.

    Needs: ``openai_serving_responses.background_tasks`` in the application's state, a dict of tasks by response id.
    Without it: a replica that stops does not wait for responses in the background.
    """
    return list(getattr(_serving(app), "background_tasks", {}).values())


def _serving(app: Any) -> Any:
    return getattr(app.state, "openai_serving_responses", None)
