"""deploy/rayservice.yaml and the rule that makes worker groups out of pools."""

import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.serve_seam.environment import serve_environment
from serve_app.checks.yaml_checks import ConfigError, load_serve_yaml, parse_app_config, sole_application
from serve_app.kube import manifest
from serve_app.kube.manifest import WORKER_GROUP_LABEL, manifest_text, render_rayservice
from serve_app.kube.worker_groups import worker_groups

ROOT = Path(__file__).parents[3]
# Declared node types are refused: `tandem render` writes worker groups of its own.
CONFIGS = sorted(path for path in (ROOT / "configs").glob("*.yaml") if path.stem != "elastic")
IMAGE = "tandem:0.1.0"


def app_args(**pools: dict[str, Any]) -> dict[str, Any]:
    return {"model": {"id": "m", "source": "org/m"}, "groups": [{"name": "g0", **pools}]}


def serve_yaml(args: dict[str, Any]) -> dict[str, Any]:
    return {"applications": [{"name": "tandem", "import_path": "serve_app.app:build", "args": args}]}


def render(args: dict[str, Any]) -> dict[str, Any]:
    return render_rayservice(serve_yaml(args), parse_app_config(args), image=IMAGE, namespace="ns", name="tandem")


def text_of(path: Path, *, image: str, namespace: str) -> str:
    document = load_serve_yaml(path)
    config = parse_app_config(sole_application(document).get("args"))
    return manifest_text(render_rayservice(document, config, image=image, namespace=namespace, name="tandem"))


