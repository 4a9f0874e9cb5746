"""The plan in a router's feed while its coordinator answers, is silent, dies and is replaced."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.ray


class Actor:
    """Stands for an actor handle: gives these answers in turn, or raises them."""

    def __init__(self, name: str, *answers: Any) -> None:
        self.name = name
        self.asked: list[int] = []
        self.answers = list(answers)
        self.watch = SimpleNamespace(remote=self._watch)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Actor) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    async def _watch(self, version: int) -> Any:
        self.asked.append(version)
        if not self.answers:
            await asyncio.sleep(60.0)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


async def heard(monkeypatch: pytest.MonkeyPatch, *found: Any) -> Any:
    """A feed that has found these coordinators, one after the other, and the last one again and again."""
    from router import ray_actors
    from router.ray_coordinator import MembershipFeed

    handles = list(found)
    monkeypatch.setattr(ray_actors, "_RETRY_S", 0.01)
    monkeypatch.setattr(ray_actors.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray_actors, "find_actor", lambda key: handles.pop(0) if len(handles) > 1 else handles[0])
    feed = MembershipFeed("app")
    task = asyncio.create_task(feed.run())
    await asyncio.sleep(0.3)
    task.cancel()
    return feed


async def test_an_answer_holds_and_the_next_question_names_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    actor = Actor("a", (1, {"p": ["p1"], "d": []}), (2, {"p": ["p1"], "d": ["d1"]}))
    feed = await heard(monkeypatch, actor)
    assert (feed.membership.admitted, feed.membership.pools) == ({"p1", "d1"}, {"p": 1, "d": 1})
    assert actor.asked == [-1, 1, 2]


async def test_the_same_names_again_are_the_same_set(monkeypatch: pytest.MonkeyPatch) -> None:
    from router import ray_coordinator as module

    feed = module.MembershipFeed("app")
    feed._store({"p": ["p1"], "d": ["d1"]})
    first = feed.membership
    feed._store({"d": ["d1"], "p": ["p1"]})
    assert feed.membership is not None
    assert first is not None
    assert feed.membership.admitted is first.admitted
    assert feed.membership.heard_s >= first.heard_s


async def test_without_a_policy_no_replica_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = await heard(monkeypatch, Actor("a", (1, {"p": ["p1"]}), (1, None)))
    assert feed.membership is None


async def test_the_plan_of_a_dead_coordinator_holds_until_another_one_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = Actor("a", (7, {"p": ["p1"]}), RuntimeError("died"))
    feed = await heard(monkeypatch, first, first, None)
    assert feed.membership.admitted == {"p1"}
    second = Actor("b", (1, {"p": ["p1"], "d": ["d1"]}))
    again = Actor("a", (7, {"p": ["p1"]}), RuntimeError("died"))
    feed = await heard(monkeypatch, again, again, None, second)
    assert feed.membership.admitted == {"p1", "d1"}
    assert second.asked[0] == -1  # the new coordinator counts its own versions


async def test_a_coordinator_of_a_redeployed_application_is_asked_from_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old, new = Actor("a", (9, {"p": ["p1"]})), Actor("b", (1, {"p": ["p2"]}))
    feed = await heard(monkeypatch, old, new)
    assert feed.membership.admitted == {"p2"}
    assert new.asked[0] == -1
