"""What the output side gets of a stream that goes on here."""

from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.sent import Sent

pytestmark = pytest.mark.vllm

STOPS_AFTER = 12


class Front:
    """An output side that finds its stop string in the text of one token."""

    def __init__(self) -> None:
        self.fed: list[list[int]] = []

    def ends_with(self, output_ids: list[int], input_tokens: int) -> None:
        return None

    def feed(self, token_ids: Any, reason: Any, stop_reason: Any) -> Any:
        self.fed.append(list(token_ids))
        return SimpleNamespace(finished=STOPS_AFTER in token_ids or reason is not None)

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("gathered", "fed"), [([11, 12, 13], [[11], [12]]), ([14, 15], [[14], [15]])])
async def test_tokens_that_have_gathered_are_fed_one_by_one_so_that_none_comes_after_a_stop_string(
    gathered: list[int], fed: list[list[int]]
) -> None:
    from vllm.sampling_params import SamplingParams

    from deployments.resume import resumed

    front = Front()

    async def open_front(*_: Any) -> Front:
        return front

    async def generate(*_: Any) -> AsyncGenerator[Any, None]:
        part = SimpleNamespace(token_ids=gathered, finish_reason="length", stop_reason=None)
        yield SimpleNamespace(outputs=[part])

    sent = Sent(outputs=((10,),), frames=1, digest=b"", created="")
    sampling = SamplingParams(temperature=0.0, max_tokens=5)
    client: Any = SimpleNamespace(open_front=open_front)
    said = [one async for one in resumed(client, generate, {"prompt_token_ids": [1]}, sampling, "r", sent)]
    assert front.fed == [[10], *fed]
    assert [one.finished for one in said] == [False, False, True]
