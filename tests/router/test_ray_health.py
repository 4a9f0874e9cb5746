"""What a caller tells the health board and hears of it; the board itself is the real one, in this process."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.ray


class Handle:
    """Calls a board as an actor's handle does."""

    def __init__(self, board: Any) -> None:
        self._board = board

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._board, name)
        return type("Method", (), {"remote": staticmethod(method)})


@pytest.fixture(name="board")
def _board(monkeypatch: Any) -> Iterator[Any]:
    import ray

    from deployments.health_board import HealthBoard
    from router import ray_health
    from router.outliers import OutlierConfig, Outliers

    board = HealthBoard.__new__(HealthBoard)  # its announcement needs a cluster
    board._outliers = Outliers(OutlierConfig(ejection_s=0.5))
    board._said, board._version, board._changed = (frozenset(), frozenset()), 0, asyncio.Event()
    monkeypatch.setattr(ray_health, "find_actor", lambda key: Handle(board))
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    return board


def feed(pool: str = "decode:g0") -> Any:
    from router.outliers import OutlierConfig
    from router.ray_health import HealthFeed

    one = HealthFeed("app", pool, OutlierConfig())
    one.start()
    return one


async def until(holds: Any, within_s: float = 5.0) -> None:
    async with asyncio.timeout(within_s):
        while not holds():
            await asyncio.sleep(0.01)


async def test_three_failures_that_different_callers_saw_eject_for_all_within_a_second(board: Any) -> None:
    feeds = [feed() for _ in range(4)]
    await asyncio.sleep(0.05)
    for one in feeds[:3]:
        one.failed("r")
    await until(lambda: all("r" in one._ejected for one in feeds), within_s=1.0)
    assert feeds[3].guide() == ({"r"}, None)


async def test_one_caller_at_a_time_probes_and_its_success_returns_the_replica(board: Any) -> None:
    feeds = [feed() for _ in range(3)]
    await asyncio.sleep(0.05)
    for one in feeds:
        one.failed("r")
    await until(lambda: any(one._probes for one in feeds))
    await asyncio.sleep(1.2)
    (prober,) = [one for one in feeds if one._probes]
    assert prober.guide() == (frozenset(), "r")
    assert prober.guide() == ({"r"}, None)
    prober.answered("r")
    await until(lambda: not any(one._ejected for one in feeds))


async def test_a_slow_answer_counts_as_a_failure(board: Any) -> None:
    one = feed()
    await asyncio.sleep(0.05)
    for _ in range(20):
        one.answered("well", 0.1, 2.0)
    for _ in range(3):
        one.answered("slow", 30.0, 2.0)
    await until(lambda: "slow" in one._ejected)


async def test_what_went_nowhere_says_nothing(board: Any) -> None:
    one = feed()
    for _ in range(10):
        one.failed(None)
    await asyncio.sleep(0.1)
    assert not board._outliers.suspects()


async def test_answers_between_failures_keep_their_place(board: Any) -> None:
    one = feed()
    await asyncio.sleep(0.05)
    for _ in range(5):  # all before the board has been told of the first
        one.failed("r")
        one.failed("r")
        one.answered("r")
    await asyncio.sleep(0.3)
    assert not board._outliers.ejected(0.0)


async def test_who_never_sent_to_an_ejected_replica_may_probe_it_and_who_sends_elsewhere_may_not(board: Any) -> None:
    gone, other, new = feed(), feed("prefill:g0"), None
    await asyncio.sleep(0.05)
    for _ in range(3):
        gone.failed("r")
    await until(lambda: "r" in other._ejected)
    for task in gone._tasks:
        task.cancel()
    new = feed()
    await until(lambda: "r" in new._probes, within_s=15.0)
    assert not other._probes
