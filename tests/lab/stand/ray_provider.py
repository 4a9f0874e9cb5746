"""A node provider of Ray's autoscaler for tests: nodes are processes of this machine, and some types never come."""

from typing import Any

from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider


class LocalNodes(FakeMultiNodeProvider):
    """Ray's own provider for tests, with node types that a cloud has run out of."""

    def create_node_with_resources_and_labels(
        self, node_config: dict[str, Any], tags: Any, count: int, resources: Any, labels: Any
    ) -> None:
        """Raises RuntimeError: the type never comes."""
        if node_config.get("never_comes"):
            raise RuntimeError("no capacity")
        super().create_node_with_resources_and_labels(node_config, tags, count, resources, labels)
