"""What a caller reports to the health board and learns from it; the real board runs in this process."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from router.routing import Choice, Routing

pytestmark = pytest.mark.ray


class Handle:
    """Calls a board as an actor's handle does."""

    def __init__(self, board: Any) -> None:
        self._board = board

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Handle) and other._board is self._board

    def __hash__(self) -> int:
        return id(self._board)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._board, name)
        return type("Method", (), {"remote": staticmethod(method)})


def made_board() -> Any:
    from deployments.actors.health_board import HealthBoard
    from router.ejection import OutlierConfig, Outliers
    from router.ray_actors import Bell

    board = HealthBoard.__new__(HealthBoard)  # its announcement needs a cluster
    board._outliers = Outliers({"decode:g0": OutlierConfig(ejection_s=0.5)})
    board._view, board._version, board._changed = (frozenset(), frozenset()), 0, Bell()
    return board


@pytest.fixture(name="announced")
def _announced(monkeypatch: Any) -> Iterator[list[Any]]:
    """The boards that have been started; callers find the last one."""
    import ray

    from router import ray_actors, ray_health

    boards = [made_board()]
    for module in (ray_actors, ray_health):
        monkeypatch.setattr(module, "find_actor", lambda key: Handle(boards[-1]))
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    return boards


@pytest.fixture(name="board")
def _board(announced: list[Any]) -> Any:
    return announced[0]


def feed(pool: str = "decode:g0") -> Any:
    from router.ejection import OutlierConfig
    from router.ray_health import HealthFeed

    one = HealthFeed("app", pool, OutlierConfig())
    one.start()
    return one


def at(
    health: Any, replica_id: str | None, *, probe: str | None = None, unreached: frozenset[str] = frozenset()
) -> Any:
    """A call that the router has sent to a replica (``None``: to none), as one caller sees it."""
    from router.ray_health import CallHealth

    routing = Routing(probe=probe, choice=Choice(replica_id))
    routing.choice.unreached |= unreached
    return CallHealth(health, routing)


async def until(holds: Any, within_s: float = 30.0) -> None:
    async with asyncio.timeout(within_s):
        while not holds():
            await asyncio.sleep(0.01)


async def due() -> Any:
    """A feed whose replica ``r`` has been ejected and may be probed."""
    one = feed()
    await asyncio.sleep(0.05)
    for _ in range(3):
        at(one, "r").report_failure()
    await until(lambda: one._due)
    return one


async def test_three_failures_of_different_callers_eject_the_replica_for_all_within_a_second(board: Any) -> None:
    feeds = [feed() for _ in range(4)]
    await asyncio.sleep(0.05)
    for one in feeds[:3]:
        at(one, "r").report_failure()
    await until(lambda: all("r" in one._ejected for one in feeds), within_s=1.0)
    assert await feeds[3].guide() == ({"r"}, None)


async def test_one_request_at_a_time_probes_and_its_success_returns_the_replica(board: Any) -> None:
    feeds = [feed() for _ in range(3)]
    await asyncio.sleep(0.05)
    for one in feeds:
        at(one, "r").report_failure()
    await until(lambda: all(one._due for one in feeds))
    guides = await asyncio.gather(*(one.guide() for one in feeds))
    assert sorted(guides, key=str) == sorted([(frozenset(), "r"), ({"r"}, None), ({"r"}, None)], key=str)
    await asyncio.sleep(0.6)
    assert not any(one._due for one in feeds)
    at(feeds[0], "r").report_answer()  # sent before the ejection
    await asyncio.sleep(0.1)
    assert all("r" in one._ejected for one in feeds)
    at(feeds[0], "r", probe="r").report_answer()
    await until(lambda: not any(one._ejected for one in feeds))


async def test_a_caller_without_requests_does_not_delay_the_probe(board: Any) -> None:
    idle, busy = feed(), feed()
    await asyncio.sleep(0.05)
    for _ in range(3):
        at(busy, "r").report_failure()
    await until(lambda: idle._due and busy._due)
    await asyncio.sleep(1.0)  # the idle caller learns of it more than once
    assert await busy.guide() == (frozenset(), "r")


async def test_a_board_that_hangs_grants_no_probe_and_delays_no_request(board: Any) -> None:
    one = await due()
    board.probe = lambda name: asyncio.sleep(60.0)
    async with asyncio.timeout(30.0):
        assert await one.guide() == ({"r"}, None)


