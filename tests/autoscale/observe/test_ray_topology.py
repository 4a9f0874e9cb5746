"""How Ray's description of a node becomes our node."""

from typing import Any

import pytest

from autoscale.topology_config import TopologyConfig
from kvtransfer.topology import Node
from tests.installed_source import installed_source

pytestmark = pytest.mark.ray

OWN = {"gpu_resources": {"H100": "gpu_h100", "A100": "gpu_a100"}}


def read(resources: dict[str, float], labels: dict[str, str] | None = None, **config: Any) -> Node:
    from autoscale.observe.ray_topology import _node

    raw = {"NodeID": "n", "Resources": {"CPU": 8.0, **resources}, "Labels": labels or {}}
    return _node(raw, {"CPU": 6.0, **resources}, TopologyConfig.model_validate(config), frozenset(), is_leaving=False)


@pytest.mark.parametrize(
    ("resources", "labels", "config", "kind", "gpus"),
    [
        ({}, {}, {}, None, 0.0),
        ({"GPU": 4.0}, {}, {}, "GPU", 4.0),
        ({"GPU": 8.0, "accelerator_type:H100": 1.0}, {}, {}, "H100", 8.0),
        ({"GPU": 8.0}, {"ray.io/accelerator-type": "L4"}, {}, "L4", 8.0),
        ({"GPU": 8.0, "accelerator_type:H100": 1.0}, {"ray.io/accelerator-type": "H100"}, {}, "H100", 8.0),
        ({"gpu_a100": 3.0}, {}, OWN, "A100", 3.0),
    ],
)
def test_type_and_number_of_gpus(
    resources: dict[str, float], labels: dict[str, str], config: dict[str, Any], kind: str | None, gpus: float
) -> None:
    node = read(resources, labels, **config)
    assert (node.gpu_type, node.gpus, node.free_gpus, node.contradiction) == (kind, gpus, gpus, "")
    assert (node.cpus, node.free_cpus) == (8.0, 6.0)


@pytest.mark.parametrize(
    ("resources", "labels", "said"),
    [
        ({"gpu_h100": 4.0, "gpu_a100": 2.0}, {}, "type H100 and of A100, and counts as H100"),
        (
            {"GPU": 8.0, "accelerator_type:A100": 1.0},
            {"ray.io/accelerator-type": "H100"},
            "type A100 and of H100, and counts as A100",
        ),
    ],
)
def test_a_node_with_two_gpu_types_counts_as_the_first(
    resources: dict[str, float], labels: dict[str, str], said: str
) -> None:
    node = read(resources, labels, **OWN)
    assert said in node.contradiction
    assert node.gpus == next(iter(resources.values()))


def test_contract_ray_topology_read_nodes() -> None:
    assert "def available_resources_per_node():" in installed_source("ray/_private/state.py")


def test_contract_ray_topology_read_places() -> None:
    common = installed_source("ray/serve/_private/common.py")
    assert 'REPLICA_ID_FULL_ID_STR_PREFIX = "SERVE_REPLICA::"' in common
