"""A node provider of Ray's autoscaler for tests: nodes are processes of this machine, and some types are faulty."""

from typing import Any

from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider


class LocalNodes(FakeMultiNodeProvider):
    """Ray's own provider for tests, whose nodes may never come, or come with less than their type declares."""

    def create_node_with_resources_and_labels(
        self, node_config: dict[str, Any], tags: Any, count: int, resources: dict[str, float], labels: Any
    ) -> None:
        """Raises RuntimeError: the type never comes."""
        if node_config.get("never_comes"):
            raise RuntimeError("no capacity")
        own = {name: number for name, number in resources.items() if name != node_config.get("lacks")}
        super().create_node_with_resources_and_labels(node_config, tags, count, own, labels)
