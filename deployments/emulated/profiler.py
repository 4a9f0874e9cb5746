"""Measures a prefill and a decode engine, linked as in production, and makes an ``EngineProfile``."""

import asyncio
import dataclasses
import gc
import os
import platform
import random
import statistics
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import vllm
from vllm import AsyncLLMEngine
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams

from autoscale.engines.profile import DecodeSurface, EngineProfile, Handoff, PrefillCurve, Source
from deployments.config import ServiceConfig
from deployments.machine.claims import CLAIMS, CoreClaim, PortClaim
from deployments.options import llm_config
from deployments.pool_config import GroupConfig, RoleConfig
from deployments.replicas.engine_host import core_binding
from deployments.replicas.prefill import prefill_sampling
from deployments.vllm_seam.worker_extension import METHOD_FLOPS, METHOD_PARAMETERS
from kvtransfer.connector import ConnectorConfig
from kvtransfer.topology import Role

_HOST = "127.0.0.1"  # both engines run on this machine
_PREFILL_TOKENS = (16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)  # prompt lengths of the prefill curve
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # requests in the batches of the decode surface
_HANDOFF_TOKENS = (128, 512, 1024, 2048, 4000)  # prompt lengths of the measured handoffs
_DECODE_STEPS = 48  # decode steps of each measured point of the decode surface
_REPEATS = 5  # repeats of each prefill and each handoff; the median counts

_RandomPrompt = Callable[[int], list[int]]  # number of tokens -> token ids of a prompt that no prefix cache has


def profile(
    name: str,
    service: ServiceConfig,
    group: GroupConfig,
    *,
    kv_transfer: ConnectorConfig,
    on_progress: Callable[[str], None],
) -> EngineProfile:
    """The profile of a group's engines. Starts a prefill and a decode engine, measures them, and ends them.

    Raises ValueError: the group has no engines that can be measured.
    """
    pools = {key.role: pool for key, pool in group.pools().items()}
    if len(pools) < len(Role):
        raise ValueError(
            f"group {group.name!r} has no prefill, and a profile needs both roles: give a group with prefill"
        )
    if any(pool.emulator is not None for pool in pools.values()):
        raise ValueError("an emulated engine has a profile already: give a config with real engines")
    # ``llm_config`` checks the arguments of both engines before either engine starts.
    engines = {
        role: _engine(role, service, pool, llm_config(service, role, pool, kv_transfer=kv_transfer).engine_kwargs)
        for role, pool in pools.items()
    }
    return asyncio.run(_profile(name, service, group, engines, on_progress))


async def _profile(
    name: str,
    service: ServiceConfig,
    group: GroupConfig,
    engines: Mapping[Role, AbstractAsyncContextManager[AsyncLLMEngine]],
    on_progress: Callable[[str], None],
) -> EngineProfile:
    on_progress("starting a prefill and a decode engine")
    started_s = time.monotonic()
    async with engines[Role.PREFILL] as prefill:
        start_s = time.monotonic() - started_s
        async with engines[Role.DECODE] as decode:
            config = decode.vllm_config
            vocabulary, rng = range(config.model_config.get_vocab_size()), random.Random(1)

            def random_prompt(tokens: int) -> list[int]:
                return rng.choices(vocabulary, k=tokens)

            kv_tokens = int(config.cache_config.num_gpu_blocks) * int(config.cache_config.block_size)
            curve = await _prefill_curve(prefill, random_prompt, on_progress)
            surface = await _decode_surface(decode, random_prompt, kv_tokens, on_progress)
            on_progress("handing KV over")
            handoff = await _handoff(prefill, decode, random_prompt)
            # Each worker of the decode engine answers for its own part.
            parameters = sum(await decode.collective_rpc(METHOD_PARAMETERS))
            flops = sum(await decode.collective_rpc(METHOD_FLOPS))
    placement = group.decode.placement
    return EngineProfile(
        name=name,
        model=service.model.id,
        gpu=placement.accelerator_type,
        gpus=group.decode.workers if placement.accelerator_type else 0,
        kv_tokens=kv_tokens,
        block_tokens=int(config.cache_config.block_size),
        max_batch_tokens=config.scheduler_config.max_num_batched_tokens,
        max_running=config.scheduler_config.max_num_seqs,
        prefill=curve,
        decode=surface,
        handoff=handoff,
        start_s=round(start_s, 1),
        flops_per_token=2.0 * parameters,  # a multiplication and an addition for each parameter
        peak_flops=flops,
        sources=_sources(placement.accelerator_type),
    )


