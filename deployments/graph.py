"""The deployment graph: ingress -> decode -> prefill, for every group that has prefill."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.llm import build_llm_deployment

from autoscale.config import AutoscaleConfig
from autoscale.slo import SloConfig
from autoscale.tuning import Pools
from deployments.config import GroupConfig, IngressConfig, ModelConfig
from deployments.coordinator import coordinator_actor
from deployments.decode import DecodeServer
from deployments.health_board import health_board_actor
from deployments.ingress import Ingress
from deployments.options import llm_config, serve_options
from deployments.prefill import PrefillServer
from kvtransfer.connector import ConnectorConfig
from kvtransfer.topology import Role, TopologyConfig
from router.admission import ObjectivesConfig
from router.config import RouterConfig

# A replica of the endpoint that is told to go ends when its last request has had its time.
_LAST_WORDS_S = 30.0
# Of the endpoint, of which there is more than none at any time.
_SURGE_PERCENT = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One model as it is served; see ``serve_app.config.ServiceConfig``."""

    model: ModelConfig
    groups: tuple[GroupConfig, ...]
    engine_kwargs: dict[str, Any]
    router: RouterConfig
    admission: ObjectivesConfig | None
    autoscale: AutoscaleConfig | None
    pools: Pools


def build_graph(
    services: Mapping[str, Service],
    *,
    kv_transfer: ConnectorConfig,
    ingress: IngressConfig,
    topology: TopologyConfig | None,
) -> Application:
    """Bind every deployment of an application; Ray's own builder hard-codes its server classes.

    Args:
        services: by the model's name.
        kv_transfer: of every group.
        ingress: the endpoint.
        topology: how nodes are read; ``None``: they are not.

    Raises:
        ValueError: an engine argument that vLLM does not know.
    """
    routed = {name: _routed(service, kv_transfer, ingress, topology) for name, service in services.items()}
    first = next(iter(services.values()))
    sized = {
        name: (service.autoscale, service.pools) for name, service in services.items() if service.autoscale is not None
    }
    return (
        serve.deployment(Ingress)
        .options(
            name="ingress",
            num_replicas=ingress.replicas,
            max_ongoing_requests=10_000,
            graceful_shutdown_timeout_s=ingress.request_timeout_s + _LAST_WORDS_S,
            max_surge_percent=_SURGE_PERCENT,
            ray_actor_options={
                "num_cpus": ingress.cpus_per_replica,
                **({"label_selector": ingress.node_labels} if ingress.node_labels else {}),
            },
            deployment_actors=[
                health_board_actor(first.router.outlier),
                *([coordinator_actor(sized, topology)] if sized else []),
            ],
        )
        .bind(services=routed, config=ingress, is_autoscaled=bool(sized))
    )


def _routed(
    service: Service, kv_transfer: ConnectorConfig, ingress: IngressConfig, topology: TopologyConfig | None
) -> dict[str, Any]:
    """What the endpoint must know of a service, its deployments among it."""
    prefills: dict[str, Application] = {}
    decodes: dict[str, Application] = {}
    gpu_resources = {} if topology is None else topology.gpu_resources
    for group in service.groups:
        for key, pool in group.pools().items():
            role = key.role
            servers = prefills if role is Role.PREFILL else decodes
            bind: dict[str, Any] = {
                "cores_per_worker": pool.cores_per_worker,
                "engine_silence_s": pool.engine_silence_s,
            }
            most_decode = max(group.decode.replicas, group.decode.max_replicas or 0)
            routers = ingress.replicas if role is Role.DECODE else most_decode
            if role is Role.DECODE:
                slo = SloConfig() if service.autoscale is None else service.autoscale.slo
                bind |= {
                    "prefill_server": prefills.get(group.name),
                    "router": service.router,
                    "slo": slo,
                    "pull_timeout_s": kv_transfer.safe_pull_timeout_s,
                    "max_prompt_tokens": ingress.max_prompt_tokens,
                }
            servers[group.name] = build_llm_deployment(
                llm_config(
                    role,
                    pool,
                    model=service.model,
                    engine_kwargs=service.engine_kwargs,
                    kv_transfer=kv_transfer,
                    router=service.router,
                    report_s=None if service.autoscale is None else service.autoscale.report_s,
                    routers=routers,
                    gpu_resource=gpu_resources.get(pool.placement.accelerator_type or ""),
                ),
                deployment_cls=PrefillServer if role is Role.PREFILL else DecodeServer,
                bind_kwargs=bind,
                override_serve_options={
                    "name": key.deployment_name,
                    **serve_options(pool),
                },
            )
    return {
        "groups": decodes,
        "prefills": prefills,
        "max_model_len": _max_model_len(service.groups, service.engine_kwargs),
        "decode_replicas": {group.name: group.decode.replicas for group in service.groups},
        "prefill_replicas": sum(group.computes_prompts.replicas for group in service.groups),
        "outlier": service.router.outlier,
        "admission": ingress.admission.with_objectives(service.admission),
    }


def _max_model_len(groups: tuple[GroupConfig, ...], engine_kwargs: dict[str, Any]) -> int | None:
    """The context that every group has, tokens; ``None`` where it is the model's own."""
    given = [{**engine_kwargs, **group.decode.engine_kwargs}.get("max_model_len") for group in groups]
    known = [length for length in given if isinstance(length, int)]
    return min(known) if len(known) == len(groups) else None
