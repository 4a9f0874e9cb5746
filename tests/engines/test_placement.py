"""Where replicas really are: a dozen labelled Ray nodes of three GPU types under four S1 and two S2 switches.

A number in a test's name is that of its law in docs/placement.md. Laws 5 and 8 have no test here: law 5 is about a
single cycle, and law 8 about replicas of several instances. Engines are emulated and have one GPU each; these GPUs are
only numbers in Ray's resources.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from autoscale.decide.decision_log import load_lines, replay
from deployments.machine.claims import free_ports
from serve_app.local.cluster import LocalCluster, NodeSpec
from tests.engines.endpoint import emulated_pool, forked_yaml
from tests.lab.stand.processes import title

pytestmark = [pytest.mark.ray, pytest.mark.slow]

# S1 switch -> its S2 switch, and the GPU types of its nodes: b0 has one type, m2 two types, and m3 a third one.
SWITCHES = {
    "m0": ("b0", ("H100", "H100")),
    "m1": ("b0", ("H100", "H100")),
    "m2": ("b1", ("H100", "H100", "A100", "A100")),
    "m3": ("b1", ("H20", "H20", "H20")),
}
RESOURCES = {kind: f"gpu_{kind.lower()}" for kind in ("H100", "A100", "H20")}
HOST = "tandem.io/host"
NO_NODE_S = 6.0


def gpu_node(switch: str, number: int) -> NodeSpec:
    s2, kinds = SWITCHES[switch]
    labels = {"tandem.io/s2": s2, "tandem.io/s1": switch, HOST: f"{switch}-{number}"}
    return NodeSpec(cpus=2, gpus=0, labels=labels, resources={RESOURCES[kinds[number]]: 1})


def group(
    name: str, switch: str, types: tuple[str, str] = ("H100", "H100"), lowest: int = 0, highest: int = 2, **more: Any
) -> dict[str, Any]:
    pools = {
        role: emulated_pool(kind, lowest=lowest, most=highest, time_factor=20.0)
        for role, kind in zip(("prefill", "decode"), types, strict=True)
    }
    return {"name": name, "affinity": "s1", "node_labels": {"tandem.io/s1": switch}, **pools, **more}


def service(model: str, groups: list[dict[str, Any]], **autoscale: Any) -> dict[str, Any]:
    sized = {
        "pd_ratio": "1:1",
        "policy": {"kind": "static", "prefill": 1, "decode": 1},
        "slo": {"ttft_s": 30.0, "tpot_s": 5.0},
        "guard": {"cooldown_out_s": 1.0, "cooldown_in_s": 1.0},
        "gate": {"observation_s": 2.0},
        "interval_s": 1.0,
        "window_s": 6.0,
        "no_node_s": NO_NODE_S,
        **autoscale,
    }
    return {"model": {"id": model, "source": "emulated/llama-70b"}, "groups": groups, "autoscale": sized}


def document() -> dict[str, Any]:
    made = forked_yaml("placed")
    application = made["applications"][0]
    application["args"] = {
        "services": [
            service(
                "chat",
                [group("chat-m0", "m0", lowest=1), group("chat-m1", "m1"), group("chat-m2", "m2")],
                gpu_types={"prefill": ["H100"], "decode": ["H100"]},
            ),
            service(
                "mixed",
                [group("mixed-m1", "m1", ("H100", "A100")), group("mixed-m2", "m2", ("H100", "A100"))],
                priority=10,
                idle_to_zero_s=20.0,
            ),
            # Aggregated pools of both types, under the switch that has both. The more expensive type is preferred.
            service(
                "alone",
                [
                    group("alone-h-m2", "m2", highest=1, prefill=None),
                    group("alone-a-m2", "m2", ("A100", "A100"), highest=1, prefill=None),
                ],
                priority=-5,
                pd_ratio="0:1",
                policy={"kind": "static", "prefill": 0, "decode": 1},
                gpu_types={"decode": ["H100", "A100"]},
                idle_to_zero_s=5.0,
            ),
        ],
        "ingress": {"replicas": 1, "cpus_per_replica": 0.25, "metrics_port": free_ports(1)[0]},
        "topology": {"gpu_resources": RESOURCES, "cost_per_gpu_hour": {"H100": 4.0, "A100": 2.0, "H20": 1.0}},
    }
    return made


class Placed:
    """The application, and where its replicas really are."""

    def __init__(self, app: Any, cluster: LocalCluster) -> None:
        self.app, self.cluster = app, cluster
        self.seen = set[tuple[str, str]]()  # pools, and switches that they have been under

    def control(self, model: str) -> Any:
        return self.app.control_of(model)

    def plan(self, model: str) -> Any:
        return self.control(model).status().last.plan

    def where(self) -> dict[str, list[str]]:
        """The hosts of each pool's replicas, as Ray reports them."""
        import ray
        from ray._private.state import actors

        hosts = {node["NodeID"]: node["Labels"].get(HOST, "head") for node in ray.nodes() if node["Alive"]}
        found: dict[str, list[str]] = {}
        for actor in actors().values():
            name = actor["Name"]
            if actor["State"] == "ALIVE" and name.startswith("SERVE_REPLICA::placed#"):
                pool = name.removeprefix("SERVE_REPLICA::placed#").rpartition("#")[0]
                if pool.startswith(("prefill:", "decode:")):
                    found.setdefault(pool, []).append(hosts.get(actor["Address"]["NodeID"], "lost"))
        return {pool: sorted(names) for pool, names in sorted(found.items())}

    def switches(self) -> dict[str, list[str]]:
        found = {pool: sorted({host.partition("-")[0] for host in hosts}) for pool, hosts in self.where().items()}
        self.seen |= {(pool, switch) for pool, switches in found.items() for switch in switches}
        return found

    def counts(self) -> dict[str, tuple[int, int]]:
        where = self.where()
        groups = sorted({pool.partition(":")[2] for pool in where})
        return {name: (len(where.get(f"prefill:{name}", ())), len(where.get(f"decode:{name}", ()))) for name in groups}

    def decode(self, group: str) -> list[str]:
        """The hosts of a group's decode replicas."""
        return self.where().get(f"decode:{group}", [])

    def until(self, holds: Callable[[], bool], within_s: float = 600.0) -> None:
        """Wait until a condition holds, and assert all the time that each pool is only under its own switch."""
        deadline = time.monotonic() + within_s
        while not holds():
            assert_nothing_straddles(self.switches())
            assert time.monotonic() < deadline, (
                self.where(),
                self.control("chat").status(),
                self.control("mixed").status(),
            )
            time.sleep(0.5)
        assert_nothing_straddles(self.switches())


