"""AppConfig -> KubeRay RayService (pure; no ray)."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from autoscale.types import PoolKey
from deployments.config import IngressConfig
from deployments.environment import serve_environment
from deployments.ports import EVERY_ADDRESS
from kvtransfer.topology import Role
from serve_app.config import AppConfig
from serve_app.validate import load_serve_yaml, parse_app_config, sole_application
from serve_app.worker_groups import NodeShape, WorkerGroup, worker_groups

RAY_VERSION = "2.60.0"  # pyproject.toml's pin; KubeRay wants it written down

GPU_TYPE_LABEL = "tandem.io/gpu-type"  # on Kubernetes nodes
WORKER_GROUP_LABEL = "tandem.io/worker-group"  # on Ray nodes
_SELECTOR_ANNOTATION = "tandem.io/node-selector"
_SELECTOR_CHOICE = (
    f"label the Kubernetes nodes with {GPU_TYPE_LABEL} and with each tandem.io/ switch label selected here; or select "
    "by nvidia.com/gpu.product of GPU feature discovery, whose values also name the form factor"
)
_HEADER = """\
# A KubeRay RayService (KubeRay 1.5 or newer) rendered by serve_app.manifest: edit the Serve YAML it comes from and
# render again, see deploy/README.md. serveConfigV2 differs from that YAML in three things: http_options.host is
# 0.0.0.0, as a pod must be reachable; proxy_location is EveryNode, as a pod is ready only once its own proxy answers;
# and each pool demands the label of its worker group.
# nodeSelector is the one choice to make for your cluster, see the annotation beside it.
"""

# Estimates, not measurements: the head runs the control plane only; a worker reads weights through host memory.
_HEAD_RESOURCES = {"cpu": "4", "memory": "16Gi"}
_WORKER_MEMORY_GIB = 32
_WORKER_MEMORY_GIB_PER_GPU = 64

# Serve's own default (ray.serve.config.DEFAULT_HTTP_PORT); KubeRay routes to the container port named "serve".
_SERVE_PORT = 8000
# Until traffic has gone over to a new cluster.
_DELETION_DELAY_S = 60
# Ray reports these types only as A100: whoever asks for a size has to add it as a resource (ray.util.accelerators).
_TYPES_ADDED_BY_HAND = ("A100-40G", "A100-80G")


def load_rayservice(path: Path, *, image: str, namespace: str, name: str) -> str:
    """The manifest's text for a Serve YAML with one Tandem application.

    Raises:
        ConfigError: the file, its application or a placement that no manifest can express.
    """
    serve_yaml = load_serve_yaml(path)
    config = parse_app_config(sole_application(serve_yaml).get("args"))
    return manifest_text(render_rayservice(serve_yaml, config, image=image, namespace=namespace, name=name))


def render_rayservice(
    serve_yaml: dict[str, Any], config: AppConfig, *, image: str, namespace: str, name: str
) -> dict[str, Any]:
    """A RayService that runs ``serve_yaml``, whose application's args are ``config``, on NVIDIA GPUs or CPUs.

    In the Serve config inside, ``http_options.host`` is 0.0.0.0 whatever the YAML says: on loopback neither the
    Service nor a readiness probe could reach the pod. Each pool also demands its worker group's label: an engine of one
    GPU that took a pod of two would leave no pod for the engine that needs both.

    Raises:
        ConfigError: not exactly one application, or a node label that is an expression.
    """
    groups = worker_groups(config)
    serve_config = _pod_serve_config(serve_yaml, groups)
    port = int(serve_config["http_options"].get("port", _SERVE_PORT))
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            # A cluster that another one has replaced ends its requests first (KubeRay's default is 60).
            "rayClusterDeletionDelaySeconds": _DELETION_DELAY_S + math.ceil(config.ingress.request_timeout_s),
            "serveConfigV2": yaml.safe_dump(serve_config, sort_keys=False),
            "rayClusterConfig": {
                "rayVersion": RAY_VERSION,
                # Replicas that the joint policy asks for wait for nodes, which Ray's autoscaler then asks KubeRay for.
                **({"enableInTreeAutoscaling": True} if any(g.most_pods > g.pods for g in groups) else {}),
                "headGroupSpec": _head_group(config.ingress, image, port),
                "workerGroupSpecs": [_worker_group(group, config.ingress, image, port) for group in groups],
            },
        },
    }


def manifest_text(manifest: dict[str, Any]) -> str:
    """A manifest as YAML, the Serve config in it readable line by line."""
    return _HEADER + yaml.dump(manifest, Dumper=_ManifestDumper, sort_keys=False, width=120)


def _pod_serve_config(serve_yaml: dict[str, Any], groups: Iterable[WorkerGroup]) -> dict[str, Any]:
    application = sole_application(serve_yaml)
    return {
        **serve_yaml,
        "proxy_location": "EveryNode",
        "http_options": {**(serve_yaml.get("http_options") or {}), "host": "0.0.0.0"},  # noqa: S104
        "applications": [{**application, "args": _pinned(application["args"], groups)}],
    }


def _pinned(args: dict[str, Any], groups: Iterable[WorkerGroup]) -> dict[str, Any]:
    """``args`` in which each pool demands the label of its worker group."""
    names = {pool: group.name for group in groups for pool in group.pools}

    def pinned_group(group: dict[str, Any]) -> dict[str, Any]:
        keys = {role: PoolKey(group["name"], role) for role in Role}
        pools = {
            role.value: _pinned_pool(group.get(role.value, {}), names[key])
            for role, key in keys.items()
            if key in names
        }
        return {**group, **pools}

    if "services" in args:
        return {**args, "services": [_pinned(service, groups) for service in args["services"]]}
    return {**args, "groups": [pinned_group(group) for group in args["groups"]]}


def _pinned_pool(pool: dict[str, Any], worker_group: str) -> dict[str, Any]:
    placement = pool.get("placement", {})
    labels = {**placement.get("node_labels", {}), WORKER_GROUP_LABEL: worker_group}
    return {**pool, "placement": {**placement, "node_labels": labels}}


def _head_group(ingress: IngressConfig, image: str, port: int) -> dict[str, Any]:
    """Serve's controller and a proxy take no CPU; 0 keeps everything else off the head. Its probes are KubeRay's."""
    container = {
        "name": "ray-head",
        "image": image,
        "env": _env(ingress),
        "ports": [_port("gcs", 6379), _port("dashboard", 8265), _port("client", 10001), _port("serve", port)],
        "resources": _resources(_HEAD_RESOURCES),
    }
    return {"rayStartParams": {"num-cpus": "0"}, "template": {"spec": {"containers": [container]}}}


def _worker_group(group: WorkerGroup, ingress: IngressConfig, image: str, port: int) -> dict[str, Any]:
    # Nothing pins an ingress replica to a node, so each pod keeps room for all of them: one that took an engine's CPU
    # would keep that engine from starting.
    cpus = math.ceil(group.engine_cpus + ingress.replicas * ingress.cpus_per_replica)
    ports = [_port("serve", port)]
    if ingress.metrics_host in EVERY_ADDRESS:
        ports.append(_port("metrics", ingress.metrics_port))
    return {
        "groupName": group.name,
        "replicas": group.pods,
        "minReplicas": group.pods,
        "maxReplicas": group.most_pods,
        # Ray's node labels. KubeRay refuses them as rayStartParams.labels.
        "labels": {WORKER_GROUP_LABEL: group.name, **dict(group.shape.node_labels)},
        "rayStartParams": _ray_start_params(group.shape),
        "template": _worker_template(group.shape, ingress, cpus=cpus, image=image, ports=ports),
    }


def _ray_start_params(shape: NodeShape) -> dict[str, str]:
    if shape.accelerator_type not in _TYPES_ADDED_BY_HAND:
        return {}
    resources = json.dumps({f"accelerator_type:{shape.accelerator_type}": 1})
    return {"resources": json.dumps(resources)}  # twice: KubeRay pastes the value into a shell command


def _worker_template(
    shape: NodeShape, ingress: IngressConfig, *, cpus: int, image: str, ports: list[dict[str, Any]]
) -> dict[str, Any]:
    resources = {"cpu": str(cpus), "memory": f"{_WORKER_MEMORY_GIB + _WORKER_MEMORY_GIB_PER_GPU * shape.gpus}Gi"}
    if shape.gpus:
        resources["nvidia.com/gpu"] = str(shape.gpus)
    container = {
        "name": "ray-worker",
        "image": image,
        "env": _env(ingress),
        "ports": ports,
        "resources": _resources(resources),
        "readinessProbe": _readiness(),
    }
    template: dict[str, Any] = {"spec": {"containers": [container]}}
    selector = dict(shape.node_labels)
    if shape.accelerator_type:
        selector = {GPU_TYPE_LABEL: shape.accelerator_type, **selector}
    if selector:
        template["metadata"] = {"annotations": {_SELECTOR_ANNOTATION: _SELECTOR_CHOICE}}
        template["spec"]["nodeSelector"] = selector
    return template


def _readiness() -> dict[str, Any]:
    """Ready is when the pod's proxy has an ingress to send to; one miss takes it out, as in KubeRay's own probe."""
    return {
        "httpGet": {"path": "/-/healthz", "port": "serve"},
        "periodSeconds": 5,
        "timeoutSeconds": 2,
        "failureThreshold": 1,
    }


def _env(ingress: IngressConfig) -> list[dict[str, str]]:
    return [{"name": key, "value": value} for key, value in serve_environment(ingress.request_timeout_s).items()]


def _port(name: str, port: int) -> dict[str, Any]:
    return {"containerPort": port, "name": name}


def _resources(amounts: dict[str, str]) -> dict[str, dict[str, str]]:
    """Requests equal limits: a throttled or evicted engine stalls every stream on it."""
    return {"limits": dict(amounts), "requests": dict(amounts)}


class _ManifestDumper(yaml.SafeDumper):
    """Text of several lines as a block."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_ManifestDumper.add_representer(str, _represent_text)