async def test_a_probe_that_is_granted_late_goes_to_the_next_request(board: Any) -> None:
    one, grant = await due(), board.probe

    async def late(name: str) -> bool:
        await asyncio.sleep(0.4)
        return bool(await grant(name))

    board.probe = late
    assert await one.guide() == ({"r"}, None)
    await asyncio.sleep(0.4)
    assert await one.guide() == (frozenset(), "r")
    assert await one.guide() == ({"r"}, None)


async def test_a_probe_that_its_replica_does_not_accept_has_failed(board: Any) -> None:
    one = await due()
    assert await one.guide() == (frozenset(), "r")
    call = at(one, "other", probe="r", unreached=frozenset({"r"}))
    call.report_unreached()
    call.end()
    # The replica is ejected again, for twice as long; then another probe is due.
    await until(lambda: board._outliers._suspects["r"].ejections == 2)
    await until(lambda: one._due, within_s=3.0)
    assert await one.guide() == (frozenset(), "r")


@pytest.mark.parametrize("replica_id", [None, "other"])
async def test_a_probe_that_a_request_did_not_make_goes_to_the_next_request(board: Any, replica_id: str | None) -> None:
    one = await due()
    assert await one.guide() == (frozenset(), "r")
    at(one, replica_id, probe="r").end()
    assert await one.guide() == (frozenset(), "r")


async def test_a_probe_without_a_result_is_made_again_and_one_with_a_result_is_not(board: Any) -> None:
    one = await due()
    assert await one.guide() == (frozenset(), "r")
    at(one, "r", probe="r").end()  # its client has gone
    assert await one.guide() == (frozenset(), "r")
    call = at(one, "r", probe="r")
    call.report_answer()
    call.end()
    assert not one._granted


async def test_slow_answers_count_as_failures_despite_answers_without_a_pace(board: Any) -> None:
    one = feed()
    await asyncio.sleep(0.05)
    for _ in range(20):
        at(one, "well").report_pace(0.1, 2.0)
    for _ in range(3):
        at(one, "slow").report_pace(30.0, 2.0)
        at(one, "slow").report_answer()
    await until(lambda: "slow" in one._ejected)


async def test_a_replica_that_did_not_accept_a_request_has_failed_once(board: Any) -> None:
    one = feed()
    await asyncio.sleep(0.05)
    for _ in range(3):
        call = at(one, "well", unreached=frozenset({"r"}))
        call.report_unreached()
        call.report_unreached()
        call.report_answer()
    await until(lambda: "r" in one._ejected)
    assert board._outliers.suspects() == {"r"}


async def test_a_request_that_went_to_no_replica_is_no_sign_against_one(board: Any) -> None:
    one = feed()
    for _ in range(10):
        at(one, None).report_failure()
    await asyncio.sleep(0.1)
    assert not board._outliers.suspects()


async def test_answers_between_failures_keep_their_order(board: Any) -> None:
    one = feed()
    await asyncio.sleep(0.05)
    for _ in range(5):  # all before the board has been told of the first
        at(one, "r").report_failure()
        for _ in range(2):
            at(one, "r").report_answer()
    await asyncio.sleep(0.3)
    assert not board._outliers.ejected(0.0)


async def test_a_caller_that_never_sent_to_an_ejected_replica_may_probe_it_and_one_of_another_pool_may_not(
    board: Any,
) -> None:
    gone, other, new = feed(), feed("prefill:g0"), None
    await asyncio.sleep(0.05)
    for _ in range(3):
        at(gone, "r").report_failure()
    await until(lambda: "r" in other._ejected)
    for task in gone._tasks:
        task.cancel()
    new = feed()
    await until(lambda: "r" in new._due, within_s=15.0)
    assert not other._due


async def test_a_caller_moves_to_the_board_that_was_started_last_as_soon_as_it_answers(
    announced: list[Any], monkeypatch: Any
) -> None:
    from deployments.actors import health_board

    monkeypatch.setattr(health_board, "_WATCH_S", 0.1)
    one, other = feed(), feed()
    await asyncio.sleep(0.05)
    announced.append(made_board())  # the application is updated; the old board lives on for a while
    await asyncio.sleep(0.3)
    for _ in range(3):
        at(one, "r").report_failure()
    await until(lambda: all("r" in caller._ejected for caller in (one, other)))
