"""Waiting at the endpoint: counts, turns, clients that leave, requests that are dropped, and the drain."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from autoscale.slo import SloConfig
from deployments import metrics
from deployments.endpoint import gate as gate_module
from deployments.endpoint.gate import Gate, Intake
from deployments.wire.openai_errors import OpenAIError
from router.admission import QueuedRequest
from router.admission_config import AdmissionConfig, Priority
from router.request_limits import RequestLimits


def asked(tokens: int = 1000) -> QueuedRequest:
    return QueuedRequest(tokens=tokens, most_output_tokens=None, is_stream=True, key=None, priority=Priority.NORMAL)


def full_gate(ttft_s: float) -> Gate:
    """A gate that lets one prompt through at a time."""
    gate = Gate(AdmissionConfig(ttft_s=ttft_s), replicas=1, prefill_replicas=lambda: 1)
    gate._admission._capacity.prompt_tokens_per_s = 1.0
    return gate


def test_a_request_gets_its_turn_when_the_one_before_has_its_first_token() -> None:
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


def test_a_client_that_leaves_gives_its_turn_to_the_next() -> None:
    async def run() -> None:
        gate = full_gate(ttft_s=60.0)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(gate.enter(asked(5000)))
            gone, next_one = asked(5000), asked(5000)

            async def wait(one: QueuedRequest) -> None:
                async with gate.enter(one):
                    pass

            waiting = [asyncio.create_task(wait(one)) for one in (gone, next_one)]
            await asyncio.sleep(0.1)
            waiting[0].cancel()
            await asyncio.gather(waiting[0], return_exceptions=True)
            await stack.aclose()
            await asyncio.wait_for(waiting[1], 30.0)
            assert gate._admission.waiting == 0

    asyncio.run(run())


def test_a_request_that_can_no_longer_be_in_time_is_refused_and_counted_with_its_priority() -> None:
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


def test_late_requests_are_refused_again_after_a_time_in_which_no_request_waited() -> None:
    async def run() -> None:
        gate = full_gate(ttft_s=0.1)
        async with gate.enter(asked(5000)):
            for _ in range(2):
                with pytest.raises(OpenAIError, match=r"would not have its first token within 0\.1 s"):
                    await asyncio.wait_for(gate.enter(asked(5000)).__aenter__(), 60.0)
                await asyncio.sleep(0.2)  # longer than the time between two looks for late requests

    asyncio.run(run())


def test_a_request_gets_its_turn_when_engines_become_faster_though_no_other_request_ends() -> None:
    async def run() -> None:
        gate = full_gate(ttft_s=60.0)
        async with gate.enter(asked(5000)):

            async def wait() -> None:
                async with gate.enter(asked(5000)):
                    pass

            waiting = asyncio.create_task(wait())
            await asyncio.sleep(0.2)
            assert gate._admission.waiting == 1
            gate._admission._capacity.prompt_tokens_per_s = 20_000.0
            await asyncio.wait_for(waiting, 30.0)

    asyncio.run(run())


def test_a_request_that_makes_room_for_a_higher_priority_is_refused_with_the_reason() -> None:
    async def run() -> None:
        gate = Gate(AdmissionConfig(ttft_s=60.0, max_queued_tokens=5000), replicas=1, prefill_replicas=lambda: 1)
        gate._admission._capacity.prompt_tokens_per_s = 1.0
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
                await asyncio.wait_for(low, 30.0)
            assert refused.value.status == 429
            assert gate._admission.waiting == 1
        await asyncio.wait_for(high, 30.0)

    asyncio.run(run())


def test_the_pace_of_engines_is_not_measured_while_a_client_reads_slowly() -> None:
    async def run() -> None:
        gate = Gate(AdmissionConfig(ttft_s=60.0, tpot_s=0.05), replicas=1, prefill_replicas=lambda: 1)
        one = asked()
        async with gate.enter(one):
            gate.output(one, 1)
            assert one.is_paced
            gate.pause(one)
            assert not one.is_paced
            gate.go_on(one)
            assert one.is_paced

    asyncio.run(run())


def made(requests: int = 0, **config: Any) -> Intake:
    """An intake with two gates that have this number of requests each."""
    gates = [Gate(AdmissionConfig(), replicas=1, prefill_replicas=lambda: 1) for _ in range(2)]
    for gate in gates:
        gate._admission.request_count = requests
    return Intake(RequestLimits(AdmissionConfig.model_validate(config), 1), None, gates)


async def test_a_request_that_waits_for_a_model_to_wake_is_counted() -> None:
    one = made(requests=1)
    with one.arriving(), one.arriving(), one.arriving():
        assert await one.drain(0.0) == 5
    assert await one.drain(0.0) == 2


async def test_a_drained_replica_stays_closed_until_all_replicas_must_have_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = [1000.0]
    monkeypatch.setattr(gate_module, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    one = made()
    one.check_open()
    assert await one.drain(300.0) == 0
    now_s[0] += 200.0  # another replica still has a stream
    with pytest.raises(OpenAIError, match="is being shut down"):
        one.check_open()
    now_s[0] += 200.0  # all have answered by now, and the application was not deleted
    one.check_open()


def test_a_request_is_refused_before_its_body_is_read_if_all_models_have_too_many() -> None:
    one = made(requests=1, max_requests=4)
    with one.arriving():
        one.check_limits(None, Priority.NORMAL)
        with one.arriving(), pytest.raises(OpenAIError, match="has 4 requests") as refused:
            one.check_limits(None, Priority.NORMAL)
    assert refused.value.status == 429
    busiest, other = (gate.figures(SloConfig()) for gate in one._gates)
    assert busiest["refused_requests_normal"] == busiest["offered_requests"] == 1.0
    assert other["offered_requests"] == 0.0


def test_a_request_that_its_key_may_not_send_is_no_demand() -> None:
    one = made(requests=1, key={"max_requests": 1})
    one._limits.enter(None, 10, 0.0)
    with pytest.raises(OpenAIError, match="of this key"):
        one.check_limits(None, Priority.NORMAL)
    assert one._gates[0].figures(SloConfig())["offered_requests"] == 0.0


def test_a_gate_reports_requests_that_wait_with_the_time_for_which_they_have_waited() -> None:
    async def run() -> None:
        gate = full_gate(ttft_s=60.0)
        async with gate.enter(asked(2000)):
            waiting = asyncio.create_task(AsyncExitStack().enter_async_context(gate.enter(asked(500))))
            await asyncio.sleep(0.12)
            figures = gate.figures(SloConfig())
            assert (figures["waiting_requests"], figures["waiting_tokens"]) == (1.0, 500.0)
            assert (figures["offered_requests"], figures["passed_tokens"]) == (2.0, 2000.0)
            assert sum(figures[name] for name in figures if name.startswith("late_")) == 1.0
            assert "late_0" not in figures  # below 0.05 s
            waiting.cancel()

    asyncio.run(run())


def test_a_refused_body_counts_as_a_request_of_its_key() -> None:
    one = made(key={"requests_per_minute": 1})
    one.check_limits("a", Priority.NORMAL)
    one.body_refused("a")
    with pytest.raises(OpenAIError, match="come faster than 1 a minute"):
        one.check_limits("a", Priority.NORMAL)
    one.check_limits("b", Priority.NORMAL)