@asynccontextmanager
async def _engine(
    role: Role, service: ServiceConfig, pool: RoleConfig, kwargs: dict[str, Any]
) -> AsyncIterator[AsyncLLMEngine]:
    """An engine on cores and a port of its own, as in a replica; it ends with the context."""
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
    client = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model=model, **kwargs))
    try:
        yield client
    finally:
        client.shutdown()
        del client
        gc.collect()


async def _token_times(client: AsyncLLMEngine, ids: list[int], tokens: int, **extra: Any) -> list[float]:
    """Arrival of each output token, seconds since the request was sent; ``extra``: its ``extra_args``."""
    sampling = SamplingParams(
        max_tokens=tokens,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args=extra or None,
    )
    sent_s = time.perf_counter()
    times: list[float] = []
    async for output in client.generate(tokens_input(ids), sampling, uuid.uuid4().hex):
        times += [time.perf_counter() - sent_s] * len(output.outputs[0].token_ids)
    return times


async def _prefill_curve(
    client: AsyncLLMEngine, random_prompt: _RandomPrompt, on_progress: Callable[[str], None]
) -> PrefillCurve:
    longest = client.model_config.max_model_len - 1  # the context has to hold the output token too
    lengths = sorted({min(tokens, longest) for tokens in _PREFILL_TOKENS})
    await _token_times(client, random_prompt(lengths[-1]), 1)  # warm-up
    seconds = []
    for tokens in lengths:
        on_progress(f"prefilling {tokens} tokens")
        times = [(await _token_times(client, random_prompt(tokens), 1))[0] for _ in range(_REPEATS)]
        seconds.append(statistics.median(times))
    # Due to noise a longer prompt may take less time. The curve must not fall, so each point is the largest so far.
    return PrefillCurve(tokens=tuple(lengths), seconds=_rounded(accumulate(seconds, max)))