def render_file(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(text_of(path, image=IMAGE, namespace="ns"))
    return loaded


def worker_specs(rendered: dict[str, Any]) -> list[dict[str, Any]]:
    specs: list[dict[str, Any]] = rendered["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    return specs


def container(group: dict[str, Any]) -> dict[str, Any]:
    (only,) = group["template"]["spec"]["containers"]
    assert isinstance(only, dict)
    return only


def gpus(group: dict[str, Any]) -> int:
    return int(container(group)["resources"]["limits"].get("nvidia.com/gpu", 0))


def test_committed_manifest_is_what_rendering_gives_now() -> None:
    text = text_of(ROOT / "configs/h100_llama70b_fp8.yaml", image=IMAGE, namespace="default")
    assert (ROOT / "deploy/rayservice.yaml").read_text() == text, "render it again: deploy/README.md"


def test_committed_manifest_has_a_pod_for_every_engine_of_the_example() -> None:
    groups = worker_specs(yaml.safe_load((ROOT / "deploy/rayservice.yaml").read_text()))
    assert [(group["groupName"], group["replicas"], gpus(group)) for group in groups] == [
        ("h100-1gpu", 4, 1),
        ("h100-2gpu", 2, 2),
    ]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_serve_config_inside_validates_and_adds_only_the_worker_group(path: Path) -> None:
    source = yaml.safe_load(path.read_text())
    inside = yaml.safe_load(render_file(path)["spec"]["serveConfigV2"])
    assert inside["http_options"] == {**source["http_options"], "host": "0.0.0.0"}
    assert inside["proxy_location"] == "EveryNode"
    before = parse_app_config(source["applications"][0]["args"])
    after = parse_app_config(inside["applications"][0]["args"])
    services = tuple(
        new.model_copy(update={"groups": old.groups}) for old, new in zip(before.services, after.services, strict=True)
    )
    assert after.model_copy(update={"services": services}) == before
    for old, new in zip(before.groups, after.groups, strict=True):
        for key, pool in new.pools().items():
            labels = {k: v for k, v in pool.placement.node_labels.items() if k != WORKER_GROUP_LABEL}
            placement = pool.placement.model_copy(update={"node_labels": labels})
            assert pool.model_copy(update={"placement": placement}) == old.pools()[key]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_worker_pods_carry_every_gpu_and_label_that_the_pools_demand(path: Path) -> None:
    rendered = render_file(path)
    inside = yaml.safe_load(rendered["spec"]["serveConfigV2"])
    config = parse_app_config(inside["applications"][0]["args"])
    specs = {group["groupName"]: group for group in worker_specs(rendered)}
    demanded: Counter[str] = Counter()
    for group in config.groups:
        for pool in group.pools().values():
            labels = pool.placement.node_labels
            spec = specs[labels[WORKER_GROUP_LABEL]]
            assert labels.items() <= spec["labels"].items()
            demanded[spec["groupName"]] += pool.replicas * pool.gpus_per_replica
    assert {name: spec["replicas"] * gpus(spec) for name, spec in specs.items()} == dict(demanded)


def test_pools_of_one_shape_share_a_group_and_other_switches_get_their_own() -> None:
    h100 = {"accelerator_type": "H100", "node_labels": {"tandem.io/s1": "a"}}
    args = app_args(
        prefill={"replicas": 2, "tensor_parallel_size": 2, "placement": h100},
        decode={"replicas": 3, "tensor_parallel_size": 2, "placement": h100},
    )
    other = {"tensor_parallel_size": 2, "placement": {**h100, "node_labels": {"tandem.io/s1": "b"}}}
    args["groups"].append({"name": "g1", "prefill": other, "decode": other})
    groups = worker_specs(render(args))
    assert [(group["groupName"], group["replicas"], gpus(group)) for group in groups] == [
        ("h100-2gpu", 5, 2),
        ("h100-2gpu-2", 2, 2),
    ]
    assert [group["labels"]["tandem.io/s1"] for group in groups] == ["a", "b"]
    assert groups[0]["template"]["spec"]["nodeSelector"] == {"tandem.io/gpu-type": "H100", "tandem.io/s1": "a"}


def test_spread_replica_takes_one_pod_for_each_worker() -> None:
    spread = {"accelerator_type": "H100", "strategy": "STRICT_SPREAD"}
    config = parse_app_config(app_args(decode={"replicas": 2, "tensor_parallel_size": 4, "placement": spread}))
    (group,) = [group for group in worker_groups(config) if group.shape.accelerator_type]
    assert (group.shape.gpus, group.pods) == (1, 8)


def test_pod_has_cpus_for_its_engine_and_for_every_ingress_replica() -> None:
    placement = {"accelerator_type": "H100", "cpus_per_worker": 2, "cpus_per_replica": 1.5}
    pool = {"tensor_parallel_size": 2, "placement": placement}
    args = {**app_args(prefill=pool, decode=pool), "ingress": {"replicas": 2, "cpus_per_replica": 1}}
    (group,) = worker_specs(render(args))
    assert container(group)["resources"]["limits"]["cpu"] == "8"  # 2 x 2 + 1.5 + 2 x 1 = 7.5


def test_pools_on_cpus_ask_for_no_gpu_and_no_gpu_node() -> None:
    (group,) = worker_specs(render(app_args()))
    assert group["groupName"] == "cpu"
    assert gpus(group) == 0
    assert "nodeSelector" not in group["template"]["spec"]


def test_gpu_type_that_ray_does_not_find_is_added_as_a_resource() -> None:
    pool = {"placement": {"accelerator_type": "A100-80G"}}
    (group,) = worker_specs(render(app_args(prefill=pool, decode=pool)))
    assert group["rayStartParams"] == {"resources": '"{\\"accelerator_type:A100-80G\\": 1}"'}


def test_every_container_has_serves_environment_and_the_head_takes_no_work() -> None:
    cluster = render(app_args())["spec"]["rayClusterConfig"]
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert {item["name"]: item["value"] for item in container(group)["env"]} == serve_environment()
        # KubeRay refuses a cluster that sets labels here.
        assert "labels" not in group["rayStartParams"]


def test_container_and_probe_follow_the_port_of_the_serve_config() -> None:
    args = app_args()
    source = {**serve_yaml(args), "http_options": {"port": 9000}}
    rendered = render_rayservice(source, parse_app_config(args), image=IMAGE, namespace="ns", name="tandem")
    worker = container(worker_specs(rendered)[0])
    assert worker["ports"] == [{"containerPort": 9000, "name": "serve"}]
    assert worker["readinessProbe"]["httpGet"]["port"] == "serve"


@pytest.mark.parametrize(("host", "names"), [("127.0.0.1", ["serve"]), ("0.0.0.0", ["serve", "metrics"])])
def test_the_container_names_a_metrics_port_that_other_machines_reach(host: str, names: list[str]) -> None:
    rendered = render({**app_args(), "ingress": {"metrics_host": host, "metrics_port": 9100}})
    ports = container(worker_specs(rendered)[0])["ports"]
    assert [port["name"] for port in ports] == names
    assert all(port["containerPort"] == 9100 for port in ports[1:])


def test_rendering_leaves_its_input_alone() -> None:
    args = app_args(prefill={"placement": {"node_labels": {"tandem.io/s1": "a"}}})
    source = serve_yaml(args)
    before = yaml.safe_dump(source)
    render(args)
    assert yaml.safe_dump(source) == before


@pytest.mark.parametrize("value", ["!a", "in(a,b)", "!in(a,b)"])
def test_label_expression_is_refused_with_its_place(value: str) -> None:
    args = app_args(decode={"placement": {"node_labels": {"tandem.io/s1": value}}})
    with pytest.raises(ConfigError, match=r"groups\.g0\.decode\.placement\.node_labels: tandem\.io/s1 is"):
        render(args)


@pytest.mark.parametrize("count", [0, 2])
def test_a_yaml_without_exactly_one_application_is_refused(tmp_path: Path, count: int) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump({"applications": serve_yaml(app_args())["applications"] * count}))
    with pytest.raises(ConfigError, match="exactly one"):
        text_of(path, image=IMAGE, namespace="ns")


def test_a_cluster_that_was_replaced_stays_as_long_as_a_request_may_take() -> None:
    args = app_args(decode={"graceful_shutdown_timeout_s": 1000.0})
    rendered = render({**args, "ingress": {"request_timeout_s": 900.5}})
    assert rendered["spec"]["rayClusterDeletionDelaySeconds"] == 961
    head = rendered["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert {"name": "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S", "value": "901"} in head["env"]


def test_text_reads_back_as_the_manifest() -> None:
    rendered = render(app_args())
    assert yaml.safe_load(manifest_text(rendered)) == rendered


def test_ray_version_is_the_one_that_the_package_pins() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"ray[serve]=={manifest.RAY_VERSION}" in project["dependencies"]


def test_an_autoscaled_application_gets_nodes_up_to_its_most_replicas() -> None:
    pools = {
        "prefill": {"replicas": 1, "max_replicas": 3, "placement": {"accelerator_type": "H100"}},
        "decode": {"replicas": 2, "max_replicas": 9, "placement": {"accelerator_type": "H100"}},
    }
    args = app_args(**pools) | {"autoscale": {"pd_ratio": "1:3", "policy": {"kind": "heteroscale", "target": 50.0}}}
    rendered = render(args)
    (group,) = worker_specs(rendered)
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (3, 3, 12)
    assert rendered["spec"]["rayClusterConfig"]["enableInTreeAutoscaling"] is True
    # Version 1 of Ray's autoscaler adds nodes of any labels.
    assert rendered["spec"]["rayClusterConfig"]["autoscalerOptions"] == {"version": "v2"}
    fixed = render(app_args(prefill={"replicas": 1}, decode={"replicas": 2}))
    assert "enableInTreeAutoscaling" not in fixed["spec"]["rayClusterConfig"]
    assert [(g["replicas"], g["maxReplicas"]) for g in worker_specs(fixed)] == [(3, 3)]


def test_declared_node_types_are_refused() -> None:
    args = app_args(prefill={"replicas": 1, "max_replicas": 2}, decode={"replicas": 1, "max_replicas": 2})
    args["autoscale"] = {"pd_ratio": "1:1", "policy": {"kind": "static", "prefill": 1, "decode": 1}}
    args["topology"] = {"node_types": {"spot": {"labels": {"k": "spot"}, "cpus": 8, "max_nodes": 2}}}
    with pytest.raises(ConfigError, match=r"topology\.node_types: `tandem render` makes one worker group"):
        render(args)
