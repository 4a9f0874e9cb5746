"""A local Ray cluster that grows and shrinks: Ray's autoscaler v2, with nodes that are processes of this machine."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from serve_app.local.cluster import LocalCluster, NodeSpec

# Ray's own provider for tests starts nodes in the autoscaler's process and names them itself. The head needs this id.
_HEAD_ID = "f" * 51 + "00000"
_HEAD_TYPE = "ray.head.default"
_OBJECT_STORE_BYTES = 100_000_000
_ENVIRONMENT = {
    "PYTHONPATH": str(Path(__file__).parents[3]),  # the autoscaler's process imports the provider
    "RAY_enable_autoscaler_v2": "1",
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    "RAY_FAKE_CLUSTER": "1",  # allows that provider
    "RAY_CLOUD_INSTANCE_ID": _HEAD_ID,
    "RAY_OVERRIDE_NODE_ID_FOR_TESTING": _HEAD_ID,
}
# Fields that Ray's autoscaler reads, and that mean nothing on one machine.
_UNUSED: dict[str, Any] = {
    "file_mounts": {},
    "setup_commands": [],
    "head_setup_commands": [],
    "worker_setup_commands": [],
    "head_start_ray_commands": [],
    "worker_start_ray_commands": [],
    "initialization_commands": [],
    "cluster_synced_files": [],
    "rsync_exclude": [],
    "rsync_filter": [],
}


class ElasticCluster(LocalCluster):
    """A head, and node types of which Ray's autoscaler adds nodes when replicas wait, and removes empty ones."""

    def __init__(
        self,
        head: NodeSpec,
        types: Mapping[str, NodeSpec],
        *,
        most: Mapping[str, int],
        idle_s: float,
        lacks: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Start the head.

        Args:
            head: the node that always exists.
            types: what a node of each type has.
            most: most nodes of each type; 0: a node of the type is requested, and never comes.
            idle_s: time after which an empty node is removed.
            lacks: a resource that nodes of a type come without, although their type declares it.
        """
        self._types, self._most, self._idle_s, self._lacks = types, most, idle_s, lacks
        super().__init__([head], environment=_ENVIRONMENT)

    def _arguments(self, node: NodeSpec, *, is_head: bool) -> list[str]:
        path = Path(self.folder) / "autoscaler.json"
        path.write_text(json.dumps(self._configuration(node)))
        return [*super()._arguments(node, is_head=is_head), f"--autoscaling-config={path}"]

    def _configuration(self, head: NodeSpec) -> dict[str, Any]:
        types = {
            name: {
                "resources": {
                    "CPU": node.cpus,
                    "GPU": node.gpus or 0,
                    "object_store_memory": _OBJECT_STORE_BYTES,
                    **node.resources,
                },
                "labels": node.labels,
                "node_config": {"never_comes": self._most[name] == 0, "lacks": self._lacks.get(name)},
                "min_workers": 0,
                "max_workers": self._most[name] or 1,
            }
            for name, node in self._types.items()
        }
        return {
            "cluster_name": "elastic",
            "max_workers": 100,
            "idle_timeout_minutes": self._idle_s / 60,
            "provider": {
                "type": "external",
                "module": "tests.lab.stand.ray_provider.LocalNodes",
                "launch_multiple": True,
                "head_node_id": _HEAD_ID,
                "gcs_address": self.address,
                "disable_node_updaters": True,
                "disable_launch_config_check": True,
                "foreground_node_launch": True,
            },
            "auth": {"ssh_user": "none"},
            "head_node_type": _HEAD_TYPE,
            "available_node_types": {
                _HEAD_TYPE: {"resources": {"CPU": head.cpus}, "node_config": {}, "max_workers": 0},
                **types,
            },
            **_UNUSED,
        }
