"""AppConfig -> KubeRay RayService (pure)."""

import json
import math
from collections.abc import Iterable
from typing import Any

import yaml

from autoscale.types import PoolKey
from deployments.endpoint.config import IngressConfig
from deployments.machine.claims import EVERY_ADDRESS
from deployments.serve_seam.environment import serve_environment
from kvtransfer.topology import Role
from serve_app.checks.yaml_checks import ConfigError, sole_application
from serve_app.config import AppConfig
from serve_app.kube.worker_groups import WorkerGroup, worker_groups

# The version that pyproject.toml pins; KubeRay requires it in the manifest.
RAY_VERSION = "2.60.0"
# Label of Kubernetes nodes that names their GPU type.
GPU_TYPE_LABEL = "tandem.io/gpu-type"
# Ray's autoscaler, in version 2: version 1 ignores the labels that replicas require of their nodes.
_AUTOSCALING = {"enableInTreeAutoscaling": True, "autoscalerOptions": {"version": "v2"}}
# Label of Ray nodes that names their worker group (``worker_groups``).
WORKER_GROUP_LABEL = "tandem.io/worker-group"
# The annotation beside nodeSelector that says what to choose.
_SELECTOR_ANNOTATION = "tandem.io/node-selector"
_SELECTOR_CHOICE = (
    f"label the Kubernetes nodes with {GPU_TYPE_LABEL} and with each tandem.io/ switch label selected here; or select "
    "by nvidia.com/gpu.product of GPU feature discovery, whose values also name the form factor"
)
_HEADER = """\
# A KubeRay RayService (KubeRay 1.5 or newer), rendered by `tandem render`: edit the Serve YAML that it comes from and
# render again (deploy/README.md). serveConfigV2 differs from that YAML in three points: http_options.host is 0.0.0.0,
# since a pod must be reachable; proxy_location is EveryNode, since a pod is ready only once its own proxy answers; and
# each pool requires the label of its worker group.
# nodeSelector is the only value that you must choose for your cluster; see the annotation beside it.
"""

# Estimates, not measurements. The head runs the control plane only.
_HEAD_RESOURCES = {"cpu": "4", "memory": "16Gi"}
# Memory of a worker's processes, an estimate.
_WORKER_MEMORY_GIB = 32
# Host memory through which a worker reads the weights of one GPU, an estimate.
_WORKER_MEMORY_GIB_PER_GPU = 64

# Serve's own default (ray.serve.config.DEFAULT_HTTP_PORT); KubeRay routes to the container port named "serve".
_SERVE_PORT = 8000
# Time, seconds, for the traffic to move to a new cluster before the old one is deleted.
_DELETION_DELAY_S = 60
# A pod is ready while its proxy has an ingress replica; one failure ends that, as in KubeRay's own probe.
_READINESS = {
    "httpGet": {"path": "/-/healthz", "port": "serve"},
    "periodSeconds": 5,
    "timeoutSeconds": 2,
    "failureThreshold": 1,
}
# Ray reports these types as A100, without the memory size; so the full name must be added as a resource
# (ray.util.accelerators).
_TYPES_ADDED_BY_HAND = ("A100-40G", "A100-80G")


def render_rayservice(
    serve_yaml: dict[str, Any], config: AppConfig, *, image: str, namespace: str, name: str
) -> dict[str, Any]:
    """A RayService that runs ``serve_yaml``, whose application's args are ``config``, on NVIDIA GPUs or CPUs.

    ``http_options.host`` becomes 0.0.0.0: on loopback neither the Service nor a readiness probe reaches the pod. Each
    pool also demands the label of its worker group: an engine of one GPU could otherwise take a pod of two, and leave
    no pod for an engine that needs both.

    Raises:
        ConfigError: there is not exactly one application, a node label is an expression, or node types are declared.
    """
    if config.topology is not None and config.topology.node_types:
        raise ConfigError(
            "topology.node_types: `tandem render` makes one worker group for each pool, and no other nodes: leave them "
            "out, or write the RayService yourself and give it as topology.node_types_file"
        )
    groups = worker_groups(config)
    serve_config = _pod_serve_config(serve_yaml, groups)
    port = int(serve_config["http_options"].get("port", _SERVE_PORT))
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            # A replaced cluster finishes its requests first (KubeRay's default is 60).
            "rayClusterDeletionDelaySeconds": _DELETION_DELAY_S + math.ceil(config.ingress.request_timeout_s),
            "serveConfigV2": yaml.safe_dump(serve_config, sort_keys=False),
            "rayClusterConfig": {
                "rayVersion": RAY_VERSION,
                # Replicas that the joint policy adds may wait for nodes, which Ray's autoscaler requests from KubeRay.
                **(_AUTOSCALING if any(g.most_pods > g.pods for g in groups) else {}),
                "headGroupSpec": _head_group(config.ingress, image, port),
                "workerGroupSpecs": [_worker_group(group, config.ingress, image, port) for group in groups],
            },
        },
    }


