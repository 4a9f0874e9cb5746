"""WVA's Experiment 2 (section V-C) under real Ray Serve: the cheap variant fills before the expensive one starts.

Emulated engines have profiles that were measured on four A100s and on four H100s. Each engine serves eight requests at
a time, so that little traffic saturates it.
"""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autoscale.traces.trace import TraceRequest
from autoscale.types import PoolKey
from deployments.machine.claims import free_ports
from kvtransfer.topology import Role
from serve_app.local.cluster import LocalCluster, NodeSpec
from tests.engines.endpoint import WAIT_S, forked_yaml
from tests.engines.test_autoscale import load

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
MOST_A100 = 2


def group(kind: str, lowest: int, highest: int) -> dict[str, Any]:
    return {
        "name": kind.lower(),
        **{
            role: {
                "replicas": lowest,
                "max_replicas": highest if role == "decode" else 1,
                "tensor_parallel_size": 4 if role == "decode" else 2,
                "emulator": {
                    "profile": str(ROOT / f"configs/profiles/{kind.lower()}_llama2_70b_tp4.json"),
                    "start_s": 0.0,
                    "time_factor": 4.0,
                    "max_running": 8,
                },
                "placement": {
                    "accelerator_type": kind,
                    "gpus_per_worker": 1.0 if role == "decode" else 0.5,
                    "cpus_per_worker": 0.01,
                    "cpus_per_replica": 0.05,
                },
            }
            for role in ("prefill", "decode")
        },
    }


def document() -> dict[str, Any]:
    made = forked_yaml("variants")
    application = made["applications"][0]
    application["args"] = {
        "model": {"id": "llama2-70b", "source": "emulated/llama2-70b"},
        "groups": [group("H100", 0, 2), group("A100", 1, MOST_A100)],
        "autoscale": {
            "pd_ratio": "1:2",
            "policy": {"kind": "wva", "prefill_aggression_frac": 0.1},
            "slo": {"ttft_s": 60.0, "tpot_s": 5.0},
            "guard": {"cooldown_out_s": 2.0, "cooldown_in_s": 5.0},
            "gate": {"observation_s": 3.0},
            "interval_s": 1.0,
            "window_s": 6.0,
        },
        "ingress": {"replicas": 1, "cpus_per_replica": 0.25, "metrics_port": free_ports(1)[0]},
        # A replica costs 1.0 or 2.5 an hour, as in the paper.
        "topology": {
            "gpu_resources": {"A100": "gpu_a100", "H100": "gpu_h100"},
            "cost_per_gpu_hour": {"A100": 0.25, "H100": 0.625},
        },
    }
    return made


@pytest.fixture(scope="module", name="app")
def _app() -> Iterator[Any]:
    from serve_app.sdk import deploy

    nodes = [NodeSpec(cpus=4, gpus=0, resources={f"gpu_{kind}": 16.0}) for kind in ("a100", "h100")]
    nodes.insert(0, NodeSpec(cpus=4, gpus=0))
    with LocalCluster(nodes) as cluster, deploy(document(), address=cluster.address) as app:
        yield app


def test_bundles_hold_the_gpus_of_each_worker_on_one_node(app: Any) -> None:
    import ray
    from ray.util import placement_group_table

    a100 = next(node["NodeID"] for node in ray.nodes() if "gpu_a100" in node["Resources"])
    made = {}
    for group in placement_group_table().values():
        if group["state"] == "CREATED" and group["name"].startswith("SERVE_REPLICA::variants#"):
            pool = group["name"].removeprefix("SERVE_REPLICA::variants#").rpartition("#")[0]
            made[pool] = [bundle.get("gpu_a100") for bundle in group["bundles"].values()]
            assert group["strategy"] == "STRICT_PACK"
            assert set(group["bundles_to_node_id"].values()) == {a100}
    assert made == {"prefill:a100": [0.5, 0.5], "decode:a100": [1.0] * 4}  # halves of a GPU, and four whole ones


def test_the_cheap_variant_fills_before_the_expensive_one_starts(app: Any) -> None:
    from serve_app.running.ray_control import Control

    seen: list[tuple[int, int]] = []
    # Standard decode replicas that were wanted whenever an expensive one should serve, and those of all cheap ones.
    wanted_with_dear: list[float] = []
    status = Control("variants").status()
    all_cheap = MOST_A100 * status.pools.root[PoolKey("a100", Role.DECODE)].capacity

    def desired() -> tuple[int, int]:
        last = Control("variants").status().last
        assert last is not None
        counts = {str(pool): count for pool, count in last.plan.state.desired.items()}
        if counts["decode:h100"] and last.plan.decision.wanted is not None:
            wanted_with_dear.append(last.plan.decision.wanted[Role.DECODE])
        return counts["decode:a100"], counts["decode:h100"]

    def watch() -> None:
        while not is_over.wait(0.5):
            seen.append(desired())

    is_over = threading.Event()
    watching = threading.Thread(target=watch)
    watching.start()
    try:
        failed = 0
        began_s = time.monotonic()
        # A load for one engine of eight requests at a time, longer than a window. Then two requests wait, which is too
        # much for one replica of the cheap variant and enough for two. Then more wait than two such engines can serve.
        for concurrency, is_reached in (
            (4, lambda: time.monotonic() > began_s + 10.0),
            (10, lambda: (MOST_A100, 0) in seen),
            (40, lambda: any(dear for _, dear in seen)),
        ):
            deadline = time.monotonic() + WAIT_S
            while not is_reached():
                assert time.monotonic() < deadline, seen
                shape = TraceRequest(at_s=0.0, input_tokens=64, output_tokens=150)
                failed += load(app.url, "llama2-70b", shape, 2 * concurrency, concurrency).requests_failed
        assert failed == 0
        deadline = time.monotonic() + WAIT_S
        while desired() != (1, 0):  # the expensive variant shrinks first
            assert time.monotonic() < deadline, seen
            time.sleep(1.0)
    finally:
        is_over.set()
        watching.join()
    assert seen[0] == (1, 0)
    assert wanted_with_dear[0] > all_cheap
