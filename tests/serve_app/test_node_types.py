"""Node types as Ray's own configurations state them."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from serve_app.config import AppConfig
from serve_app.node_types import node_types

LAUNCHER = """
available_node_types:
  head: {resources: {CPU: 4}, max_workers: 0}
  spot:
    resources: {CPU: 96, GPU: 8, "accelerator_type:H100": 1}
    labels: {pool: spot}
    max_workers: 4
  cpu: {resources: {CPU: 16}, labels: {pool: cpu}, max_workers: 2}
  unlabelled: {resources: {CPU: 16, GPU: 1}, max_workers: 2}
"""
KUBERAY = """
kind: RayService
spec:
  rayClusterConfig:
    workerGroupSpecs:
    - groupName: spot
      labels: {pool: spot, ray.io/accelerator-type: H100}
      maxReplicas: 4
      rayStartParams: {num-cpus: "90"}
      template: {spec: {containers: [{resources: {limits: {cpu: 96000m, memory: 900Gi, nvidia.com/gpu: "8"}}}]}}
    - groupName: cpu
      labels: {pool: cpu}
      maxReplicas: 2
      rayStartParams: {}
      template: {spec: {containers: [{resources: {limits: {cpu: 16000m}}}]}}
    - {groupName: unlabelled, maxReplicas: 2}
"""


@pytest.mark.parametrize(("text", "cpus"), [(LAUNCHER, 96.0), (KUBERAY, 90.0)])
def test_types_are_read_from_the_launcher_and_from_kuberay(text: str, cpus: float) -> None:
    spot, cpu = node_types(yaml.safe_load(text), {}).values()
    assert spot.pop("labels")["pool"] == "spot"
    assert spot == {"cpus": cpus, "max_nodes": 4, "gpu_type": "H100", "gpus": 8.0}
    assert cpu == {"labels": {"pool": "cpu"}, "cpus": 16.0, "max_nodes": 2}


def test_a_gpu_that_ray_counts_as_a_resource_of_its_own_has_its_type() -> None:
    kind = {"resources": {"CPU": 4, "gpu_h20": 2}, "labels": {"pool": "a"}, "max_workers": 1}
    (read,) = node_types({"available_node_types": {"a": kind}}, {"H20": "gpu_h20"}).values()
    assert (read["gpu_type"], read["gpus"]) == ("H20", 2.0)


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({}, "neither available_node_types nor"),
        ({"spec": None}, "neither available_node_types nor"),
        (
            {"available_node_types": {"a": {"resources": {"CPU": 1}, "max_workers": 2}, "b": {"labels": {"k": "b"}}}},
            r"no node type with labels and at least one node \(it has a, b\)",
        ),
        ({"available_node_types": {"a": {"labels": {"k": "a"}, "max_workers": 1}}}, "type a does not state its CPUs"),
        (
            {
                "max_workers": 1,
                "available_node_types": {"a": {"labels": {"k": "a"}, "resources": {"CPU": 1, "GPU": 1}}},
            },
            "type a has GPUs, and does not state which",
        ),
    ],
)
def test_a_file_that_does_not_state_its_types_is_refused(document: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        node_types(document, {})


def test_a_price_is_added_to_a_type_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(LAUNCHER)
    document = yaml.safe_load((Path(__file__).parents[2] / "configs" / "two_services.yaml").read_text())
    args = document["applications"][0]["args"]
    args["topology"] |= {"node_types_file": str(path), "node_types": {"spot": {"cost_per_gpu_hour": 1.0}}}
    topology = AppConfig.model_validate(args).topology
    assert topology is not None
    assert topology.node_types["spot"].cost_per_gpu_hour == 1.0
    assert topology.node_types["spot"].max_nodes == 4
    for wrong, words in (("cluster.yaml", "is relative"), (str(tmp_path / "none.yaml"), "none.yaml")):
        args["topology"]["node_types_file"] = wrong
        with pytest.raises((ValidationError, ValueError), match=words):
            AppConfig.model_validate(args)


def test_replicas_may_wait_for_as_long_as_a_node_takes() -> None:
    document = yaml.safe_load((Path(__file__).parents[2] / "configs" / "two_services.yaml").read_text())
    args = document["applications"][0]["args"]
    slow = {"labels": {"k": "slow"}, "cpus": 8, "max_nodes": 1, "start_s": 900.0}
    args["topology"] |= {"node_types": {"slow": slow}}
    with pytest.raises(
        ValidationError, match=r"node_types\.slow\.start_s \(900\) is not less than autoscale\.no_room_s"
    ):
        AppConfig.model_validate(args)
    slow["start_s"] = 899.0
    AppConfig.model_validate(args)


def test_empty_fields_and_the_head_are_read_and_wrong_numbers_are_named() -> None:
    kind = {"labels": {"k": "a"}, "max_workers": None, "resources": {"CPU": 4}}
    types = {"head": {"labels": {"k": "head"}, "max_workers": 1}, "empty": None, "a": kind}
    document = {"head_node_type": "head", "max_workers": 3, "available_node_types": types}
    assert node_types(document, {}) == {"a": {"labels": {"k": "a"}, "cpus": 4.0, "max_nodes": 3}}
    kind["resources"] = {"CPU": "1k"}
    with pytest.raises(ValueError, match="'1k' is no number of CPUs or GPUs"):
        node_types(document, {})
