"""Whether a local cluster, which gets no further nodes, has a node for every pool."""

from kvtransfer.selectors import is_plain_label
from serve_app.config import AppConfig
from serve_app.local.cluster import DeployError


def check_placeable(config: AppConfig) -> None:
    """Check that a node of the connected cluster can take each pool. Otherwise its replicas would wait for ever.

    Raises DeployError: no node has the pool's GPU type, or its labels.
    """
    import ray

    nodes = [node for node in ray.nodes() if node["Alive"]]
    gpu_resources = {} if config.topology is None else config.topology.gpu_resources
    for key, pool in (item for service in config.services for item in service.role_configs().items()):
        gpu = pool.placement.accelerator_type
        labels = {name: value for name, value in pool.placement.node_labels.items() if is_plain_label(value)}
        resource = gpu_resources.get(gpu or "", f"accelerator_type:{gpu}")
        if gpu is not None and not any(resource in node["Resources"] for node in nodes):
            raise DeployError(
                f"groups.{key.group}.{key.role}: this machine has no GPU of type {gpu}; use `tandem deploy` with a Ray "
                "cluster that has one"
            )
        if labels and not any(labels.items() <= node["Labels"].items() for node in nodes):
            raise DeployError(
                f"groups.{key.group}.{key.role}: no node here has the labels {labels}; use `tandem deploy` with a Ray "
                "cluster that has one, or leave out node_labels"
            )
