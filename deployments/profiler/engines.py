"""Engines outside of Ray that are measured, and single measurements on them."""

import asyncio
import dataclasses
import gc
import os
import statistics
import time
import uuid
from bisect import bisect_right
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import groupby, pairwise, repeat
from typing import Any

from vllm import AsyncLLMEngine
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams

from deployments.config import ServiceConfig
from deployments.machine.claims import CLAIMS, CoreClaim, PortClaim
from deployments.pool_config import RoleConfig
from deployments.profiler.rounds import MeasuringError
from deployments.replicas.engine_host import core_binding
from deployments.replicas.prefill import prefill_sampling
from kvtransfer.topology import Role

_HOST = "127.0.0.1"  # both engines run on this machine
DECODE_STEPS = 48  # decode steps of each measured point of the decode surface
_STRETCH_STEPS = 8  # steps of a stretch of a measurement, whose mean counts
_STEPS_BESIDE = 24  # decode steps before, and after, a prompt that is computed beside them
_POLL_S = 0.001  # time between two looks at running streams, seconds


@asynccontextmanager
async def engine(
    role: Role, service: ServiceConfig, pool: RoleConfig, kwargs: dict[str, Any]
) -> AsyncIterator[AsyncLLMEngine]:
    """An engine on cores and a port of its own, as in a replica; it ends with the context.

    Raises MeasuringError: it does not start.
    """
    # The claims hold as long as these variables. The engine's processes inherit the environment.
    port = PortClaim(CLAIMS, _HOST)
    os.environ |= {"VLLM_NIXL_SIDE_CHANNEL_HOST": _HOST, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port.port)}
    if pool.placement.accelerator_type is None:
        cores = CoreClaim(CLAIMS, count=pool.cores_per_worker * pool.workers, from_end=role is Role.DECODE)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = core_binding(cores.cores, pool.workers)
    # Arguments of vLLM's HTTP front end alone are left out.
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    kwargs = {name: value for name, value in kwargs.items() if name in known}
    kwargs["kv_transfer_config"] = KVTransferConfig(**kwargs["kv_transfer_config"])
    model = str(service.model.folder or service.model.source)
    try:
        client = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model=model, **kwargs))
    except RuntimeError as error:
        raise MeasuringError(f"the {role} engine does not start ({error})") from error
    try:
        yield client
    finally:
        client.shutdown()
        del client
        gc.collect()


async def arrivals(client: AsyncLLMEngine, prompt: list[int], tokens: int, into: list[float], **extra: Any) -> None:
    """Append the arrival of each output token, by ``time.perf_counter``; ``extra``: the request's ``extra_args``."""
    sampling = SamplingParams(
        max_tokens=tokens,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args=extra or None,
    )
    async for output in client.generate(tokens_input(prompt), sampling, uuid.uuid4().hex):
        into += [time.perf_counter()] * len(output.outputs[0].token_ids)


async def prefill_s(client: AsyncLLMEngine, prompt: list[int]) -> float:
    """Seconds from a prompt, alone on the engine, to its first token."""
    sent_s, times = time.perf_counter(), list[float]()
    await arrivals(client, prompt, 1, times)
    return times[0] - sent_s


