"""Which tokens vLLM's output side gets of a stream that another replica began."""

from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.wire.messages import NotResumableError, Sent, Usage

pytestmark = pytest.mark.vllm

STOPS_AFTER = 12


class OutputSide:
    """An output side that finds its stop string in the text of one token."""

    def __init__(self) -> None:
        self.fed: list[list[int]] = []

    def ends_with(self, output_ids: list[int], input_tokens: int) -> None:
        return None

    def feed(self, token_ids: Any, reason: Any, stop_reason: Any) -> Any:
        self.fed.append(list(token_ids))
        return SimpleNamespace(finished=STOPS_AFTER in token_ids or reason is not None)


@pytest.mark.parametrize(("gathered", "fed"), [([11, 12, 13], [[11], [12]]), ([14, 15], [[14], [15]])])
async def test_tokens_that_come_together_are_fed_one_by_one_so_that_none_follows_a_stop_string(
    gathered: list[int], fed: list[list[int]]
) -> None:
    from vllm.sampling_params import SamplingParams

    from deployments.replicas.resumption import resumed

    side = OutputSide()

    async def open_output_side(*_: Any) -> OutputSide:
        return side

    async def generate(*_: Any) -> AsyncGenerator[Any, None]:
        part = SimpleNamespace(token_ids=gathered, finish_reason="length", stop_reason=None)
        yield SimpleNamespace(outputs=[part])

    sent = Sent(outputs=((10,),), frames=1, digest=b"", created="")
    sampling = SamplingParams(temperature=0.0, max_tokens=5)
    client: Any = SimpleNamespace(open_output_side=open_output_side)
    outputs = [one async for one in resumed(client, generate, {"prompt_token_ids": [1]}, sampling, "r", sent)]
    assert side.fed == [[10], *fed]
    assert [one.finished for one in outputs] == [False, False, True]


async def test_a_resumed_stream_counts_once_against_the_engines_limits() -> None:
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.output_processor import OutputProcessor

    from deployments.replicas.resumption import resumed

    sampling = SamplingParams(max_tokens=5, detokenize=False, output_kind=RequestOutputKind.DELTA)
    engine_side = OutputProcessor(None, log_stats=False)

    async def tasks() -> tuple[str, ...]:
        return ("generate",)

    def process_inputs(request_id: str, prompt: Any, sampling: Any, **_: Any) -> EngineCoreRequest:
        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=prompt["prompt_token_ids"],
            mm_features=None,
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        request.external_req_id = request_id
        return request

    client: Any = SimpleNamespace(
        output_processor=engine_side,
        model_config=SimpleNamespace(max_model_len=100),
        get_supported_tasks=tasks,
        input_processor=SimpleNamespace(process_inputs=process_inputs, assign_request_id=lambda request: None),
    )
    counted: list[int] = []

    async def generate(*_: Any) -> AsyncGenerator[Any, None]:
        counted.append(engine_side.get_num_unfinished_requests())
        for token in (11, 12):
            part = SimpleNamespace(token_ids=[token], finish_reason=None, stop_reason=None)
            yield SimpleNamespace(outputs=[part])

    sent = Sent(outputs=((10,),), frames=1, digest=b"", created="")
    outputs = [one async for one in resumed(client, generate, {"prompt_token_ids": [1]}, sampling, "r", sent)]
    assert [list(one.outputs[0].token_ids) for one in outputs] == [[10], [11], [12]]
    assert counted == [0]


@pytest.mark.parametrize("before", [("other",), ("red", "blue", "red"), ()])
async def test_a_stream_does_not_go_on_with_another_image(before: tuple[str, ...]) -> None:
    """A prompt names an image by its URL, and both replicas load it."""
    from vllm.sampling_params import SamplingParams

    from deployments.replicas.resumption import resumed

    sent = Sent(outputs=((10,),), frames=1, digest=b"", created="", usage=Usage(media=before))
    prompt = {"prompt_token_ids": [1], "mm_hashes": {"image": ["red", "blue"]}}
    with pytest.raises(NotResumableError, match="another image"):
        async for _ in resumed(None, None, prompt, SamplingParams(), "r", sent):  # type: ignore[arg-type]
            pass
