"""A cluster that grows and shrinks: Ray's autoscaler v2 adds the nodes that placement asks for, and removes empty ones.

Engines are emulated and have one GPU each; these GPUs are only numbers in Ray's resources.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests

from autoscale.decide.decision_log import load_lines, replay
from autoscale.traces.trace import TraceRequest
from deployments.machine.claims import free_ports
from serve_app.load.generator import LoadGenerator
from serve_app.local.cluster import NodeSpec
from tests.engines.endpoint import emulated_pool, forked_yaml
from tests.lab.stand.elastic_cluster import ElasticCluster
from tests.lab.stand.processes import raylet_socket
from tests.lab.stand.spot import give_notice

pytestmark = [pytest.mark.ray, pytest.mark.slow]

KIND = "example.com/kind"
GPU = "gpu_h100"
START_S, IDLE_S = 20.0, 15.0
# Time from the notice until the node is taken away, seconds, and requests of the load meanwhile.
NOTICE_S, REQUESTS = 45.0, 120


# With fewer CPUs, a spot node is used better by what waits. So Ray chooses it where only Ray chooses.
CPUS = {"spot": 2, "lies": 3, "reserved": 4}


def gpu_node(name: str) -> NodeSpec:
    return NodeSpec(cpus=CPUS[name], labels={KIND: name}, resources={GPU: 2})


def node_type(name: str, **fields: Any) -> dict[str, Any]:
    own = {
        "labels": {KIND: name},
        "gpu_type": "H100",
        "gpus": 2,
        "cpus": CPUS[name],
        "start_s": START_S,
        "retry_s": 600.0,
    }
    return own | fields


def document(lowest: int = 0) -> dict[str, Any]:
    pool = emulated_pool("H100", lowest=lowest, most=6, time_factor=1.0)
    made = forked_yaml("elastic")
    made["applications"][0]["args"] = {
        "model": {"id": "chat", "source": "emulated/llama-70b"},
        "groups": [{"name": "g", "prefill": pool, "decode": pool}],
        "autoscale": {
            "pd_ratio": "1:1",
            "policy": {"kind": "static", "prefill": 1, "decode": 1},
            "slo": {"ttft_s": 60.0, "tpot_s": 5.0},
            "guard": {"cooldown_out_s": 1.0, "cooldown_in_s": 1.0},
            "gate": {"observation_s": 2.0},
            "interval_s": 1.0,
            "window_s": 6.0,
            "no_node_s": 5.0,
            "idle_to_zero_s": 1000.0,
        },
        "ingress": {"replicas": 1, "cpus_per_replica": 0.25, "metrics_port": free_ports(1)[0]},
        "topology": {
            "gpu_resources": {"H100": GPU},
            "cost_per_gpu_hour": {"H100": 4.0},
            "node_types": {
                "spot": node_type("spot", max_nodes=4, cost_per_gpu_hour=1.0),
                "lies": node_type("lies", max_nodes=1, cost_per_gpu_hour=2.0),
                "reserved": node_type("reserved", max_nodes=3),
            },
        },
    }
    return made


@pytest.fixture(scope="module")
def cluster() -> Iterator[ElasticCluster]:
    types = {name: gpu_node(name) for name in CPUS}
    most = {"spot": 0, "lies": 1, "reserved": 3}  # the cloud has no spot nodes
    head, lacks = NodeSpec(cpus=4, gpus=0), {"lies": GPU}  # and nodes of one type come without their GPUs
    with ElasticCluster(head, types, most=most, idle_s=IDLE_S, lacks=lacks) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def app(cluster: ElasticCluster) -> Iterator[Any]:
    from serve_app.sdk import deploy

    with deploy(document(), address=cluster.address) as app:
        yield app


def kinds() -> list[str]:
    """The kinds of the nodes with GPUs that Ray's autoscaler has added."""
    import ray

    added = [node for node in ray.nodes() if node["Alive"] and KIND in node["Labels"]]
    return sorted(node["Labels"][KIND] for node in added if GPU in node["Resources"])


def waiting() -> list[str]:
    """Replicas that wait for a node."""
    from ray.util import placement_group_table

    return [group["name"] for group in placement_group_table().values() if group["state"] == "PENDING"]


def until(app: Any, holds: Callable[[], bool], within_s: float = 300.0) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, (kinds(), app.control_of("chat").status())
        time.sleep(0.5)


def counts(app: Any) -> dict[str, int]:
    return {str(key): len(names) for key, names in app.control_of("chat").status().last.running.items()}


def answer(app: Any) -> int:
    body = {"model": "chat", "prompt": "hello", "max_tokens": 4}
    return requests.post(f"{app.url}/v1/completions", json=body, timeout=300).status_code


