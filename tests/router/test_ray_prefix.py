"""A replica's pieces on their way to a router, over a board in this process, also while the board is lost."""

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from router.held_pieces import HeldPieces
from router.prefix_map import PrefixMap
from router.prompt_keys import PromptKeys

pytestmark = pytest.mark.ray

PROMPT = PromptKeys(keys=(1, 2, 3), piece_tokens=10, tokens=40)


class Handle:
    """Calls a board as an actor's handle does."""

    def __init__(self, board: Any) -> None:
        self.board = board

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Handle) and other.board is self.board

    def __hash__(self) -> int:
        return id(self.board)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.board, name)
        return type("Method", (), {"remote": staticmethod(method)})


class LostBoard:
    """A board that has ended: its handle answers with an error."""

    async def report(self, *_: Any) -> bool:
        raise ConnectionError("the actor has died")

    async def watch(self, *_: Any) -> Any:
        raise ConnectionError("the actor has died")


def made_board(first_version: int = 0) -> Any:
    from deployments.actors.prefix_board import PrefixBoard
    from router.ray_actors import Bell
    from router.shared_prefixes import PoolPrefixes

    board = PrefixBoard.__new__(PrefixBoard)  # its announcement needs a cluster
    board._pools, board._changed = defaultdict(lambda: PoolPrefixes(first_version)), defaultdict(Bell)
    return board


@pytest.fixture(name="announced")
def _announced(monkeypatch: Any) -> Iterator[list[Any]]:
    """The boards that have been started; all others find the last one. Without one there is no board."""
    import ray

    from router import ray_actors, ray_prefix

    boards: list[Any] = [made_board()]
    for module in (ray_actors, ray_prefix):
        monkeypatch.setattr(module, "find_actor", lambda key: Handle(boards[-1]) if boards else None)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray_actors, "_RETRY_S", 0.02)
    monkeypatch.setattr(ray_prefix, "_INTERVAL_S", 0.01)
    monkeypatch.setattr(ray_prefix, "_LOST_S", 0.02)
    return boards


class Replica:
    """A replica and its reports."""

    def __init__(self, name: str) -> None:
        from router.ray_prefix import PrefixReporter

        self.pieces = HeldPieces(max_pieces=100)
        self.reporter = PrefixReporter("app", "decode:g0", name, self.pieces, capacity_pieces=100)
        self.task = asyncio.create_task(self.reporter.run())

    def hold(self, *keys: int) -> None:
        for key in keys:
            block = PromptKeys(keys=(key,), piece_tokens=10, tokens=10)
            self.pieces.name(block, block, lambda _: True)


class Router:
    """A router and its map."""

    def __init__(self) -> None:
        from router.ray_prefix import PrefixFeed

        self.prefixes = PrefixMap(capacity_pieces=100, sent_s=60.0)
        self.task = asyncio.create_task(PrefixFeed("app", "decode:g0", self.prefixes).run())

    async def sees(self, **overlap_tokens: int) -> None:
        async with asyncio.timeout(30.0):
            while self.prefixes.overlap_tokens(PROMPT) != overlap_tokens:
                await asyncio.sleep(0.01)


def stop(*parts: Replica | Router) -> None:
    for part in parts:
        part.task.cancel()


async def test_two_routers_see_the_same_and_a_later_one_too(announced: list[Any]) -> None:
    a, b, routers = Replica("a"), Replica("b"), [Router(), Router()]
    a.hold(1, 2)
    b.hold(1)
    for router in routers:
        await router.sees(a=20, b=10)
    a.pieces.remove(2)
    late = Router()
    for router in (*routers, late):
        await router.sees(a=10, b=10)
    stop(a, b, *routers, late)


async def test_a_prompt_that_a_replica_has_accepted_is_known_before_it_is_computed(announced: list[Any]) -> None:
    replica, router = Replica("a"), Router()
    replica.pieces.name(PROMPT, PromptKeys(keys=(7, 8, 9), piece_tokens=10, tokens=40), lambda _: False)
    await router.sees(a=30)
    stop(replica, router)


async def test_a_new_board_learns_all_pieces_and_routers_keep_them_meanwhile(announced: list[Any]) -> None:
    replica, router = Replica("a"), Router()
    replica.hold(1)
    await router.sees(a=10)
    announced.append(LostBoard())
    replica.reporter._board = Handle(announced[-1])
    replica.hold(2)
    await asyncio.sleep(0.2)
    assert router.prefixes.overlap_tokens(PROMPT).get("a", 0) >= 10
    announced.append(made_board(1000))
    await router.sees(a=20)
    stop(replica, router)


async def test_without_a_board_a_router_knows_what_it_has_sent(announced: list[Any]) -> None:
    announced.clear()
    replica, router = Replica("a"), Router()
    router.prefixes.sent("a", PROMPT, 0.0)
    replica.hold(1)
    await asyncio.sleep(0.1)
    await router.sees(a=30)
    announced.append(made_board())
    await router.sees(a=10)  # its own report counts for more
    stop(replica, router)


async def test_without_a_board_the_changes_of_a_replica_do_not_pile_up(announced: list[Any]) -> None:
    board = announced.pop()
    a, router = Replica("a"), Router()
    for first in range(1, 1000, 100):  # each hundred pushes out the one before
        a.hold(*range(first, first + 100))
        async with asyncio.timeout(30.0):
            while a.pieces._changed or a.pieces._coming:
                await asyncio.sleep(0.01)
    a.hold(1, 2)
    announced.append(board)
    await router.sees(a=20)  # all that it holds is reported
    stop(a, router)
