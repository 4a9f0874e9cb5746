"""Ray Serve LLM's LLMConfig and Serve's deployment options of a pool, from its configuration."""

import math
from typing import Any

from ray.serve.llm import LLMConfig

from deployments.adapters_config import ADAPTERS_KEY, adapter_arguments
from deployments.config import STAGE_KEY, ServiceConfig
from deployments.pool_config import EMULATOR_KEY, RoleConfig
from deployments.replicas import start_host
from deployments.vllm_seam.engine_arguments import check_known
from deployments.vllm_seam.worker_extension import IMPORT_PATH as WORKER_EXTENSION
from kvtransfer.connector import ConnectorConfig
from kvtransfer.topology import Role
from router.config import RouterConfig

_ENGINE_CLASS = "RAYLLM_VLLM_ENGINE_CLS"
_NEVER_S = 1e9  # period, seconds, of what should never happen
_HEALTH_CHECK_S = 2.0  # longest time until Serve replaces a replica that has ended, seconds; Serve's default is 10


def llm_config(
    service: ServiceConfig,
    role: Role,
    pool: RoleConfig,
    *,
    kv_transfer: ConnectorConfig | None,
    routers: int = 1,
    gpu_resource: str | None = None,
    host_kind: str | None = None,
) -> LLMConfig:
    """Ray Serve LLM's configuration of one pool.

    ``kv_transfer``: ``None`` for an engine that hands no KV over. ``routers``: number of routers that send to the pool.
    ``gpu_resource``: name of Ray's resource for the pool's GPUs; ``None``: ``GPU``. ``host_kind``: kind of the start
    hosts of its replicas; ``None``: it has none. Raises ValueError: vLLM does not know an engine argument; the error
    has the most similar name.
    """
    model, report_s = service.model, None if service.autoscale is None else service.autoscale.report_s
    kwargs = service.engine_kwargs_of(pool)
    check_known(kwargs)
    env, experimental = pool_environment(pool), _experimental(service, pool)
    if host_kind is not None:
        env |= start_host.variables(host_kind)
    return LLMConfig(
        model_loading_config={"model_id": model.id, "model_source": str(model.folder or model.source)},
        engine_kwargs={
            # With one KV group per kind of attention, NIXL's failed pulls are not noticed and the answer is garbage
            # (vllm issue 52234). vLLM refuses at start a model that needs these groups.
            "disable_hybrid_kv_cache_manager": True,
            **kwargs,
            **adapter_arguments(model.adapters, model.adapters_folder, kwargs),
            "tensor_parallel_size": pool.tensor_parallel_size,
            "pipeline_parallel_size": pool.pipeline_parallel_size,
            "worker_extension_cls": WORKER_EXTENSION,
            **({} if kv_transfer is None else {"kv_transfer_config": kv_transfer.kv_transfer_config(role)}),
            **({"enable_sleep_mode": True} if pool.engine_sleep and pool.gpus_per_replica else {}),
        },
        accelerator_type=None if gpu_resource else pool.placement.accelerator_type,
        placement_group_config={"bundles": worker_bundles(pool, gpu_resource), "strategy": pool.placement.strategy},
        runtime_env={"env_vars": env} if env else None,
        # vLLM then writes into the process's Prometheus registry, which /metrics collects. Ray's wrapper would send the
        # numbers to metrics that no code can read back.
        log_engine_metrics=False,
        experimental_configs=experimental,
        deployment_config={
            **_replica_options(pool, report_s),
            "ray_actor_options": {"num_cpus": pool.placement.cpus_per_replica},
            "max_ongoing_requests": pool.max_ongoing_requests,
            "graceful_shutdown_timeout_s": pool.graceful_shutdown_timeout_s,
            "health_check_period_s": _HEALTH_CHECK_S,
            "request_router_config": router_options(
                role, service.router, is_gated=report_s is not None, routers=routers
            ),
        },
    )


def pool_environment(pool: RoleConfig) -> dict[str, str]:
    """Variables in which the replicas of a pool may differ from those of others."""
    # Ray Serve LLM's own variable for another engine class.
    emulated = {} if pool.emulator is None else {_ENGINE_CLASS: "deployments.emulated.engine.EmulatedEngine"}
    return {**pool.env, **emulated}


