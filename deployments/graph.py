"""The deployment graph: the endpoint calls each group's decode pool, and a decode pool its group's prefill pool."""

from collections.abc import Sequence
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import DeploymentActorConfig
from ray.serve.llm import build_llm_deployment

from autoscale.slo import SloConfig
from autoscale.topology_config import TopologyConfig
from autoscale.types import ENDPOINT
from deployments.actors.adapter_board import AdapterBoard
from deployments.actors.coordinator import Coordinator
from deployments.actors.health_board import HealthBoard
from deployments.actors.prefill_queue import MAX_CALLS, PrefillQueue
from deployments.actors.prefix_board import PrefixBoard
from deployments.actors.start_hosts import HostPool, StartHosts
from deployments.config import ServiceConfig, StartHostsConfig
from deployments.endpoint.config import IngressConfig
from deployments.endpoint.ingress import Ingress
from deployments.endpoint.served_model import Service
from deployments.options import llm_config, pool_environment, replica_bounds, serve_options, worker_bundles
from deployments.pool_config import RoleConfig
from deployments.replicas.decode import DecodeServer
from deployments.replicas.prefill import PrefillServer
from deployments.serve_seam.host_notes import kind
from deployments.serve_seam.start_hosts import runtime_env_of
from kvtransfer.connector import ConnectorConfig
from kvtransfer.topology import Role

_SHUTDOWN_S = 30.0  # time, seconds, that a stopping replica of the endpoint has in addition to the longest request
_SURGE_PERCENT = 25  # share of the endpoint's replicas that start before old ones stop, so that one always answers


def build_graph(
    services: Sequence[ServiceConfig],
    *,
    kv_transfer: ConnectorConfig,
    ingress: IngressConfig,
    topology: TopologyConfig | None,
    start_hosts: StartHostsConfig,
    keeps_settings: bool,
) -> Application:
    """Bind every deployment of an application.

    Raises:
        ValueError: an engine argument that vLLM does not know, or a profile that cannot be read.
    """
    bound = [_service(config, kv_transfer, ingress, topology, start_hosts) for config in services]
    outliers = {
        str(key): service.router.outlier.model_dump(mode="json")
        for service in services
        for group in service.all_groups
        for key in group.pools()
    }
    actors = [_actor("health_board", HealthBoard, {"configs": outliers}), *_prefill_queues(services)]
    if any(service.router.follows_prefixes for service in services):
        actors.append(_actor("prefix_board", PrefixBoard, {}))
    if with_adapters := [service.model for service in services if service.model.has_adapters]:
        configured = {
            model.id: [(adapter.id, str(adapter.path)) for adapter in model.adapters] for model in with_adapters
        }
        board = {"configured": configured, "keeps_settings": keeps_settings}
        actors.append(_actor("adapter_board", AdapterBoard, board))
    if autoscaled := [service for service in services if service.autoscale is not None]:
        plain = [service.model_dump(mode="json") for service in autoscaled]
        pools = {service.model.id: service.pool_limits(topology).model_dump(mode="json") for service in autoscaled}
        plain_topology = None if topology is None else topology.model_dump(mode="json")
        hosts = _start_hosts(bound, start_hosts, topology).model_dump(mode="json")
        arguments = {
            "services": plain,
            "pools": pools,
            "topology": plain_topology,
            "start_hosts": hosts,
            "keeps_settings": keeps_settings,
        }
        actors.append(_actor("coordinator", Coordinator, arguments))
    return (
        serve.deployment(Ingress)
        .options(
            name=ENDPOINT,
            **_endpoint_replicas(services, ingress),
            max_ongoing_requests=10_000,
            graceful_shutdown_timeout_s=ingress.request_timeout_s + _SHUTDOWN_S,
            max_surge_percent=_SURGE_PERCENT,
            ray_actor_options={
                "num_cpus": ingress.cpus_per_replica,
                **({"label_selector": ingress.node_labels} if ingress.node_labels else {}),
            },
            deployment_actors=actors,
        )
        .bind(services=bound, config=ingress)
    )


def _prefill_queues(services: Sequence[ServiceConfig]) -> list[DeploymentActorConfig]:
    """The prefill queue of each group whose prompts wait in one, also of groups for very long prompts."""
    return [
        _actor(
            f"prefill_queue_{key}",
            PrefillQueue,
            {
                "pool": str(key),
                "config": service.router.prefill_queue.model_dump(mode="json"),
                "lease_s": service.router.prefill_timeout_s,
            },
            max_calls=MAX_CALLS,
        )
        for service in services
        if service.router.prefill_queue.strategy != "direct"
        for group in service.all_groups
        for key in group.pools()
        if key.role is Role.PREFILL
    ]