def test_a_node_type_that_did_not_exist_serves_though_one_never_comes_and_another_has_no_gpus(app: Any) -> None:
    assert kinds() == []
    began_s = time.monotonic()
    assert answer(app) == 200  # the service sleeps, so this request wakes it
    print(f"first answer after {time.monotonic() - began_s:.0f} s")
    assert kinds() == ["reserved"]  # one node of two GPUs for both roles
    assert set(app.control_of("chat").status().last.plan.state.refused) == {"spot", "lies"}
    assert waiting() == []  # otherwise Ray would try to add spot nodes for as long as a replica may take to end


def test_more_replicas_bring_more_nodes_and_fewer_replicas_empty_them(app: Any) -> None:
    control = app.control_of("chat")
    control.scale(3, 3)
    until(app, lambda: counts(app) == {"prefill:g": 3, "decode:g": 3})
    assert kinds() == ["reserved"] * 3
    control.scale(1, 1)
    until(app, lambda: counts(app) == {"prefill:g": 1, "decode:g": 1})
    until(app, lambda: len(kinds()) == 1)  # Ray's autoscaler removes the empty nodes
    assert answer(app) == 200


def test_no_answer_is_lost_when_the_only_node_is_taken_away_with_notice(app: Any) -> None:
    import ray

    def added() -> set[str]:
        return {node["NodeID"] for node in ray.nodes() if node["Alive"] and GPU in node["Resources"]}

    (leaves,) = added()
    shapes = [TraceRequest(at_s=0.0, input_tokens=50, output_tokens=100)] * REQUESTS
    with ThreadPoolExecutor(1) as thread:
        load = thread.submit(asyncio.run, LoadGenerator(app.url, "chat", seed=1).keep_in_flight(shapes, 4))
        time.sleep(3.0)
        serving = set(app.control_of("chat").status().last.plan.admitted)
        give_notice(leaves, NOTICE_S)
        time.sleep(5.0)  # Serve alone would have stopped both at once
        assert set(app.control_of("chat").status().last.plan.admitted) >= serving
        until(app, lambda: leaves not in added() and len(added()) == 1)
        assert answer(app) == 200
        records = load.result()
    assert len(records) == REQUESTS
    assert [record.error for record in records if record.error] == []
    assert {record.output_tokens for record in records} == {100}
    assert counts(app) == {"prefill:g": 1, "decode:g": 1}


def test_a_node_that_is_lost_while_its_replicas_start_is_replaced(app: Any, cluster: ElasticCluster) -> None:
    import ray

    control = app.control_of("chat")
    control.resume()  # the counts of an earlier test
    control.tune({"idle_to_zero_s": 1.0}, "asleep")
    until(app, lambda: not kinds())
    control.tune({}, "as deployed")
    with ThreadPoolExecutor(1) as thread:
        answered = thread.submit(answer, app)
        until(app, lambda: bool(kinds()))
        (node,) = (node for node in ray.nodes() if node["Alive"] and GPU in node["Resources"])
        (raylet,) = (one for one in cluster.processes() if raylet_socket(one) == node["RayletSocketName"])
        for process in [raylet, *raylet.children(recursive=True)]:
            process.kill()
        assert not answered.done()
        assert answered.result() == 200
    assert node["NodeID"] not in {one["NodeID"] for one in ray.nodes() if one["Alive"]}


def test_the_decision_log_replays(app: Any) -> None:
    from serve_app.running.ray_control import status_of

    lines = load_lines(Path(status_of(app.name).log_path))
    assert any('"no_node"' in line for line in lines)
    assert [one for one in replay(lines) if one is not None] == []


def test_replicas_of_the_lowest_count_ask_for_another_type_if_theirs_never_comes(
    app: Any, cluster: ElasticCluster
) -> None:
    from serve_app.running.ray_control import status_of
    from serve_app.sdk import deploy

    app.control_of("chat").tune({"idle_to_zero_s": 1.0}, "asleep")
    until(app, lambda: not kinds())
    app.delete()
    made = document(lowest=1)
    del made["applications"][0]["args"]["autoscale"]["idle_to_zero_s"]  # it would do nothing
    made["http_options"]["port"] = urlsplit(app.url).port  # Serve runs there already
    began_s = time.monotonic()
    with deploy(made, address=cluster.address) as floors:  # it waits until both roles serve
        print(f"serves after {time.monotonic() - began_s:.0f} s")
        assert answer(floors) == 200
        assert kinds() == ["reserved"]
        assert waiting() == []
        lines = load_lines(Path(status_of(floors.name).log_path))
        assert any("and asks for a node of type reserved" in line for line in lines)
