"""How processes find the adapter board of an application, and follow what it knows."""

import asyncio
import uuid
from typing import Any

from router.adapters import AdapterNews
from router.ray_actors import follow

# Shortest time between two questions to the board, seconds: while many replicas load, each of their reports is news.
INTERVAL_S = 0.1


def adapter_board_key(app: str) -> bytes:
    """Key in Ray's key-value store under which the name of an application's adapter board is announced."""
    return f"tandem:adapters:{app}".encode()


class AdapterFeed:
    """The board's latest news, kept up to date by ``run`` in this process. Without a board it keeps the last ones."""

    def __init__(self, app: str) -> None:
        self._key, self._process = adapter_board_key(app), uuid.uuid4().hex
        self.news = AdapterNews()
        self.has_news = asyncio.Event()  # set once news have come

    async def run(self) -> None:
        """Follow the board until this process leaves Ray."""
        await follow(self._key, self._watch, lambda: None)

    async def _watch(self, board: Any, version: int) -> int:
        self.news = await board.watch.remote(version, self._process)
        self.has_news.set()
        await asyncio.sleep(INTERVAL_S)
        return self.news.version