def manifest_text(manifest: dict[str, Any]) -> str:
    """A manifest as YAML, with the Serve config in it as a block of lines."""
    return _HEADER + yaml.dump(manifest, Dumper=_ManifestDumper, sort_keys=False, width=120)


def _pod_serve_config(serve_yaml: dict[str, Any], groups: Iterable[WorkerGroup]) -> dict[str, Any]:
    """``serve_yaml`` for pods, in which each pool requires the label of its worker group."""
    worker_group_names = {pool: group.name for group in groups for pool in group.pools}

    def with_label(group: dict[str, Any]) -> dict[str, Any]:
        """A deployment group whose pools require the label."""
        group = dict(group)
        for role in Role:
            name = worker_group_names.get(PoolKey(group["name"], role))
            if name is not None:
                pool = group.get(role.value, {})
                placement = pool.get("placement", {})
                labels = {**placement.get("node_labels", {}), WORKER_GROUP_LABEL: name}
                group[role.value] = {**pool, "placement": {**placement, "node_labels": labels}}
        return group

    application = sole_application(serve_yaml)
    args = application["args"]
    sections = args.get("services", [args])  # args themselves are the section of an only service
    services = [{**section, "groups": [with_label(group) for group in section["groups"]]} for section in sections]
    pod_args = {**args, "services": services} if "services" in args else services[0]
    return {
        **serve_yaml,
        "proxy_location": "EveryNode",
        "http_options": {**(serve_yaml.get("http_options") or {}), "host": "0.0.0.0"},  # noqa: S104
        "applications": [{**application, "args": pod_args}],
    }


def _head_group(ingress: IngressConfig, image: str, port: int) -> dict[str, Any]:
    """The head: 0 CPUs keep replicas off it; Serve's controller and a proxy need none. Its probes are KubeRay's own."""
    ports = {"gcs": 6379, "dashboard": 8265, "client": 10001, "serve": port}
    container = _container("ray-head", image, ingress, ports, _HEAD_RESOURCES)
    return {"rayStartParams": {"num-cpus": "0"}, "template": {"spec": {"containers": [container]}}}


def _container(
    name: str, image: str, ingress: IngressConfig, ports: dict[str, int], resources: dict[str, str]
) -> dict[str, Any]:
    """A container whose requests equal its limits, since a throttled or evicted engine stalls all of its streams."""
    environment = serve_environment(ingress.request_timeout_s)
    return {
        "name": name,
        "image": image,
        "env": [{"name": key, "value": value} for key, value in environment.items()],
        "ports": [{"containerPort": port, "name": name} for name, port in ports.items()],
        "resources": {"limits": dict(resources), "requests": dict(resources)},
    }


def _worker_group(group: WorkerGroup, ingress: IngressConfig, image: str, port: int) -> dict[str, Any]:
    shape = group.shape
    start = {}
    if shape.accelerator_type in _TYPES_ADDED_BY_HAND:
        resources = json.dumps({f"accelerator_type:{shape.accelerator_type}": 1})
        start = {"resources": json.dumps(resources)}  # quoted twice: KubeRay writes the value into a shell command
    return {
        "groupName": group.name,
        "replicas": group.pods,
        "minReplicas": group.pods,
        "maxReplicas": group.most_pods,
        # Labels of Ray's nodes; KubeRay refuses them as rayStartParams.labels.
        "labels": {WORKER_GROUP_LABEL: group.name, **dict(shape.node_labels)},
        "rayStartParams": start,
        "template": _worker_template(group, ingress, image, port),
    }


def _worker_template(group: WorkerGroup, ingress: IngressConfig, image: str, port: int) -> dict[str, Any]:
    shape = group.shape
    # An ingress replica may start on any node, so each pod has room for all of them: an ingress replica on an engine's
    # CPUs would keep that engine from starting.
    cpus = math.ceil(group.engine_cpus + ingress.replicas * ingress.cpus_per_replica)
    resources = {"cpu": str(cpus), "memory": f"{_WORKER_MEMORY_GIB + _WORKER_MEMORY_GIB_PER_GPU * shape.gpus}Gi"}
    if shape.gpus:
        resources["nvidia.com/gpu"] = str(shape.gpus)
    ports = {"serve": port}
    if ingress.metrics_host in EVERY_ADDRESS:
        ports["metrics"] = ingress.metrics_port
    container = _container("ray-worker", image, ingress, ports, resources) | {"readinessProbe": dict(_READINESS)}
    template: dict[str, Any] = {"spec": {"containers": [container]}}
    selector = dict(shape.node_labels)
    if shape.accelerator_type:
        selector = {GPU_TYPE_LABEL: shape.accelerator_type, **selector}
    if selector:
        template["metadata"] = {"annotations": {_SELECTOR_ANNOTATION: _SELECTOR_CHOICE}}
        template["spec"]["nodeSelector"] = selector
    return template


class _ManifestDumper(yaml.SafeDumper):
    """Writes text of several lines as a block, and repeated values in full."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_ManifestDumper.add_representer(str, _represent_text)
