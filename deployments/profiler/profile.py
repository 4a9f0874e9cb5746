"""Measures a group's engines, both started as in production, and makes a profile of each."""

import asyncio
import platform
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import numpy as np
import vllm
from vllm import AsyncLLMEngine

from autoscale.engines.profile import EngineProfile, Handoff, LeftOut, Source
from deployments.config import ServiceConfig
from deployments.options import llm_config
from deployments.pool_config import GroupConfig, RoleConfig
from deployments.profiler.curves import Bench, OnProgress, handoff
from deployments.profiler.engines import engine
from deployments.profiler.points import Points
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
            benches = {role: Bench(client, role, points, rng, on_progress) for role, client in clients.items()}
            on_progress("handing KV over")
            link = await handoff(
                benches[Role.PREFILL], benches[Role.DECODE], points, await _kv_bytes_per_token(benches[Role.DECODE])
            )
            made = {}
            for role, pool in pools.items():
                if is_one_engine and role is Role.PREFILL:
                    continue
                prompts = benches[Role.PREFILL] if is_one_engine else benches[role]
                own_name = name if is_one_engine or role is Role.DECODE else f"{name}_{role}"
                made[role] = await _profile(own_name, service, pool, prompts, benches[role], link, start_s)
    return made if len(made) > 1 else dict.fromkeys(Role, made[Role.DECODE])


async def _profile(
    name: str,
    service: ServiceConfig,
    pool: RoleConfig,
    prompts: Bench,
    steps: Bench,
    link: Handoff,
    start_s: float,
) -> EngineProfile:
    """Measure prompts on one engine and steps on another; the two are one, or alike."""
    curve = await prompts.prefill_curve()
    surface = await steps.decode_surface()
    mixed_frac = await steps.mixed_prefill_frac(curve, surface.context_tokens[len(surface.context_tokens) // 2])
    prompt_errors, step_errors = await prompts.left_out_prefill(curve), await steps.left_out_decode(surface)
    config = steps.client.vllm_config
    # Each worker answers for its own part.
    parameters = sum(await steps.client.collective_rpc(METHOD_PARAMETERS))
    flops = sum(await steps.client.collective_rpc(METHOD_FLOPS))
    gpu = pool.placement.accelerator_type
    return EngineProfile(
        name=name,
        model=service.model.id,
        gpu=gpu,
        gpus=pool.workers if gpu else 0,
        kv_tokens=steps.kv_tokens,
        block_tokens=int(config.cache_config.block_size),
        max_batch_tokens=config.scheduler_config.max_num_batched_tokens,
        max_running=config.scheduler_config.max_num_seqs,
        prefill=curve,
        decode=surface,
        mixed_prefill_frac=mixed_frac,
        handoff=link,
        start_s=round(start_s, 1),
        flops_per_token=2.0 * parameters,  # a multiplication and an addition for each parameter
        peak_flops=flops,
        sources=_sources(gpu),
        left_out=LeftOut(
            points=len(prompt_errors) + len(step_errors),
            prefill_error_frac_p90=_p90(prompt_errors),
            decode_error_frac_p90=_p90(step_errors),
        ),
    )


async def _kv_bytes_per_token(bench: Bench) -> float:
    return float(sum(await bench.client.collective_rpc(METHOD_KV_BYTES))) / bench.kv_tokens


def _p90(errors: Sequence[float]) -> float:
    return round(float(np.quantile(np.abs(errors), 0.9)), 3)


def _sources(gpu: str | None) -> tuple[Source, ...]:
    where = f"vLLM {vllm.__version__} on {gpu or _cpu()}"
    measured = {
        "prefill": f"{where}: one prompt alone, to its first token, the two least times that agree",
        "decode": f"{where}: median step while the whole batch decodes, the two least that agree; contexts that do not "
        "fit a batch are on the line through the two longest that do",
        "mixed_prefill_frac": f"{where}: what prompts of 128 and 512 tokens add to the streams beside them, "
        "over what they add to an idle engine",
        "handoff": f"{where}, over NIXL on one machine: prefill's answer to decode's first token less one step, a line "
        "through several lengths; kv_bytes_per_token by the engine's own tensors",
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
