"""Waiting at the endpoint: turns, clients that go, and what is dropped."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest

from deployments import metrics
from deployments.gate import Gate
from deployments.openai_errors import OpenAIError
from router.admission import AdmissionConfig, Asked, Priority


def asked(tokens: int = 1000) -> Asked:
    return Asked(tokens=tokens, most_output_tokens=None, is_stream=True, key=None, priority=Priority.NORMAL)


def full_gate(ttft_s: float) -> Gate:
    """One that lets one prompt through at a time."""
    gate = Gate(AdmissionConfig(ttft_s=ttft_s), replicas=1, prefill_replicas=1)
    gate._admission._capacity.tokens_s = 1.0
    return gate


def test_turns_come_as_others_get_their_first_token() -> None:
    async def run() -> None:
        gate = full_gate(ttft_s=60.0)
        first, second = asked(5000), asked(5000)
        order = []

        async def wait() -> None:
            async with gate.enter(second):
                order.append("second")

        async with gate.enter(first):
            waiting = asyncio.create_task(wait())
            await asyncio.sleep(0.2)
            order.append("first token")
            gate.output(first, 1)
            await waiting
        assert order == ["first token", "second"]

    asyncio.run(run())


def test_a_client_that_goes_leaves_its_turn_to_the_next() -> None:
    async def run() -> None:
        gate = full_gate(ttft_s=60.0)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(gate.enter(asked(5000)))
            gone, next_one = asked(5000), asked(5000)

            async def wait(one: Asked) -> None:
                async with gate.enter(one):
                    pass

            waiting = [asyncio.create_task(wait(one)) for one in (gone, next_one)]
            await asyncio.sleep(0.1)
            waiting[0].cancel()
            await asyncio.gather(waiting[0], return_exceptions=True)
            await stack.aclose()
            await asyncio.wait_for(waiting[1], 1.0)
            assert gate._admission.waiting == 0

    asyncio.run(run())


def test_who_can_no_longer_be_in_time_is_told_so_and_counted_with_its_priority() -> None:
    async def run() -> None:
        gate, counted = full_gate(ttft_s=0.3), metrics.REFUSED.labels("late", "low")
        before = counted._value.get()
        async with gate.enter(asked(5000)):
            with pytest.raises(OpenAIError, match=r"would not have its first token within 0\.3 s") as refused:
                async with gate.enter(replace(asked(5000), priority=Priority.LOW)):
                    raise AssertionError("it was not its turn")
        assert refused.value.status == 429
        assert int(refused.value.headers()["Retry-After"]) >= 1
        assert counted._value.get() == before + 1
        async with gate.enter(asked()):
            pass

    asyncio.run(run())


def test_a_turn_comes_when_engines_turn_out_to_be_faster_though_nothing_else_happens() -> None:
    async def run() -> None:
        gate = full_gate(ttft_s=60.0)
        async with gate.enter(asked(5000)):

            async def wait() -> None:
                async with gate.enter(asked(5000)):
                    pass

            waiting = asyncio.create_task(wait())
            await asyncio.sleep(0.2)
            assert gate._admission.waiting == 1
            gate._admission._capacity.tokens_s = 20_000.0
            await asyncio.wait_for(waiting, 5.0)

    asyncio.run(run())


@pytest.mark.parametrize(("config", "coming"), [({"max_requests": 3}, 2), ({"key": {"requests_per_minute": 1}}, 0)])
def test_what_is_refused_anyhow_is_so_before_its_body_is_read(config: dict[str, Any], coming: int) -> None:
    async def run() -> None:
        gate = Gate(AdmissionConfig.model_validate(config), replicas=1, prefill_replicas=1)
        gate.check(None, Priority.NORMAL, 0)
        gate.check(None, Priority.NORMAL, 1)
        async with gate.enter(asked()):
            with pytest.raises(OpenAIError) as refused:
                gate.check(None, Priority.NORMAL, coming)
            assert refused.value.status == 429

    asyncio.run(run())


def test_who_makes_room_for_others_is_told_so() -> None:
    async def run() -> None:
        gate = Gate(AdmissionConfig(ttft_s=60.0, max_queued_tokens=5000), replicas=1, prefill_replicas=1)
        gate._admission._capacity.tokens_s = 1.0
        async with gate.enter(asked(5000)):

            async def wait(priority: Priority) -> None:
                one = asked(5000)
                one.priority = priority
                async with gate.enter(one):
                    pass

            low = asyncio.create_task(wait(Priority.LOW))
            await asyncio.sleep(0)
            high = asyncio.create_task(wait(Priority.HIGH))
            with pytest.raises(OpenAIError, match=r"took its room \(admission\.max_queued_tokens\)") as refused:
                await asyncio.wait_for(low, 5.0)
            assert refused.value.status == 429
            assert gate._admission.waiting == 1
        await asyncio.wait_for(high, 5.0)

    asyncio.run(run())


def test_a_reader_that_takes_its_time_says_nothing_of_the_engines() -> None:
    async def run() -> None:
        gate = Gate(AdmissionConfig(ttft_s=60.0, tpot_s=0.05), replicas=1, prefill_replicas=1)
        one = asked()
        async with gate.enter(one):
            gate.output(one, 1)
            assert one.is_paced
            gate.pause(one)
            assert not one.is_paced
            gate.go_on(one)
            assert one.is_paced

    asyncio.run(run())
