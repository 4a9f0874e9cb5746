"""Several services on one cluster: a configuration that contradicts itself is refused before anything starts."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvtransfer.topology import Role
from serve_app.checks.yaml_checks import ConfigError, parse_app_config

ROOT = Path(__file__).parents[2]
Change = Callable[[dict[str, Any]], Any]


def two_services() -> dict[str, Any]:
    document = yaml.safe_load((ROOT / "configs" / "two_services.yaml").read_text())
    args: dict[str, Any] = copy.deepcopy(document["applications"][0]["args"])
    return args


def chat(args: dict[str, Any]) -> dict[str, Any]:
    service: dict[str, Any] = args["services"][0]
    return service


def test_the_example_has_two_services_and_one_of_them_may_sleep() -> None:
    config = parse_app_config(two_services())
    assert list(config.pools()) == ["qwen3-32b", "qwen3-8b"]
    assert [str(key) for key in config.pools()["qwen3-8b"].root] == ["decode:offline"]
    costs = {str(key): limits.cost for key, limits in config.pools()["qwen3-32b"].root.items()}
    assert costs == {
        "prefill:chat-mixed-a": 5.38,
        "decode:chat-mixed-a": 2.98,
        "prefill:chat-h100-b": 5.38,
        "decode:chat-h100-b": 5.38,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda a: a.update(model={"id": "x", "source": "y/z"}),
            "services and model are given: model is a field of a service",
        ),
        (lambda a: a.update(services=[]), "services"),
        (lambda a: chat(a)["model"].update(id="qwen3-8b"), "services: the model 'qwen3-8b' is used twice"),
        (lambda a: chat(a)["groups"][0].update(name="offline"), "groups: the name 'offline' is used twice"),
        (
            lambda a: chat(a).pop("autoscale"),
            "max_replicas of prefill:chat-mixed-a does nothing without autoscale: add autoscale, or set replicas",
        ),
        (
            lambda a: chat(a)["groups"][0].update(affinity="s0"),
            "affinity is s0, and its node_labels do not pin both roles to one switch",
        ),
        (lambda a: chat(a)["groups"][0].update(affinity="rack"), "affinity"),
        (lambda a: chat(a)["groups"][0].pop("node_labels"), "give it tandem.io/s1"),
        (
            lambda a: chat(a)["groups"][0].update(is_preemptible=True),
            "is_preemptible and must keep 1 prefill and 1 decode",
        ),
        (
            lambda a: chat(a)["groups"][0]["decode"].update(engine_sleep={"level": 1}),
            "engine_sleep is given for decode on GPUs",
        ),
        (
            lambda a: chat(a)["groups"][0]["decode"].update(engine_sleep={}, emulator={"profile": "p.json"}),
            "engine_sleep is given for an emulated engine",
        ),
        (lambda a: a.update(start_hosts={"per_node": 65}), "start_hosts.per_node"),
        (
            lambda a: chat(a)["groups"][0]["decode"].update(replicas=0),
            "prefill has 1 replicas and decode 0: set both to 0, and the group sleeps",
        ),
        (
            lambda a: a["topology"]["budget_gpus"].update(H100=1),
            "1 GPUs of type H100 are less than the 2 that the lowest",
        ),
        (
            lambda a: a["topology"]["budget_gpus"].update(H10O=8),
            "budget_gpus has GPUs of type H10O, and no group has any",
        ),
        (
            lambda a: a["topology"]["cost_per_gpu_hour"].pop("A100"),
            "cost_per_gpu_hour has no A100, which would seem to",
        ),
        (
            lambda a: chat(a)["autoscale"].update(quota_gpus={"B200": 8}),
            r"quota_gpus of qwen3-32b has GPUs of type B200, .* \(they have A100, H100\)",
        ),
        (
            lambda a: chat(a)["autoscale"].update(gpu_types={"decode": ["H100"]}),
            "gpu_types allows H100 for decode, and decode:chat-mixed-a has A100: add A100 to them",
        ),
        (lambda a: chat(a)["autoscale"].update(quota_gpus={"H100": -3}), "quota_gpus.H100"),
        (lambda a: chat(a)["autoscale"].update(quota_gpus={"A100": 1}), "1 GPUs of type A100 are less than the 2 that"),
        (
            lambda a: a["services"][1]["autoscale"].update(quota_gpus={"H100": 0.5}),
            "quota_gpus of qwen3-8b: 0.5 GPUs of type H100 hold no replica, which takes 1",
        ),
        (
            lambda a: chat(a)["autoscale"].update(idle_to_zero_s=60.0),
            "idle_to_zero_s of qwen3-32b does nothing while prefill:chat-mixed-a keeps replicas",
        ),
        (
            lambda a: a["services"][1]["autoscale"].update(bounds={"decode": {"lowest_replicas": 1}}),
            r"bounds.decode.lowest_replicas \(1\) does nothing, since every group may sleep",
        ),
        (
            lambda a: chat(a)["groups"][0]["node_labels"].update(x="in(a"),
            r"'in\(a' is no label selector: give 'v', '!v'",
        ),
        (lambda a: a["ingress"].update(node_labels={"x": "!!"}), "'!!' is no label selector"),
        (lambda a: a["topology"].update(labels={"s1": "x", "s2": "x"}), "the label 'x' stands for two levels"),
        (lambda a: a["topology"].update(inventory={"host": {"rack": "r"}}), "inventory"),
        (lambda a: a["topology"].update(inventory="/nowhere.yaml"), "/nowhere.yaml: cannot be read: No such file"),
        (lambda a: a["topology"].update(inventory="nodes.yaml"), "inventory nodes.yaml is relative"),
        (
            lambda a: chat(a)["model"].update(stage_folder="/fast"),
            "source is the hub id 'Qwen/Qwen3-32B': leave stage_folder out",
        ),
        (lambda a: chat(a)["model"].update(source="./m", stage_folder="fast"), "stage_folder fast is relative"),
        (lambda a: chat(a).update(admission={"tpot_s": 0.05}), "ttft_s is not given"),
    ],
)
def test_a_configuration_that_contradicts_itself_is_refused(change: Change, message: str) -> None:
    args = two_services()
    change(args)
    with pytest.raises(ConfigError, match=message):
        parse_app_config(args)


def test_a_service_without_autoscale_beside_one_that_has_it_is_refused() -> None:
    args = two_services()
    del chat(args)["autoscale"]
    chat(args)["groups"] = chat(args)["groups"][:1]
    for role in ("prefill", "decode"):
        del chat(args)["groups"][0][role]["max_replicas"]
    with pytest.raises(ConfigError, match="'qwen3-32b' has no autoscale and others have: one policy sizes all"):
        parse_app_config(args)


def test_limits_may_switch_a_type_off_and_bounds_hold_only_for_groups_that_are_awake() -> None:
    args = two_services()
    chat(args)["autoscale"]["bounds"] = {role: {"lowest_replicas": 2} for role in ("prefill", "decode")}
    args["services"][1]["autoscale"]["quota_gpus"] = {"H100": 0}
    config = parse_app_config(args)
    sized = config.services[0].autoscale
    assert sized is not None
    assert sized.bounds_of(Role.DECODE, 1, 8) == (2, 8)
    assert sized.bounds_of(Role.DECODE, 0, 8) == (0, 8)


def test_an_inventory_may_be_a_file(tmp_path: Path) -> None:
    file = tmp_path / "nodes.yaml"
    file.write_text("gpu-1: {s1: switch-a, s2: pod-1}\n10.0.0.7: {s1: switch-b}\n")
    args = two_services()
    args["topology"]["inventory"] = str(file)
    topology = parse_app_config(args).topology
    assert topology is not None
    assert topology.under({}, ["gpu-1", "10.0.0.1"]) == ("", "", "pod-1", "switch-a", "")
    # The labels of a node count before the inventory.
    assert topology.under({"tandem.io/s1": "switch-c"}, ["10.0.0.7"]) == ("", "", "", "switch-c", "")


def test_topology_without_autoscale_is_refused() -> None:
    args = {"model": {"id": "x", "source": "y/z"}, "groups": [{"name": "g"}], "topology": {}}
    with pytest.raises(ConfigError, match="topology does nothing without autoscale"):
        parse_app_config(args)


def test_admission_takes_the_slo_of_each_service_with_from_slo() -> None:
    args = two_services()
    args.setdefault("ingress", {})["admission"] = {"from_slo": True}
    config = parse_app_config(args)
    for service in config.services:
        assert service.autoscale is not None
        assert service.admission_in(config.ingress.admission).ttft_s == (
            service.autoscale.slo.ttft_s if service.admission is None else service.admission.ttft_s
        )


def test_from_slo_of_a_service_without_autoscale_is_refused(make_app_args: Callable[..., dict[str, Any]]) -> None:
    args = make_app_args()
    args["ingress"]["admission"] = {"from_slo": True}
    with pytest.raises(ConfigError, match=r"admission.from_slo of tiny: the service has no autoscale"):
        parse_app_config(args)


def test_start_hosts_without_a_service_that_grows_are_refused() -> None:
    args = {"model": {"id": "m", "source": "o/m"}, "groups": [{"name": "g"}], "start_hosts": {"per_node": 2}}
    with pytest.raises(ConfigError, match=r"start_hosts\.per_node is 2, and no service has autoscale"):
        parse_app_config(args)


def test_instances_that_ray_alone_spreads_need_labels_of_one_switch() -> None:
    prefill = {
        "emulator": {"profile": "configs/profiles/h100_llama70b_fp8_tp1.json"},
        "attention_ffn": "1:3",
        "placement": {"accelerator_type": "H100", "strategy": "PACK"},
    }
    args = {"model": {"id": "m", "source": "hub/m"}, "groups": [{"name": "g0", "prefill": prefill}]}
    with pytest.raises(ConfigError, match="attention_ffn needs all instances below one S1 switch"):
        parse_app_config(args)
    args["groups"][0]["node_labels"] = {"tandem.io/s1": "switch-a"}  # type: ignore[index]
    assert parse_app_config(args).groups[0].prefill is not None
