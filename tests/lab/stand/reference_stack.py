"""The reference stack, Ray Serve LLM's own P/D application, with the engines of an application of ours (pure).

It is configured to its advantage: no batching delay, and cores of its own for each role. It also has the repairs of our
engine plugin, which every engine of this environment loads (an engine ends with its replica; NIXL's thread sleeps).
"""

from collections.abc import Mapping
from typing import Any

from kvtransfer.topology import Role
from serve_app.checks.yaml_checks import parse_app_config

BUILDER = "ray.serve.llm:build_pd_openai_app"
# Core of each role, on a machine with two cores.
CORES = {Role.PREFILL: 0, Role.DECODE: 1}


def peer_config(role: Role, args: Mapping[str, Any], *, bundle_cpus: float, **deployment: Any) -> dict[str, Any]:
    """Ray Serve LLM's configuration of one role.

    Args:
        role: prefill or decode.
        args: arguments of our application.
        bundle_cpus: Ray CPUs of the engine worker.
        deployment: Serve's options of the deployment.
    """
    config = parse_app_config(dict(args))
    return {
        "model_loading_config": {
            "model_id": config.model.id,
            "model_source": str(config.model.folder or config.model.source),
        },
        "engine_kwargs": {
            **config.services[0].engine_kwargs,
            "kv_transfer_config": config.kv_transfer.kv_transfer_config(role),
        },
        "placement_group_config": {"bundles": [{"CPU": bundle_cpus}]},
        "experimental_configs": {"stream_batching_interval_ms": 0},
        "log_engine_metrics": False,
        "deployment_config": {"autoscaling_config": None, **deployment},
        "runtime_env": {"env_vars": {"VLLM_CPU_OMP_THREADS_BIND": str(CORES[role])}},
    }


def peer_document(document: Mapping[str, Any]) -> dict[str, Any]:
    """The Serve YAML of Ray Serve LLM with the replicas, nodes and sizes of a Serve YAML of ours.

    Serve checks the health of its engines as often as of ours. It has the first group only.
    """
    application = document["applications"][0]
    args = application["args"]
    config = parse_app_config(args)
    roles = {}
    for key, pool in config.groups[0].pools().items():
        placement = pool.placement
        roles[f"{key.role}_config"] = peer_config(
            key.role,
            args,
            bundle_cpus=placement.cpus_per_worker,
            num_replicas=pool.replicas,
            health_check_period_s=2.0,
            ray_actor_options={"num_cpus": placement.cpus_per_replica},
            placement_group_bundle_label_selector=[placement.node_labels],
        )
    ingress = {
        "name": "ingress",
        "num_replicas": config.ingress.replicas,
        "ray_actor_options": {
            "num_cpus": config.ingress.cpus_per_replica,
            "label_selector": config.ingress.node_labels,
        },
    }
    peer = {
        "name": application["name"],
        "route_prefix": "/",
        "import_path": BUILDER,
        "args": {**roles, "ingress_deployment_config": ingress},
    }
    return {**document, "applications": [peer]}
