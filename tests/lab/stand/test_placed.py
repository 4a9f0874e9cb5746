"""Laws of a virtual cluster on nodes."""

from collections import Counter
from dataclasses import replace

import pytest

from autoscale.decide.config import AutoscaleConfig
from autoscale.policies.static import StaticConfig
from autoscale.types import Demand
from kvtransfer.topology import Node
from tests.autoscale.sim.conftest import KEYS, make_scenario
from tests.lab.stand.placed import run_placed


def node(switch: str, gpus: int) -> Node:
    under = ("d0", "c0", "b0", switch, "")
    return Node(name=f"n-{switch}", under=under, gpu_type="H100", gpus=8, free_gpus=gpus, cpus=64, free_cpus=64)


def ttft_s(nodes: list[Node], *, sees_nodes: bool = False) -> tuple[float, Counter[str]]:
    """Mean TTFT with one replica of each role, two GPUs each, and how many replicas each node had."""
    scenario = make_scenario([(2.0 * n, 3000, 20) for n in range(40)])
    demand = Demand(gpu_type="H100", workers=2, gpus_per_worker=1.0)
    scenario = replace(scenario, pools={key: replace(pool, demand=demand) for key, pool in scenario.pools.items()})
    config = AutoscaleConfig(policy=StaticConfig(prefill=1, decode=1))
    run, placed = run_placed(
        scenario,
        config,
        dict.fromkeys(KEYS.values(), 1),
        nodes,
        switch_uplink_bytes_per_s=1e9,
        sees_nodes=sees_nodes,
    )
    waits = [record.ttft_s for record in run.records if record.ttft_s is not None]
    assert len(waits) == 40
    return sum(waits) / len(waits), Counter(each.name for each in placed.values())


@pytest.mark.parametrize("sees_nodes", [True, False])
def test_kv_between_switches_shares_their_uplinks(sees_nodes: bool) -> None:
    near, on_one = ttft_s([node("m0", 4), node("m1", 8)], sees_nodes=sees_nodes)
    far, on_both = ttft_s([node("m0", 2), node("m1", 2)], sees_nodes=sees_nodes)
    assert on_one == {"n-m0": 2}  # the fullest node that has room
    assert on_both == {"n-m0": 1, "n-m1": 1}
    # 3,000 tokens of 327,680 bytes are 0.98 s on 1 GB/s, and a fourth more between switches.
    assert far - near == pytest.approx(0.98 / 0.8, abs=0.1)
