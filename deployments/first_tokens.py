"""Tells of the first token of an answer in one piece, of which vLLM says nothing before its last (private in 0.29)."""

import asyncio
from typing import Any


class FirstTokens:
    """The requests whose first token somebody waits for."""

    def __init__(self, client: Any) -> None:
        """``client``: the engine's, an ``AsyncLLM`` or an emulated one."""
        self._client = client
        self._waiting: dict[str, list[asyncio.Event]] = {}  # clients choose ids, and may choose one twice

    def watch(self, request_id: str, has_first: asyncio.Event) -> None:
        """Set ``has_first`` once the engine has the request's first token, or the first of its answers."""
        self._waiting.setdefault(request_id, []).append(has_first)

    def leave(self, request_id: str, has_first: asyncio.Event) -> None:
        """It has ended."""
        left = [event for event in self._waiting.pop(request_id, []) if event is not has_first]
        if left:
            self._waiting[request_id] = left

    def look(self) -> None:
        """To be called after each step of the engine."""
        for request_id in [one for one in self._waiting if self._has_first(one)]:
            for has_first in self._waiting.pop(request_id):
                has_first.set()

    def _has_first(self, request_id: str) -> bool:
        if (emulated := getattr(self._client, "has_first", None)) is not None:
            return bool(emulated(request_id))
        side = getattr(self._client, "output_processor", None)  # it knows a request's answers by ids of their own
        states = [side.request_states.get(one) for one in side.external_req_ids.get(request_id, ())] if side else []
        return any(state is not None and not state.is_prefilling for state in states)
