"""Answers that hold for a moment."""

import asyncio

from deployments.recent import Recent


class Asked:
    """Counts how often it is asked; an answer comes when it may."""

    def __init__(self) -> None:
        self.count = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def __call__(self) -> int:
        self.count += 1
        await self.may_answer.wait()
        return self.count


async def test_an_answer_holds_for_a_moment_and_is_then_asked_for_again() -> None:
    now_s, asked = [5.0], Asked()
    recent = Recent(asked, 1.0, lambda: now_s[0])
    assert [await recent.get(), await recent.get()] == [1, 1]
    now_s[0] = 5.9
    assert await recent.get() == 1
    now_s[0] = 6.0
    assert await recent.get() == 2


async def test_all_who_ask_at_once_get_one_answer_also_when_the_first_leaves() -> None:
    now_s, asked = [0.0], Asked()
    asked.may_answer.clear()
    recent = Recent(asked, 1.0, lambda: now_s[0])
    first, *others = [asyncio.create_task(recent.get()) for _ in range(5)]
    await asyncio.sleep(0)
    now_s[0] = 4.0  # it is slow
    others.append(asyncio.create_task(recent.get()))
    first.cancel()
    await asyncio.sleep(0)
    asked.may_answer.set()
    assert await asyncio.gather(*others) == [1] * 5
    assert asked.count == 1
