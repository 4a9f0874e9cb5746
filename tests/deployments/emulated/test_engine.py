"""The emulated engine has vLLM's formats and its profile's times, and frees the place of an abandoned request."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from autoscale.engines.profile import EngineProfile
from deployments.config import ModelConfig, ServiceConfig
from deployments.pool_config import GroupConfig, RoleConfig
from deployments.vllm_seam.worker_extension import METHOD_GPU, METHOD_UNREAD_KV
from kvtransfer.connector import ConnectorConfig, prefill_request_params
from kvtransfer.topology import Role

pytestmark = pytest.mark.vllm

PROFILE = Path(__file__).parents[3] / "configs" / "profiles" / "h100_llama70b_fp8_tp1.json"


def make_engine(max_model_len: int) -> Any:
    """An engine twenty times as fast as its profile, ready at once."""
    from deployments.emulated.engine import EmulatedEngine
    from deployments.options import llm_config

    pool = RoleConfig.model_validate(
        {"emulator": {"profile": str(PROFILE), "start_s": 0, "time_factor": 20, "chunk_s": 0.01}}
    )
    service = ServiceConfig(
        model=ModelConfig(id="m", source="org/m"),
        engine_kwargs={"max_model_len": max_model_len},
        groups=(GroupConfig(name="g0", decode=pool),),
    )
    return EmulatedEngine(llm_config(service, Role.DECODE, pool, kv_transfer=ConnectorConfig()))


@pytest.fixture(name="engine")
async def _engine() -> AsyncIterator[Any]:
    engine = make_engine(max_model_len=4096)
    await engine.start()
    yield engine
    await engine.check_health()
    engine._engine_client._task.cancel()


@pytest.mark.parametrize(("set_to", "context"), [(4096, 4096), (-1, EngineProfile.load(PROFILE).kv_tokens)])
def test_a_context_without_a_length_is_what_the_memory_holds(set_to: int, context: int) -> None:
    assert make_engine(set_to)._engine_client.model_config.max_model_len == context


def request(**fields: Any) -> Any:
    from deployments.replicas.openai_layer import parse_request

    endpoint = "chat" if "messages" in fields else "completions"
    return parse_request(endpoint, {"model": "m", "max_tokens": 30, **fields}, "r1")


async def chunks_of(stream: Any) -> list[Any]:
    return [chunk async for chunk in stream]


async def test_a_stream_has_vllms_format_and_every_token(engine: Any) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionStreamResponse
    from vllm.entrypoints.openai.completion.protocol import CompletionStreamResponse

    usage = {"include_usage": True}
    text = await chunks_of(engine.completions(request(prompt="one two three four", stream=True, stream_options=usage)))
    chat = await chunks_of(
        engine.chat(request(messages=[{"role": "user", "content": "hello"}], stream=True, stream_options=usage))
    )
    for chunks, model in ((text, CompletionStreamResponse), (chat, ChatCompletionStreamResponse)):
        assert chunks[-1] == "data: [DONE]\n\n"
        events = [model.model_validate(json.loads(chunk.removeprefix("data: "))) for chunk in chunks[:-1]]
        assert events[-1].usage.completion_tokens == 30
        assert events[-2].choices[0].finish_reason == "length"
    words = "".join(json.loads(chunk[6:])["choices"][0]["text"] for chunk in text[:-2]).split()
    assert len(words) == 30


async def test_an_answer_in_one_piece_has_openais_format_too(engine: Any) -> None:
    from openai.types import Completion
    from openai.types.chat import ChatCompletion

    (text,) = await chunks_of(engine.completions(request(prompt=[1, 2, 3])))
    (chat,) = await chunks_of(engine.chat(request(messages=[{"role": "user", "content": "hello"}])))
    assert Completion.model_validate_json(text.model_dump_json()).usage.total_tokens == 33
    assert ChatCompletion.model_validate_json(chat.model_dump_json()).choices[0].message.content


@pytest.mark.parametrize("messages", [[{"role": "user"}], [{"role": "user", "content": ""}]])
async def test_an_empty_message_is_answered(engine: Any, messages: list[dict[str, str]]) -> None:
    (chat,) = await chunks_of(engine.chat(request(messages=messages)))
    assert json.loads(chat.model_dump_json())["usage"]["prompt_tokens"] >= 1


async def test_there_is_no_application_of_vllms(engine: Any) -> None:
    assert await engine.build_asgi_app() is None  # the base class raises NotImplementedError, which would be a 500


@pytest.mark.parametrize("embeds", ["@", ["@", ""]])
async def test_embeddings_are_refused(engine: Any, embeds: Any) -> None:
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match="give a prompt"):
        await chunks_of(engine.completions(request(prompt_embeds=embeds)))


async def test_a_prompt_takes_the_time_of_the_profile(engine: Any) -> None:
    client = engine._engine_client
    started_s = time.monotonic()
    await chunks_of(engine.completions(request(prompt=list(range(1700)), max_tokens=1)))
    # 269 ms in a twentieth of the time, and what a loaded machine adds.
    assert 0.269 / 20 <= time.monotonic() - started_s < 30.0
    assert client.stats.load.prefill_tokens == 1700
    assert client.stats.load.decode_tokens == 1


async def test_the_time_of_a_prompt_excludes_the_queue_before_it(engine: Any) -> None:
    from vllm.sampling_params import SamplingParams

    from deployments.vllm_seam.engine_types import computed_s

    async def ended(number: int) -> tuple[float, float]:
        prompt = {"type": "token", "prompt_token_ids": [number, *range(3000)]}
        started_s = time.monotonic()
        *_, last = [
            one async for one in engine._engine_client.generate(prompt, SamplingParams(max_tokens=1), f"{number}")
        ]
        return time.monotonic() - started_s, computed_s(last.metrics) or 0.0

    answers = await asyncio.gather(*map(ended, range(12)))
    alone_s = 3000 * 0.269 / 1700 / 20
    assert max(waited_s for waited_s, _ in answers) > 10 * alone_s
    # Of two prompts that share steps, and what a loaded machine adds.
    assert all(0.5 * alone_s < computed_s < 5 * alone_s + 0.1 for _, computed_s in answers), answers


async def test_kv_that_prefill_hands_over_saves_decode_the_prompt(engine: Any) -> None:
    from vllm.sampling_params import SamplingParams

    client = engine._engine_client
    prompt = {"type": "token", "prompt_token_ids": list(range(1000))}
    extra = {"kv_transfer_params": prefill_request_params()}
    *_, last = [o async for o in client.generate(prompt, SamplingParams(max_tokens=1, extra_args=extra), "p")]
    assert last.finished
    assert await client.collective_rpc(METHOD_UNREAD_KV) == [1]
    before = client.stats.load.prefill_tokens
    extra = {"kv_transfer_params": last.kv_transfer_params}
    outputs = [o async for o in client.generate(prompt, SamplingParams(max_tokens=5, extra_args=extra), "d")]
    assert sum(len(output.outputs[0].token_ids) for output in outputs) >= 5
    assert client.stats.load.prefill_tokens - before == 1  # the last prompt token, for its logits
    assert await client.collective_rpc(METHOD_UNREAD_KV) == [0]
    assert [set(report) for report in await client.collective_rpc(METHOD_GPU)] == [
        {"gpu_utilization_frac", "sm_activity_frac"}
    ]
    with pytest.raises(NotImplementedError, match="no worker method 'other'"):
        await client.collective_rpc("other")


async def test_an_abandoned_request_frees_its_place(engine: Any) -> None:
    stream = engine.completions(request(prompt="hello", max_tokens=4000, stream=True))
    await anext(stream)
    assert engine._engine_client.stats.load.running_requests == 1
    await stream.aclose()
    await asyncio.sleep(0.05)
    load = engine._engine_client.stats.load
    assert (load.running_requests, load.waiting_requests, load.kv_usage_frac) == (0, 0, 0.0)


async def test_a_prompt_beyond_the_context_is_refused(engine: Any) -> None:
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match="context length is 4096"):
        await chunks_of(engine.completions(request(prompt=list(range(4096)))))


async def test_utilisation_is_the_busy_time_and_activity_the_computed_share(engine: Any) -> None:
    stats = engine._engine_client.stats
    stats.gpu_report()
    await chunks_of(engine.completions(request(prompt=list(range(1000)), max_tokens=100)))
    busy = stats.gpu_report()
    assert 0.0 < busy["sm_activity_frac"] < busy["gpu_utilization_frac"] <= 1.0
    await asyncio.sleep(0.05)
    assert stats.gpu_report() == {"gpu_utilization_frac": 0.0, "sm_activity_frac": 0.0}


async def test_a_first_token_is_known_before_the_answer_is_whole(engine: Any) -> None:
    client, has_first = engine._engine_client, asyncio.Event()
    assert not client.has_first("r1")
    client.stats.on_step = lambda: client.has_first("r1") and has_first.set()
    answer = asyncio.create_task(chunks_of(engine.completions(request(prompt=list(range(50))))))
    async with asyncio.timeout(30.0):
        await has_first.wait()
    assert not answer.done()
    await answer