async def _decode_surface(
    client: AsyncLLMEngine, random_prompt: _RandomPrompt, kv_tokens: int, on_progress: Callable[[str], None]
) -> DecodeSurface:
    scheduler = client.vllm_config.scheduler_config
    batches = [batch for batch in _BATCHES if batch <= scheduler.max_num_seqs]
    # The longest context with which the largest batch fits into the KV memory, with room for the measured steps.
    longest = min(client.model_config.max_model_len, kv_tokens // batches[-1]) - 2 * _DECODE_STEPS
    # The bounds 48, 64 and 80 are for small models. They differ, and each is longer than half the steps (``_step_s``).
    contexts = sorted({max(_DECODE_STEPS, longest // 8), max(64, longest // 2), max(80, longest * 3 // 4)})
    rows = []  # one for each batch: the seconds of a step at each context
    for batch in batches:
        row = []
        for context in contexts:
            on_progress(f"decoding {batch} at {context} tokens")
            row.append(await _step_s(client, random_prompt, batch, context, scheduler.max_num_batched_tokens))
        rows.append(_rounded(row))
    return DecodeSurface(batch=tuple(batches), context_tokens=tuple(contexts), step_s=tuple(rows))


async def _step_s(
    client: AsyncLLMEngine, random_prompt: _RandomPrompt, batch: int, context: int, max_batch_tokens: int
) -> float:
    """Median time of a decode step, seconds, in which each request of a batch has about ``context`` tokens."""
    # The first request already decodes while the last one is still prefilled.
    prefill_steps = -(-batch * context // max_batch_tokens)  # rounded up
    output_tokens = _DECODE_STEPS + prefill_steps
    # The context grows during the measurement, so a prompt is shorter by half the steps.
    prompts = [random_prompt(context - _DECODE_STEPS // 2) for _ in range(batch)]

    async def token_times(prompt: list[int]) -> list[float]:
        sent_s = time.perf_counter()
        return [sent_s + at_s for at_s in await _token_times(client, prompt, output_tokens)]

    times_by_request = await asyncio.gather(*map(token_times, prompts))
    # All requests decode from the latest first token until the earliest last token.
    begin_s, end_s = max(times[0] for times in times_by_request), min(times[-1] for times in times_by_request)
    step_times = []
    for times in times_by_request:
        # Tokens of one output arrive at one time: (time, number of tokens).
        arrivals = [(at_s, len(list(tokens))) for at_s, tokens in groupby(times) if begin_s < at_s <= end_s]
        step_times += [(later_s - sooner_s) / tokens for (sooner_s, _), (later_s, tokens) in pairwise(arrivals)]
    return statistics.median(step_times)


async def _handoff(prefill: AsyncLLMEngine, decode: AsyncLLMEngine, random_prompt: _RandomPrompt) -> Handoff:
    """A line through the handoff times of several prompt lengths.

    A handoff takes the time from prefill's answer to decode's first token, less one decode step.
    """
    longest = decode.model_config.max_model_len - 8  # leaves room for the output tokens
    lengths = sorted({min(tokens, longest) for tokens in _HANDOFF_TOKENS})
    points = []
    for tokens in (lengths[-1], *lengths):  # the first point is not counted: it has the handshake of the engines
        times = []
        for _ in range(_REPEATS):
            ids, params = random_prompt(tokens), None
            async for output in prefill.generate(tokens_input(ids), prefill_sampling(), uuid.uuid4().hex):
                params = output.kv_transfer_params
            # Four tokens: the first, and three steps.
            first_s, *later = await _token_times(decode, ids, 4, kv_transfer_params=params)
            step_s = (later[-1] - first_s) / len(later)
            times.append(first_s - step_s)
        points.append((tokens, statistics.median(times)))
    counted = np.array(points[1:])
    slope, base_s = np.polyfit(counted[:, 0], counted[:, 1], 1)
    bytes_per_token = _kv_bytes_per_token(decode)
    # If noise hides the slope, the longest handoff counts as transfer alone: a lower bound of the bandwidth.
    tokens, seconds = points[-1]
    token_s = float(slope) if slope > 0 else seconds / tokens
    return Handoff(
        base_s=round(max(0.0, float(base_s)), 6),
        kv_bytes_per_token=bytes_per_token,
        bytes_per_s=round(bytes_per_token / token_s),
    )


def _kv_bytes_per_token(client: AsyncLLMEngine) -> float:
    model, parallel = client.vllm_config.model_config, client.vllm_config.parallel_config
    # vLLM gives the layers of one pipeline stage and the heads of one tensor-parallel rank.
    layers = model.get_num_layers(parallel) * parallel.pipeline_parallel_size
    heads = model.get_num_kv_heads(parallel) * parallel.tensor_parallel_size
    keys_and_values = 2
    return float(keys_and_values * layers * heads * model.get_head_size() * model.dtype.itemsize)


def _rounded(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(round(float(value), 6) for value in values)


def _sources(gpu: str | None) -> tuple[Source, ...]:
    where = f"vLLM {vllm.__version__} on {gpu or _cpu()}"
    measured = {
        "prefill": f"{where}: one prompt alone, to its first token, median of 5",
        "decode": f"{where}: median step while the whole batch decodes; longer contexts than fit the largest batch are "
        "extrapolated",
        "handoff": f"{where}, over NIXL on one machine: prefill's answer to decode's first token less one step, a line "
        "through medians of 5; kv_bytes_per_token from the model's shape",
        "start_s": f"{where}: the engine alone, without its replica's imports",
        "peak_flops": f"{where}: best of 5 products of 1024 x 1024 matrices",
        "kv_tokens, block_tokens, max_batch_tokens, max_running": "the engine's own",
    }
    sources = (Source(part=part, kind="measured", text=text) for part, text in measured.items())
    return *sources, Source(part="flops_per_token", kind="derived", text="twice the parameters")


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
