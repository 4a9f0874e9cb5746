"""Measures a group's engines, both started as in production, and makes a profile of each."""

import asyncio
import platform
import random
import time
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import vllm
from vllm import AsyncLLMEngine

from autoscale.engines.profile import EngineProfile, Precision, Source
from deployments.config import ServiceConfig
from deployments.options import llm_config
from deployments.pool_config import GroupConfig, RoleConfig
from deployments.profiler.bench import Bench
from deployments.profiler.curves import EngineTracks, LinkTracks
from deployments.profiler.engines import engine
from deployments.profiler.points import Points
from deployments.profiler.rounds import OnProgress, measure_all
from deployments.vllm_seam.engine_stats import engine_stats
from deployments.vllm_seam.worker_extension import METHOD_FLOPS, METHOD_KV_BYTES, METHOD_PARAMETERS
from kvtransfer.connector import ConnectorConfig
from kvtransfer.topology import Role

# Engine arguments in which the two roles always differ, though the engines compute alike.
_OF_A_ROLE = ("kv_transfer_config",)


def profiles(
    name: str,
    service: ServiceConfig,
    group: GroupConfig,
    *,
    kv_transfer: ConnectorConfig,
    points: Path,
    on_progress: OnProgress,
) -> dict[Role, EngineProfile]:
    """The profile of each role's engine. Starts a prefill and a decode engine, measures them, and ends them.

    If both engines have the same arguments and hardware, they are one engine, and both roles have the same profile:
    prompts are measured on the prefill engine, and steps on the decode engine.

    Args:
        name: name of the profiles.
        service: service of the group.
        group: the group, with both roles.
        kv_transfer: the link of the two engines.
        points: file of the measured points; a run that was interrupted goes on with them.
        on_progress: called with what is measured next.

    Raises:
        ValueError: the group has no engines that can be measured, or the file has points of other engines.
    """
    pools = {key.role: pool for key, pool in group.pools().items()}
    if len(pools) < len(Role):
        raise ValueError(
            f"group {group.name!r} has no prefill, and a profile needs both roles: give a group with prefill"
        )
    if any(pool.emulator is not None for pool in pools.values()):
        raise ValueError("an emulated engine has a profile already: give a config with real engines")
    # ``llm_config`` checks the arguments of both engines before either engine starts.
    kwargs = {
        role: llm_config(service, role, pool, kv_transfer=kv_transfer).engine_kwargs for role, pool in pools.items()
    }
    known = Points(points, {str(role): _identity(service, pool, kwargs[role]) for role, pool in pools.items()})
    engines = {role: engine(role, service, pool, kwargs[role]) for role, pool in pools.items()}
    is_one_engine = len({str(_identity(service, pool, kwargs[role])) for role, pool in pools.items()}) == 1
    return asyncio.run(_profiles(name, service, pools, engines, known, is_one_engine, on_progress))


