"""Single measurements on engines that answer at given times."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tests.deployments.profiler.virtual_loop import virtual_time

pytestmark = pytest.mark.vllm

Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(name="run")
def _run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    with virtual_time(monkeypatch) as run:
        yield run


class Answering:
    """An engine whose tokens come after the given times, seconds."""

    def __init__(self, gaps_s: Sequence[float]) -> None:
        self._gaps_s = gaps_s

    async def generate(self, *_: Any) -> AsyncIterator[Any]:
        for gap_s in self._gaps_s:
            await asyncio.sleep(gap_s)
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0])], kv_transfer_params={})


def test_a_slow_step_after_a_handoff_does_not_make_it_shorter(run: Run) -> None:
    from deployments.profiler.engines import handoff_s

    async def measure(*gaps_s: float) -> float:
        prefill: Any = Answering([0.1])
        decode: Any = Answering(gaps_s)
        return await handoff_s(prefill, decode, [1, 2, 3])

    async def check() -> None:
        assert await measure(0.03, 0.01, 0.01, 0.01) == pytest.approx(0.02)
        assert await measure(0.03, 0.01, 0.01, 0.11) == pytest.approx(0.02)
        with pytest.raises(RuntimeError, match="the machine is busy"):
            await measure(0.03, 0.04, 0.01, 0.11)

    run(check())


def test_outputs_that_come_late_and_at_once_are_no_fast_steps(run: Run) -> None:
    from deployments.profiler.engines import DECODE_STEPS, step_s

    late = 24  # steps whose outputs come at once, after all of their time
    gaps_s = [0.01] * (DECODE_STEPS - late) + [0.01 * late] + [0.0] * (late - 1) + [0.01]

    async def check() -> None:
        client: Any = Answering(gaps_s)
        client.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=2048))
        assert await step_s(client, [[1, 2, 3]]) == pytest.approx(0.01)

    run(check())
