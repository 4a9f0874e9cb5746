"""Node types of Ray's autoscaler, read from a configuration of Ray's cluster launcher or of KubeRay (pure)."""

from collections.abc import Mapping
from typing import Any

from autoscale.topology_config import TYPE_LABEL, UNKNOWN_GPU, stated_gpus


def node_types(document: Mapping[str, Any], gpu_resources: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The fields of ``topology.node_types`` that a configuration of Ray states, by type.

    Types without labels are left out: replicas could not wait for one of them. So is a type that may have no node.

    Args:
        document: a file of Ray's cluster launcher (``available_node_types``), or a RayCluster, RayService or RayJob of
            KubeRay.
        gpu_resources: Ray resource by GPU type, for types that Ray counts as a resource of their own.

    Raises:
        ValueError: the document is none of these, has no type that replicas could wait for, or a type does not state
            its CPUs or its GPU type.
    """
    if isinstance(document.get("available_node_types"), Mapping):
        found = {
            str(name): _of_launcher(kind or {}, document.get("max_workers") or 0)
            for name, kind in document["available_node_types"].items()
            if name != document.get("head_node_type")
        }
    else:
        spec = document.get("spec") or {}
        groups = (spec.get("rayClusterConfig") or spec.get("rayClusterSpec") or spec).get("workerGroupSpecs")
        if not groups:
            raise ValueError("it has neither available_node_types nor a RayCluster's workerGroupSpecs")
        found = {str(group.get("groupName")): _of_kuberay(group) for group in groups}
    types = {
        name: _fields(name, labels, resources, most, gpu_resources)
        for name, (labels, resources, most) in found.items()
        if labels and most
    }
    if not types:
        names = ", ".join(found) or "none"
        raise ValueError(
            f"it has no node type with labels and at least one node (it has {names}): give each type a label of its own"
        )
    return types


# Labels, resources and the most nodes of a type.
_Stated = tuple[dict[str, str], dict[str, float], int]


def _of_launcher(kind: Mapping[str, Any], most: int) -> _Stated:
    """A type of the launcher; ``most``: most nodes of the cluster, which hold for a type without an own limit."""
    resources = {name: _number(count) for name, count in (kind.get("resources") or {}).items()}
    return (
        dict(kind.get("labels") or {}),
        resources,
        int(most if kind.get("max_workers") is None else kind["max_workers"]),
    )


def _of_kuberay(group: Mapping[str, Any]) -> _Stated:
    """A worker group; what ``rayStartParams`` says wins over the limits of its container, as in Ray."""
    start, labels = group.get("rayStartParams") or {}, dict(group.get("labels") or {})
    containers = ((group.get("template") or {}).get("spec") or {}).get("containers") or [{}]
    limits = (containers[0].get("resources") or {}).get("limits") or {}
    resources = {
        "CPU": _number(start.get("num-cpus", limits.get("cpu", 0))),
        "GPU": sum(_number(count) for name, count in limits.items() if name.endswith("/gpu")),
        **{name: _number(count) for name, count in (group.get("resources") or {}).items() if name != "memory"},
    }
    if "num-gpus" in start:
        resources["GPU"] = _number(start["num-gpus"])
    return labels, resources, int(group.get("maxReplicas") or 0)


def _number(quantity: Any) -> float:
    """A quantity of Kubernetes or Ray: ``4``, ``"4"`` or ``"4000m"``; raises ValueError."""
    text = str(quantity)
    try:
        return float(text.removesuffix("m")) / 1000 if text.endswith("m") else float(text)
    except ValueError:
        raise ValueError(f"{text!r} is no number of CPUs or GPUs: write it as 4, 0.5 or 500m") from None


def _fields(
    name: str, labels: dict[str, str], resources: dict[str, float], most: int, gpu_resources: Mapping[str, str]
) -> dict[str, Any]:
    if not resources.get("CPU"):
        raise ValueError(f"type {name} does not state its CPUs: add them to its resources")
    fields: dict[str, Any] = {"labels": labels, "cpus": resources["CPU"], "max_nodes": most}
    gpu_type, resource, _ = stated_gpus(resources, labels, gpu_resources)
    if gpu_type == UNKNOWN_GPU:
        raise ValueError(f"type {name} has GPUs, and does not state which: add the label {TYPE_LABEL}")
    if gpu_type is not None:
        fields["gpu_type"], fields["gpus"] = gpu_type, resources[resource]
    return fields