async def step_s(client: AsyncLLMEngine, prompts: Sequence[list[int]]) -> float:
    """Time of a decode step, seconds, while requests with these prompts decode together, in a calm quarter of the time.

    It is the mean over stretches of some steps, since outputs that come late are followed by others at once. Stretches
    of less than half the median are such outputs, and do not count. On average, the context is half of
    ``DECODE_STEPS`` longer than the prompt. Raises RuntimeError: the requests did not decode together.
    """
    times: list[list[float]] = [[] for _ in prompts]
    # The first request already decodes while the last one is still prefilled.
    tokens = DECODE_STEPS + _prefill_steps(client, prompts)
    await asyncio.gather(*(arrivals(client, *each) for each in zip(prompts, repeat(tokens), times)))
    # All requests decode from the latest first token until the earliest last token.
    begin_s, end_s = max(each[0] for each in times), min(each[-1] for each in times)
    tokens_s = [at_s for at_s in times[0] if begin_s <= at_s <= end_s]
    ends = zip(tokens_s, tokens_s[_STRETCH_STEPS:], strict=False)
    stretches = [(later_s - sooner_s) / _STRETCH_STEPS for sooner_s, later_s in ends]
    if not stretches:
        raise RuntimeError(f"{len(prompts)} requests did not decode together: the engine's KV or batch is too small")
    least_s = statistics.median(stretches) / 2.0
    steps = sorted(each for each in stretches if each >= least_s)
    return steps[len(steps) // 4]


async def added_s(client: AsyncLLMEngine, prompts: Sequence[list[int]], beside: list[int]) -> float:
    """Seconds that the prompt ``beside`` adds to streams with these prompts, in the median of the streams."""
    times: list[list[float]] = [[] for _ in prompts]
    tokens = 3 * _STEPS_BESIDE + _prefill_steps(client, [*prompts, beside])
    streams = [asyncio.create_task(arrivals(client, *each)) for each in zip(prompts, repeat(tokens), times)]
    try:
        while any(len(each) < _STEPS_BESIDE for each in times):
            await asyncio.sleep(_POLL_S)
            if any(stream.done() for stream in streams):
                raise RuntimeError("a request ended before the prompt beside it was sent: raise max_model_len")
        sent_s = time.perf_counter()
        await prefill_s(client, beside)
        done_s = time.perf_counter()
        await asyncio.gather(*streams)
    finally:
        for stream in streams:
            stream.cancel()
    added = []
    for each in times:
        before = bisect_right(each, sent_s) - 1  # the last token before the prompt
        after = min(bisect_right(each, done_s), len(each) - 1)  # the first token after it
        usual_s = statistics.median([*_gaps_s(each, each[0], sent_s), *_gaps_s(each, done_s, each[-1])])
        added.append(each[after] - each[before] - (after - before) * usual_s)
    return max(0.0, statistics.median(added))


async def handoff_s(prefill: AsyncLLMEngine, decode: AsyncLLMEngine, prompt: list[int]) -> float:
    """Seconds from prefill's answer to decode's first token, less one decode step.

    The step is the median of three: a slow one would make the handoff seem short, and the least time counts. Raises
    RuntimeError: the steps were as slow as the handoff with its step.
    """
    params: dict[str, Any] = {}
    async for output in prefill.generate(tokens_input(prompt), prefill_sampling(), uuid.uuid4().hex):
        params = output.kv_transfer_params
    sent_s, times = time.perf_counter(), list[float]()
    await arrivals(decode, prompt, 4, times, kv_transfer_params=params)  # the first token, and three steps
    step = statistics.median(later_s - sooner_s for sooner_s, later_s in pairwise(times))
    if (seconds := times[0] - sent_s - step) <= 0.0:
        raise RuntimeError(f"a decode step took {step:.3g} s, and a handoff with its step no more: the machine is busy")
    return seconds


async def pull_s(prefill: AsyncLLMEngine, decode: AsyncLLMEngine, stats: Any, prompt: list[int]) -> float:
    """Seconds of the transfer of a prompt's KV alone, as the decode engine's KV connector reports them.

    ``stats``: the decode engine's statistics. Raises RuntimeError: no transfer was reported.
    """
    before_s = stats.load.pull_s
    await handoff_s(prefill, decode, prompt)
    if stats.load.pull_s <= before_s:
        raise RuntimeError("the decode engine reports no pull of KV, and computed the prompt itself: see its log")
    return float(stats.load.pull_s - before_s)


def _prefill_steps(client: AsyncLLMEngine, prompts: Sequence[list[int]]) -> int:
    """Most steps in which these prompts are computed."""
    return -(-sum(map(len, prompts)) // client.vllm_config.scheduler_config.max_num_batched_tokens)  # rounded up


def _gaps_s(times: Sequence[float], begin_s: float, end_s: float) -> list[float]:
    """Seconds between tokens in an interval. Tokens of one output arrive at one time, and share the gap before them."""
    outputs = [(at_s, len(list(tokens))) for at_s, tokens in groupby(times) if begin_s < at_s <= end_s]
    return [(later_s - sooner_s) / tokens for (sooner_s, _), (later_s, tokens) in pairwise(outputs)]