def _experimental(service: ServiceConfig, pool: RoleConfig) -> dict[str, Any]:
    """What LLMConfig has no field for."""
    # 0: each event of a stream is sent at once. By default Ray Serve LLM collects events for 50 ms.
    values: dict[str, Any] = {"stream_batching_interval_ms": 0}
    if service.model.stage_folder is not None:
        values[STAGE_KEY] = str(service.model.stage_folder)
    if service.model.has_adapters:
        folder = service.model.adapters_folder
        values[ADAPTERS_KEY] = {
            "configured": {adapter.id: str(adapter.path) for adapter in service.model.adapters},
            "folder": None if folder is None else str(folder),
        }
    if pool.emulator is not None:
        # Replicas run in another folder, so the path must be absolute.
        emulator = pool.emulator.model_copy(update={"profile": pool.emulator.profile.absolute()})
        values[EMULATOR_KEY] = emulator.model_dump(mode="json")
    return values


def _replica_options(pool: RoleConfig, report_s: float | None) -> dict[str, Any]:
    """Serve's options for the number of replicas: a fixed one, or bounds for the autoscaling policy.

    ``report_s``: period of the replicas' reports; ``None``: the pool is not autoscaled.
    """
    if report_s is None:
        return {"num_replicas": pool.replicas}
    return {"autoscaling_config": replica_bounds(pool.replicas, pool.max_replicas, report_s)}


def replica_bounds(lowest: int, highest: int | None, report_s: float) -> dict[str, Any]:
    """Serve's ``autoscaling_config`` of a deployment whose replicas report every ``report_s`` seconds.

    Serve's own delays are 0, since Tandem's guard damps changes. ``initial_replicas`` is not set: any change of the
    deployment would reset the number of replicas to it.
    """
    return {
        "min_replicas": lowest,
        "max_replicas": highest,
        "upscale_delay_s": 0.0,
        "downscale_delay_s": 0.0,
        "metrics_interval_s": report_s,
        "look_back_period_s": 1.25 * report_s,  # more than a period, or a report could be empty
    }


def serve_options(pool: RoleConfig) -> dict[str, Any]:
    """Serve's options of a pool for which LLMConfig has no field."""
    options: dict[str, Any] = {"max_surge_percent": math.ceil(100 * pool.max_surge_frac)}
    if labels := pool.placement.node_labels:
        options["placement_group_bundle_label_selector"] = [dict(labels) for _ in range(pool.workers)]
    return options


def router_options(role: Role, router: RouterConfig, *, is_gated: bool, routers: int) -> dict[str, Any]:
    """Serve's request-router options; set from the start, since a change of them would restart the application.

    ``is_gated``: whether the autoscaler's plan says which replicas get requests. ``routers``: number of routers that
    send to the pool.
    """
    return {
        "request_router_class": "router.ray_router:TandemRouter",
        "request_router_kwargs": {
            "policy": router.policy,
            "is_gated": is_gated,
            "asked_replicas": router.asked(routers),
            "asks_tokens": role is Role.PREFILL,
            "most_ejected_frac": router.outlier.most_frac,
            "follows_prefixes": router.follows_prefixes,
            # A decode replica reports a number of requests. What it holds and the bound of its load are in tokens.
            "request_tokens": router.prefix.request_tokens if role is Role.DECODE else None,
            "sent_s": router.prefix.sent_s,
        },
        # Routers ask replicas themselves. Serve's controller would send every change of its numbers to every handle.
        "request_routing_stats_period_s": _NEVER_S,
    }


def worker_bundles(pool: RoleConfig, gpu_resource: str | None) -> list[dict[str, float]]:
    """What Ray reserves for each worker of an engine; ``gpu_resource``: as for ``llm_config``."""
    bundle: dict[str, float] = {"CPU": pool.placement.cpus_per_worker}
    if pool.placement.accelerator_type:
        bundle[gpu_resource or "GPU"] = pool.placement.gpus_per_worker
    return [dict(bundle) for _ in range(pool.workers)]