def _identity(service: ServiceConfig, pool: RoleConfig, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What decides how fast an engine computes."""
    arguments = {key: str(value) for key, value in sorted(kwargs.items()) if key not in _OF_A_ROLE}
    return {
        "model": str(service.model.source),
        "vllm": vllm.__version__,
        "gpu": pool.placement.accelerator_type or _cpu(),
        "gpus_per_worker": pool.placement.gpus_per_worker,
        "cores_per_worker": pool.cores_per_worker,
        "arguments": arguments,
    }


async def _profiles(
    name: str,
    service: ServiceConfig,
    pools: Mapping[Role, RoleConfig],
    engines: Mapping[Role, AbstractAsyncContextManager[AsyncLLMEngine]],
    points: Points,
    is_one_engine: bool,
    on_progress: OnProgress,
) -> dict[Role, EngineProfile]:
    on_progress("starting a prefill and a decode engine")
    began_s = time.monotonic()
    rng = random.Random(time.time())  # another run must not find its prompts in a prefix cache
    async with engines[Role.PREFILL] as prefill:
        start_s = time.monotonic() - began_s
        async with engines[Role.DECODE] as decode:
            clients = {Role.PREFILL: prefill, Role.DECODE: decode}
            benches = {role: Bench(client, role, rng) for role, client in clients.items()}
            links = LinkTracks(benches[Role.PREFILL], benches[Role.DECODE], engine_stats())
            on_progress("warming up")
            for warm_up in (*(bench.warm_up for bench in benches.values()), links.warm_up):
                await warm_up()
            # Engines that are alike are measured once: prompts on the prefill engine, steps on the decode engine.
            roles = [Role.DECODE] if is_one_engine else list(Role)
            prompts = {role: benches[Role.PREFILL if is_one_engine else role] for role in roles}
            measured = {role: EngineTracks.of(prompts[role], benches[role]) for role in roles}
            tracks = [track for each in measured.values() for track in each.tracks]
            await measure_all([*tracks, links.handoffs, links.pulls], points, rng, on_progress)
            kv_bytes_per_token = await _kv_bytes_per_token(benches[Role.DECODE])
            handoff, link = links.handoff(kv_bytes_per_token), links.link(kv_bytes_per_token)
            made = {
                role: await _profile(
                    name if role is Role.DECODE else f"{name}_{role}",
                    service.model.id,
                    pools[role],
                    measured[role],
                    benches[role],
                    {"handoff": handoff, "link": link, "start_s": round(start_s, 1)},
                )
                for role in roles
            }
    return made if len(made) > 1 else dict.fromkeys(Role, made[Role.DECODE])


async def _profile(
    name: str,
    model: str,
    pool: RoleConfig,
    measured: EngineTracks,
    bench: Bench,
    common: Mapping[str, Any],
) -> EngineProfile:
    """The profile of one engine; ``common``: fields that both roles have."""
    curve, surface = measured.prefill_curve(), measured.decode_surface()
    config = bench.client.vllm_config
    # Each worker answers for its own part.
    parameters = sum(await bench.client.collective_rpc(METHOD_PARAMETERS))
    flops = sum(await bench.client.collective_rpc(METHOD_FLOPS))
    gpu = pool.placement.accelerator_type
    return EngineProfile(
        name=name,
        model=model,
        gpu=gpu,
        gpus=pool.workers if gpu else 0,
        kv_tokens=bench.kv_tokens,
        block_tokens=int(config.cache_config.block_size),
        max_batch_tokens=bench.max_batch_tokens,
        max_running=config.scheduler_config.max_num_seqs,
        prefill=curve,
        decode=surface,
        mixed_prefill_frac=measured.mixed_prefill_frac(curve),
        flops_per_token=2.0 * parameters,  # a multiplication and an addition for each parameter
        peak_flops=flops,
        precision=Precision(
            dtype=str(config.model_config.dtype).removeprefix("torch."),
            quantization=config.model_config.quantization,
            kv_cache_dtype=str(config.cache_config.cache_dtype),
        ),
        sources=_sources(gpu),
        left_out=measured.left_out(curve, surface),
        **common,
    )


async def _kv_bytes_per_token(bench: Bench) -> float:
    return float(sum(await bench.client.collective_rpc(METHOD_KV_BYTES))) / bench.kv_tokens


def _sources(gpu: str | None) -> tuple[Source, ...]:
    where = f"vLLM {vllm.__version__} on {gpu or _cpu()}"
    times = (
        "least times of several rounds at the machine's undisturbed pace, as a form with few terms, corrected where "
        "repeats confirm another time"
    )
    measured = {
        "prefill": f"{where}: one prompt alone, to its first token; {times}",
        "decode": f"{where}: step while the whole batch decodes, in a calm quarter of the time; {times}",
        "mixed_prefill_frac": f"{where}: what prompts of 128 and 512 tokens add to the streams beside them, "
        "over what they add to an idle engine",
        "handoff": f"{where}, over NIXL on one machine: prefill's answer to decode's first token less one step, a line "
        "through several lengths; kv_bytes_per_token by the engine's own tensors",
        "link": f"{where}, over NIXL on one machine: time and bytes of each pull by NIXL's own telemetry, a line "
        "through several lengths",
        "start_s": f"{where}: the engine alone, without its replica's imports",
        "peak_flops": f"{where}: best of 5 products of square matrices",
        "kv_tokens, block_tokens, max_batch_tokens, max_running": "the engine's own",
    }
    sources = (Source(part=part, kind="measured", text=text) for part, text in measured.items())
    return *sources, Source(part="flops_per_token", kind="derived", text="twice the parameters")


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