def _host_kind(pool: RoleConfig) -> str:
    """Kind of a pool's start hosts: Ray gives a process only to a replica with the same runtime environment."""
    # Ray Serve LLM adds this process's environment, and a variable with the GPUs of a worker.
    built_in, gpus = dict(ray.get_runtime_context().runtime_env), pool.placement.gpus_per_worker
    return kind({"own": pool_environment(pool), "built_in": built_in, "gpus_per_worker": gpus})


def _start_hosts(services: Sequence[Service], config: StartHostsConfig, topology: TopologyConfig | None) -> StartHosts:
    """What the coordinator must know to keep start hosts."""
    if not config.per_node:
        return StartHosts(per_node=0, pools=())
    gpu_resources = {} if topology is None else topology.gpu_resources
    pools = []
    for service in services:
        if service.config.autoscale is None:  # none of its replicas starts later
            continue
        for group in service.config.groups:
            for key, pool in group.pools().items():
                if pool.emulator is not None:  # it imports no engine
                    continue
                servers = service.prefills if key.role is Role.PREFILL else service.decodes
                gpu_resource = gpu_resources.get(pool.placement.accelerator_type or "")
                pools.append(
                    HostPool(
                        kind=_host_kind(pool),
                        resources=worker_bundles(pool, gpu_resource)[0],
                        node_labels=pool.placement.node_labels,
                        runtime_env=runtime_env_of(servers[group.name]),
                    )
                )
    return StartHosts(per_node=config.per_node, pools=tuple(pools))


def _endpoint_replicas(services: Sequence[ServiceConfig], ingress: IngressConfig) -> dict[str, Any]:
    """Serve's options for a fixed number of the endpoint's replicas.

    If a service is autoscaled they are bounds, so that the replicas report to the policy. It reads these reports and
    leaves the number as it is.
    """
    reports_s = [service.autoscale.report_s for service in services if service.autoscale is not None]
    if not reports_s:
        return {"num_replicas": ingress.replicas}
    return {"autoscaling_config": replica_bounds(ingress.replicas, ingress.replicas, min(reports_s))}


def _actor(name: str, kind: type, arguments: dict[str, Any], *, max_calls: int = 1000) -> DeploymentActorConfig:
    """An actor that Serve starts with the ingress deployment; Serve copies its arguments, which are plain values.

    ``max_calls``: calls that it answers at a time. Each process that follows an actor keeps one open (``watch``).
    """
    options = {"num_cpus": 0, "max_concurrency": max_calls}
    return DeploymentActorConfig(name=name, actor_class=ray.remote(kind), init_kwargs=arguments, actor_options=options)


def _service(
    config: ServiceConfig,
    kv_transfer: ConnectorConfig,
    ingress: IngressConfig,
    topology: TopologyConfig | None,
    start_hosts: StartHostsConfig,
) -> Service:
    """Bind the pools of one model, and those of its long prompts."""
    prefills: dict[str, Application] = {}
    decodes: dict[str, Application] = {}
    gpu_resources = {} if topology is None else topology.gpu_resources
    for group in config.groups:
        # vLLM's sleep mode would unmap memory that NIXL has registered. A pooling model has no KV for other engines.
        hands_over = group.prefill is not None or not (group.decode.engine_sleep or config.is_pooling)
        for key, pool in group.pools().items():  # prefill first, since decode calls it
            bind: dict[str, Any] = {
                "router": config.router,
                "cores_per_worker": pool.cores_per_worker,
                "engine_silence_s": pool.engine_silence_s,
                "engine_sleep": pool.engine_sleep,
            }
            # Each replica that calls the pool has a router of its own.
            if key.role is Role.PREFILL:
                servers, routers = prefills, group.decode.max_replicas or group.decode.replicas
            else:
                servers, routers = decodes, ingress.replicas
                bind |= {
                    "prefill_server": prefills.get(group.name),
                    "slo": SloConfig() if config.autoscale is None else config.autoscale.slo,
                    "pull_timeout_s": kv_transfer.safe_pull_timeout_s,
                    "max_prompt_tokens": ingress.max_prompt_tokens,
                }
            gpu_resource = gpu_resources.get(pool.placement.accelerator_type or "")
            servers[group.name] = build_llm_deployment(
                llm_config(
                    config,
                    key.role,
                    pool,
                    kv_transfer=kv_transfer if hands_over else None,
                    routers=routers,
                    gpu_resource=gpu_resource,
                    host_kind=_host_kind(pool) if start_hosts.per_node and pool.emulator is None else None,
                ),
                deployment_cls=PrefillServer if key.role is Role.PREFILL else DecodeServer,
                bind_kwargs=bind,
                override_serve_options={"name": str(key), **serve_options(pool)},
            )
    long = config.long_service
    return Service(
        config=config,
        worth=config.worths(),
        decodes=decodes,
        prefills=prefills,
        long=None if long is None else _service(long, kv_transfer, ingress, topology, start_hosts),
    )
