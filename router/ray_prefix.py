"""What replicas hold of prompts, on its way to all routers: a replica's reports to the board, and a router's feed.

The board (``deployments.actors.prefix_board``) passes the reports of all replicas on to the routers of their pools. If
the board is lost, a router keeps what it knows, and adds what it sends itself.
"""

import asyncio
import logging
import time
from typing import Any

import ray

from router.held_pieces import HeldPieces, PieceChanges
from router.prefix_map import PrefixMap
from router.prompt_keys import PromptKeys
from router.ray_actors import find_actor, follow, is_another
from router.shared_prefixes import HeldReport, PoolNews, packed, unpacked

logger = logging.getLogger(__name__)

# Shortest time between two reports of a replica, and between two questions of a router, seconds. So a router learns of
# a change 0.1 s later on average, and 0.2 s at most. The board answers ten calls per second and process.
_INTERVAL_S = 0.1
# Time until a replica looks for another board, seconds.
_LOST_S = 1.0
# Longest time between two reports of a replica, seconds: the board forgets one that is silent (``SILENCE_S``).
_SIGN_OF_LIFE_S = 5.0


def prefix_board_key(app: str) -> bytes:
    """Key in Ray's key-value store under which the name of an application's prefix board is announced."""
    return f"tandem:prefixes:{app}".encode()


class PrefixReporter:
    """Reports the pieces that one replica's engine holds."""

    def __init__(self, app: str, pool: str, replica_id: str, pieces: HeldPieces, *, capacity_pieces: int) -> None:
        """``capacity_pieces``: the engine's KV, in pieces."""
        self._key = prefix_board_key(app)
        self._pool, self._replica_id = pool, replica_id
        self._pieces, self._capacity_pieces = pieces, capacity_pieces
        self._board: Any = None
        self._number = 0  # number of reports so far; a board sees by it that one has been lost
        self._must_report_all = True
        self._reported_s = -_SIGN_OF_LIFE_S  # monotonic time of the last report

    async def run(self) -> None:
        """Report until this process leaves Ray. Without a board the pieces are reported once there is one."""
        while ray.is_initialized():
            await asyncio.sleep(_INTERVAL_S)
            try:
                await self._report(time.monotonic())
            except Exception as error:  # the board is lost, or has just ended
                logger.debug("the prefix board took no report: %s", error)
                self._board = None
                await asyncio.sleep(_LOST_S)

    async def _report(self, now_s: float) -> None:
        """Report what has changed, if anything has or if the last report was long ago."""
        is_due = now_s - self._reported_s >= _SIGN_OF_LIFE_S
        if is_due or self._board is None:  # a redeployed application has another board
            found = await asyncio.to_thread(find_actor, self._key)
            if is_another(found, self._board):
                self._board = found
        changes = self._pieces.take()
        if self._board is None:  # the changes are dropped, since there may be no end of them
            self._must_report_all = True
            await asyncio.sleep(_LOST_S)
            return
        if self._must_report_all:
            changes = PieceChanges(stored=tuple(self._pieces.take_all()), coming=changes.coming)
        elif changes == PieceChanges() and not is_due:
            return
        self._number += 1
        report = HeldReport(
            replica_id=self._replica_id,
            number=self._number,
            is_whole=self._must_report_all,
            capacity_pieces=self._capacity_pieces,
            stored=packed(changes.stored),
            removed=packed(changes.removed),
            coming=packed(changes.coming),
        )
        self._reported_s = now_s
        self._must_report_all = not await self._board.report.remote(self._pool, report)


class PrefixFeed:
    """Keeps one router's map of a pool up to date."""

    def __init__(self, app: str, pool: str, prefixes: PrefixMap) -> None:
        self._app, self._pool, self._prefixes = app, pool, prefixes

    async def run(self) -> None:
        """Follow the board until this process leaves Ray."""
        # When the board is lost, nothing has to be done: the map corrects what turns out to be wrong.
        await follow(prefix_board_key(self._app), self._watch, lambda: None)

    async def _watch(self, board: Any, version: int) -> int:
        """Wait for the board's next news and apply them. Returns their version."""
        news: PoolNews = await board.watch.remote(self._pool, version)
        for report in news.reports:
            self._apply(report)
            await asyncio.sleep(0)  # the whole state of a large pool takes seconds, and requests must not wait for it
        await asyncio.sleep(_INTERVAL_S)
        return int(news.version)

    def _apply(self, report: HeldReport) -> None:
        if report.is_whole:
            self._prefixes.clear(report.replica_id)
            if report.capacity_pieces:
                self._prefixes.set_capacity(report.replica_id, report.capacity_pieces)
        if report.removed:
            self._prefixes.remove(report.replica_id, unpacked(report.removed))
        if report.coming:  # a replica cannot report them as stored before it has computed them
            keys = tuple(unpacked(report.coming))
            prompt = PromptKeys(keys=keys, piece_tokens=1.0, tokens=len(keys) + 1)
            self._prefixes.sent(report.replica_id, prompt, time.monotonic())
        if report.stored:
            self._prefixes.store(report.replica_id, unpacked(report.stored))
