"""The deployment graph: ingress -> decode -> prefill, for every group."""

from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.llm import build_llm_deployment

from autoscale.config import AutoscaleConfig
from autoscale.slo import SloConfig
from autoscale.tuning import Pools
from autoscale.types import PoolKey
from deployments.config import GroupConfig, IngressConfig, ModelConfig
from deployments.coordinator import coordinator_actor
from deployments.decode import DecodeServer
from deployments.health_board import health_board_actor
from deployments.ingress import Ingress
from deployments.options import llm_config, serve_options
from deployments.prefill import PrefillServer
from kvtransfer.connector import ConnectorConfig
from kvtransfer.topology import Role
from router.config import RouterConfig

# A replica of the endpoint that is told to go ends when its last request has had its time.
_LAST_WORDS_S = 30.0
# Of the endpoint, of which there is more than none at any time.
_SURGE_PERCENT = 25


def build_graph(
    *,
    model: ModelConfig,
    groups: tuple[GroupConfig, ...],
    engine_kwargs: dict[str, Any],
    kv_transfer: ConnectorConfig,
    router: RouterConfig,
    ingress: IngressConfig,
    autoscale: AutoscaleConfig | None,
    pools: Pools,
) -> Application:
    """Bind every deployment of an application; Ray's own builder hard-codes its server classes.

    Raises:
        ValueError: an engine argument that vLLM does not know.
    """
    prefills: dict[str, Application] = {}
    decodes: dict[str, Application] = {}
    for group in groups:
        for role, servers in ((Role.PREFILL, prefills), (Role.DECODE, decodes)):
            pool = group.role(role)
            bind: dict[str, Any] = {
                "cores_per_worker": pool.cores_per_worker,
                "engine_silence_s": pool.engine_silence_s,
            }
            most_decode = max(group.decode.replicas, group.decode.max_replicas or 0)
            routers = ingress.replicas if role is Role.DECODE else most_decode
            if role is Role.DECODE:
                slo = SloConfig() if autoscale is None else autoscale.slo
                bind |= {
                    "prefill_server": prefills[group.name],
                    "router": router,
                    "slo": slo,
                    "pull_timeout_s": kv_transfer.safe_pull_timeout_s,
                    "max_prompt_tokens": ingress.max_prompt_tokens,
                }
            servers[group.name] = build_llm_deployment(
                llm_config(
                    role,
                    pool,
                    model=model,
                    engine_kwargs=engine_kwargs,
                    kv_transfer=kv_transfer,
                    router=router,
                    report_s=None if autoscale is None else autoscale.report_s,
                    routers=routers,
                ),
                deployment_cls=PrefillServer if role is Role.PREFILL else DecodeServer,
                bind_kwargs=bind,
                override_serve_options={
                    "name": PoolKey(group.name, role).deployment_name,
                    **serve_options(pool),
                },
            )
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
                health_board_actor(router.outlier),
                *([] if autoscale is None else [coordinator_actor(autoscale, pools)]),
            ],
        )
        .bind(
            model_id=model.id,
            max_model_len=_max_model_len(groups, engine_kwargs),
            groups=decodes,
            prefills=prefills,
            decode_replicas={group.name: group.decode.replicas for group in groups},
            prefill_replicas=sum(group.prefill.replicas for group in groups),
            config=ingress,
            outlier=router.outlier,
            is_autoscaled=autoscale is not None,
        )
    )


def _max_model_len(groups: tuple[GroupConfig, ...], engine_kwargs: dict[str, Any]) -> int | None:
    """The context that every group has, tokens; ``None`` where it is the model's own."""
    given = [{**engine_kwargs, **group.decode.engine_kwargs}.get("max_model_len") for group in groups]
    known = [length for length in given if isinstance(length, int)]
    return min(known) if len(known) == len(groups) else None