def assert_nothing_straddles(switches: dict[str, list[str]]) -> None:
    """Laws 1 and 11: a pool's replicas are only under the switch in the pool's name."""
    for pool, names in switches.items():
        assert names == [pool.rpartition("-")[2]], switches


@pytest.fixture(scope="module")
def placed() -> Iterator[Placed]:
    from serve_app.sdk import deploy

    nodes = [gpu_node(switch, number) for switch, (_, kinds) in SWITCHES.items() for number in range(len(kinds))]
    with (
        LocalCluster([NodeSpec(cpus=4, gpus=0), *nodes]) as cluster,
        deploy(document(), address=cluster.address) as app,
    ):
        yield Placed(app, cluster)


def test_law_15_groups_sleep_until_they_are_needed(placed: Placed) -> None:
    placed.until(lambda: placed.counts() == {"chat-m0": (1, 1)})


def test_laws_3_and_4_a_service_grows_in_units_and_leaves_scarce_switches_alone(placed: Placed) -> None:
    placed.control("chat").scale(2, 2)
    placed.until(lambda: placed.counts() == {"chat-m0": (1, 1), "chat-m1": (1, 1)})
    placed.control("chat").scale(3, 3)
    placed.until(lambda: placed.counts() == {"chat-m0": (1, 1), "chat-m1": (1, 1), "chat-m2": (1, 1)})


def test_law_14_replicas_without_room_are_pending_and_the_reason_is_shown(placed: Placed) -> None:
    placed.control("chat").scale(4, 4)
    placed.until(lambda: placed.plan("chat").pending == {"prefill": 1, "decode": 1})
    said = placed.plan("chat").passed_over
    assert said["chat-m0"] == "no node has room for a replica of decode:chat-m0 beside the other 1 of its unit"
    assert placed.counts() == {"chat-m0": (1, 1), "chat-m1": (1, 1), "chat-m2": (1, 1)}


def test_law_15_a_request_wakes_a_service_and_law_10_the_less_important_one_makes_room(placed: Placed) -> None:
    # Both H100s of the only switch with both types are chat's.
    body = {"model": "mixed", "prompt": "Hello", "max_tokens": 4}
    answer = requests.post(f"{placed.app.url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 4
    placed.until(lambda: placed.counts().get("mixed-m2") == (1, 1))
    where = placed.where()
    assert where["prefill:mixed-m2"][0] in ("m2-0", "m2-1")
    assert where["decode:mixed-m2"][0] in ("m2-2", "m2-3")
    assert "mixed-m1" not in placed.counts()  # law 1: no A100 is under m1
    placed.until(lambda: placed.counts() == {"chat-m0": (1, 1), "chat-m1": (1, 1), "mixed-m2": (1, 1)})


def test_law_15_a_service_without_requests_goes_to_sleep_again(placed: Placed) -> None:
    placed.control("chat").scale(2, 2)
    placed.until(lambda: placed.counts() == {"chat-m0": (1, 1), "chat-m1": (1, 1)})


def test_law_6_scale_in_frees_the_scarcest_switch_first(placed: Placed) -> None:
    placed.control("chat").scale(3, 3)
    placed.until(lambda: "chat-m2" in placed.counts() and placed.counts()["chat-m2"] == (1, 1))
    placed.control("chat").scale(2, 2)
    placed.until(lambda: placed.counts() == {"chat-m0": (1, 1), "chat-m1": (1, 1)})


def test_law_13_a_cordoned_switch_takes_no_new_replica(placed: Placed) -> None:
    placed.control("chat").cordon("m2")
    placed.control("chat").scale(3, 3)
    placed.until(lambda: placed.plan("chat").pending == {"prefill": 1, "decode": 1})
    assert "chat-m2" not in placed.counts()
    placed.control("chat").cordon("m2", False)
    placed.until(lambda: placed.counts().get("chat-m2") == (1, 1))
    placed.control("chat").scale(2, 2)
    placed.until(lambda: placed.counts() == {"chat-m0": (1, 1), "chat-m1": (1, 1)})


def test_law_9_a_quota_holds(placed: Placed) -> None:
    placed.control("chat").tune({"quota_gpus": {"H100": 4}}, "test")
    placed.control("chat").scale(3, 3)
    placed.until(lambda: placed.plan("chat").pending == {"prefill": 1, "decode": 1})
    assert placed.plan("chat").passed_over["chat-m2"].startswith("a budget leaves 0 GPUs of type H100")
    assert "chat-m2" not in placed.counts()
    placed.control("chat").scale(2, 2)
    placed.control("chat").tune({"quota_gpus": {"H100": 100}}, "test")


def test_law_7_the_preferred_type_comes_first_and_law_2_so_does_a_more_important_service(placed: Placed) -> None:
    alone = placed.control("alone")
    alone.scale(0, 1)
    placed.until(lambda: placed.decode("alone-h-m2") != [] and placed.decode("alone-a-m2") == [])
    assert placed.decode("alone-h-m2")[0] in ("m2-0", "m2-1")
    alone.scale(0, 2)
    placed.until(lambda: placed.decode("alone-a-m2") != [])
    assert placed.decode("alone-a-m2")[0] in ("m2-2", "m2-3")
    placed.control("chat").scale(3, 3)  # takes both H100s of m2
    placed.until(lambda: placed.counts().get("chat-m2") == (1, 1) and placed.decode("alone-h-m2") == [])
    assert placed.decode("alone-a-m2") != []
    placed.control("chat").scale(2, 2)
    alone.resume()
    placed.until(lambda: placed.counts() == {"chat-m0": (1, 1), "chat-m1": (1, 1)})


def test_law_12_a_lost_nodes_replica_goes_elsewhere_and_the_node_is_used_when_it_is_back(placed: Placed) -> None:
    lost = placed.where()["prefill:chat-m1"][0]
    lose(placed.cluster, lost)
    # Its own group has no other node, so its decode replica is of no use there either.
    placed.until(lambda: placed.counts().get("chat-m2") == (1, 1))
    switch, _, number = lost.partition("-")
    placed.cluster.add_node(gpu_node(switch, int(number)))
    placed.control("chat").scale(3, 3)
    placed.until(lambda: placed.counts() == {"chat-m0": (1, 1), "chat-m1": (1, 1), "chat-m2": (1, 1)})


def test_law_11_no_pool_was_ever_outside_its_domain(placed: Placed) -> None:
    groups = ("chat-m0", "chat-m1", "chat-m2", "mixed-m2")
    expected = {(f"{role}:{name}", name.rpartition("-")[2]) for name in groups for role in ("prefill", "decode")}
    expected |= {("decode:alone-h-m2", "m2"), ("decode:alone-a-m2", "m2")}
    assert placed.seen == expected  # each pool ran under its own switch, and under no other


def test_law_16_the_decision_log_of_all_tests_replays(placed: Placed) -> None:
    from serve_app.running.ray_control import status_of

    lines = load_lines(Path(status_of(placed.app.name).log_path))
    assert len(lines) > 20
    different = [one for one in replay(lines) if one is not None]
    assert different == []


def lose(cluster: LocalCluster, host: str) -> None:
    """End every process of a node at once."""
    raylets = [one for one in cluster.processes() if "raylet/raylet " in title(one) and f'"{host}"' in title(one)]
    (raylet,) = raylets
    for process in [raylet, *raylet.children(recursive=True)]:
        process.kill()
