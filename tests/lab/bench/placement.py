"""How long one cycle of placement takes on a large cluster, and how much it leaves in pieces: ``make bench-placement``.

20,000 GPUs in 2,500 nodes, 500 services with 2,000 replicas to place, and a third of the cluster in use already.
First-fit is compared with it: the same requests in the same order, each replica on the first node by name with room.
Two shares of the free GPUs are in pieces: those in domains where no unit of any group fits, and those of a group's own
domain where its own unit does not fit.
"""

import json
import platform
import random
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.controller import Controller
from autoscale.decide.cycle import tick_all
from autoscale.decide.placement import Placed, place
from autoscale.decide.possible import possible_nodes, with_savings
from autoscale.decide.slots import Slots, least_units
from autoscale.ratio import PdRatio
from autoscale.topology_config import NodeTypeConfig, TopologyConfig
from autoscale.types import ControllerState, Demand, PoolKey, PoolLimits, PoolStats, Snapshot
from kvtransfer.labels import TopologyLabels
from kvtransfer.topology import LinkTier, Node, Role, Topology
from serve_app.output import write_file

_TYPES = ("H100", "H20", "A100")
_NODES, _GPUS_PER_NODE = 2500, 8
_NODES_PER_S1, _S1_PER_S2 = 16, 8
# Share of S1 switches with two types of GPU.
_MIXED_S1_FRAC = 0.1
# Share of S2 switches with different S1 switches.
_MIXED_S2_FRAC = 0.4
# Share of the GPUs in use already.
_USED_FRAC = 1 / 3
_SERVICES, _GROUPS, _REPLICAS = 500, 4, 2000
_NOW_S = 1000.0
# Nodes that an autoscaler may add below each S1 switch.
_POSSIBLE_PER_S1 = 4
_RATIOS = ("1:3", "1:2", "1:1", "2:1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The replicas that one service wants.

    Attributes:
        priority: the highest is placed first.
        counts: replicas of each role.
        pools: pools of its groups, which have no replicas.
        ratio: prefill to decode replicas.
    """

    priority: int
    counts: dict[Role, int]
    pools: tuple[PoolStats, ...]
    ratio: PdRatio


def cluster(rng: random.Random) -> list[Node]:
    """Nodes under S1 and S2 switches, of three types of GPU, in use here and there."""
    nodes: list[Node] = []
    while len(nodes) < _NODES:
        s2 = f"b{len(nodes) // (_NODES_PER_S1 * _S1_PER_S2)}"
        is_mixed, kind = rng.random() < _MIXED_S2_FRAC, rng.choice(_TYPES)
        for number in range(_S1_PER_S2):
            kinds = [rng.choice(_TYPES) if is_mixed else kind]
            if is_mixed and rng.random() < _MIXED_S1_FRAC / _MIXED_S2_FRAC:
                kinds = rng.sample(_TYPES, 2)
            for _ in range(min(_NODES_PER_S1, _NODES - len(nodes))):
                free = _GPUS_PER_NODE - (rng.randint(1, _GPUS_PER_NODE) if rng.random() < 2 * _USED_FRAC else 0)
                s1 = f"{s2}-m{number}"
                node = Node(
                    name=f"n{len(nodes):04}",
                    labels={"dc": "d", "cluster": "c", "s2": s2, "s1": s1},
                    under=("d", "c", s2, s1, ""),
                    gpu_type=rng.choice(kinds),
                    gpus=_GPUS_PER_NODE,
                    free_gpus=free,
                    cpus=128.0,
                    free_cpus=128.0,
                )
                nodes.append(node)
    return nodes


def requests(nodes: Sequence[Node], rng: random.Random) -> list[Request]:
    """Services of one, two, four or eight GPUs a replica, each with groups under switches that have its types."""
    by_switch: dict[str, dict[str, set[str]]] = {"s1": {}, "s2": {}}
    for node in nodes:
        for level in by_switch:
            by_switch[level].setdefault(node.labels[level], set()).add(node.gpu_type or "")
    made = []
    for number in range(_SERVICES):
        types = {Role.PREFILL: rng.choice(_TYPES)}
        types[Role.DECODE] = rng.choice(_TYPES) if rng.random() < 0.3 else types[Role.PREFILL]
        level = rng.choice(("s1", "s2", "s2"))
        fitting = sorted(name for name, has in by_switch[level].items() if set(types.values()) <= has)
        gpus = {role: rng.choice((1, 2, 4, 8)) for role in Role}
        pools = tuple(
            PoolStats(
                key=PoolKey(f"s{number}-{name}", role),
                replicas=(),
                target_replicas=0,
                held_replicas=0,
                limits=PoolLimits(
                    lowest_replicas=0,
                    highest_replicas=64,
                    demand=Demand(
                        selector={level: name}, gpu_type=types[role], workers=gpus[role], gpus_per_worker=1.0
                    ),
                    affinity=LinkTier.S1 if level == "s1" else LinkTier.S2,
                ),
            )
            for name in rng.sample(fitting, min(_GROUPS, len(fitting)))
            for role in Role
        )
        ratio = PdRatio.parse(rng.choice(_RATIOS))
        counts = ratio.unit()
        made.append(Request(priority=rng.randint(0, 9), counts=counts, pools=pools, ratio=ratio))
    while sum(sum(one.counts.values()) for one in made) < _REPLICAS:
        grown = rng.randrange(len(made))
        of = made[grown]
        counts = {role: of.counts[role] + more for role, more in of.ratio.unit().items()}
        made[grown] = replace(of, counts=counts)
    return sorted(made, key=lambda one: -one.priority)


class FirstFit(Slots):
    """Slots that take the first node by name with enough room."""

    def _best_fit(self, demand: Demand, among: int) -> int | None:
        cpus = demand.workers * demand.cpus_per_worker + demand.cpus_per_replica
        while among:
            lowest = among & -among
            index = lowest.bit_length() - 1
            if self._gpus[index] >= demand.gpus and self._cpus[index] >= cpus:
                return index
            among ^= lowest
        return None


def cycle(nodes: Sequence[Node], wanted: Sequence[Request], kind: type[Slots]) -> tuple[float, Slots, list[Placed]]:
    """Seconds of one cycle, the tree of nodes included; the slots that are left; and the placements."""
    started_s = time.perf_counter()
    slots = kind(Topology(nodes))
    placed = [
        place(
            one.counts,
            {pool.key: 0 for pool in one.pools},
            one.pools,
            one.ratio,
            slots=slots,
        )
        for one in wanted
        if one.pools
    ]
    return time.perf_counter() - started_s, slots, placed


def growing(nodes: Sequence[Node]) -> TopologyConfig:
    """A topology in which Ray's autoscaler may add nodes below each S1 switch."""
    first = {node.labels["s1"]: node for node in nodes}
    types = {
        name: NodeTypeConfig(
            labels=dict(node.labels),
            gpu_type=node.gpu_type,
            gpus=_GPUS_PER_NODE,
            cpus=node.cpus,
            max_nodes=_NODES_PER_S1 + _POSSIBLE_PER_S1,
        )
        for name, node in first.items()
    }
    return TopologyConfig(
        labels=TopologyLabels(data_centre="dc", cluster="cluster", s1="s1", s2="s2"), node_types=types
    )


def whole_cycle(
    nodes: Sequence[Node], wanted: Sequence[Request], topology: TopologyConfig | None = None
) -> tuple[float, int]:
    """Seconds of one cycle as the policy runs it, with controllers, snapshots and claims; and the pending replicas.

    ``topology``: with node types that may be added.
    """
    controllers, snapshots = {}, {}
    for number, one in enumerate(one for one in wanted if one.pools):
        config = {
            "pd_ratio": str(one.ratio),
            "policy": {"kind": "static", "prefill": 1, "decode": 1},
            "override": {"prefill": one.counts[Role.PREFILL], "decode": one.counts[Role.DECODE]},
            "priority": one.priority,
        }
        controllers[f"s{number}"] = Controller(AutoscaleConfig.model_validate(config))
        state = ControllerState(ticked_s=_NOW_S - 5.0, desired={pool.key: 0 for pool in one.pools})
        snapshots[f"s{number}"] = Snapshot(now_s=_NOW_S, pools=one.pools, state=state)
    started_s = time.perf_counter()
    if topology is not None:
        nodes = [*with_savings(topology, nodes), *possible_nodes(topology, nodes, ())]
    decided = tick_all(controllers, snapshots, slots=Slots(Topology(nodes).with_scarcity()))
    return time.perf_counter() - started_s, round(sum(sum(plan.pending.values()) for _, plan in decided.values()))


def nearly_full(nodes: Sequence[Node]) -> list[Node]:
    """The same cluster, with GPUs free on one node of eight."""
    return [replace(node, free_gpus=0.0 if number % 8 else node.free_gpus) for number, node in enumerate(nodes)]


def unusable_frac(slots: Slots, units: Sequence[Sequence[Demand]]) -> float:
    """Share of the free GPUs of groups' domains where the group's own unit does not fit.

    Each domain counts once for each group that lies in it.
    """
    all_gpus = unusable_gpus = 0.0
    for unit in units:
        domain = 0
        for demand in unit:
            domain |= slots.candidates(demand)
        free = slots.free_gpus(domain)
        all_gpus += free
        unusable_gpus += free if slots.fragmented_frac([unit]) == 1.0 else 0.0
    return unusable_gpus / all_gpus if all_gpus else 0.0


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    out: Path = Path("reports/placement_scale.json"),
) -> None:
    """Measure, show and write."""
    console = Console()
    rng = random.Random(0)
    nodes = cluster(rng)
    wanted = requests(nodes, rng)
    may_grow = growing(nodes)
    units = [unit for one in wanted for unit in least_units(one.pools)]
    rows: dict[str, dict[str, Any]] = {}
    taken: dict[str, list[float]] = {"best fit": [], "first fit": []}
    whole: dict[str, list[tuple[float, int]]] = {"as above": [], "nearly full": [], "nearly full, and it may grow": []}
    for _ in range(rounds):  # in turns
        whole["as above"].append(whole_cycle(nodes, wanted))
        whole["nearly full"].append(whole_cycle(nearly_full(nodes), wanted))
        whole["nearly full, and it may grow"].append(whole_cycle(nearly_full(nodes), wanted, may_grow))
        for name, kind in (("best fit", Slots), ("first fit", FirstFit)):
            seconds, slots, placed = cycle(nodes, wanted, kind)
            taken[name].append(seconds)
            rows[name] = {
                "replicas": sum(sum(one.counts.values()) for one in wanted),
                "placed": sum(sum(one.counts.values()) for one in placed),
                "pending": sum(sum(one.pending.values()) for one in placed),
                "fragmented_frac": slots.fragmented_frac(units) or 0.0,
                "unusable_frac": unusable_frac(slots, units),
            }
    for name, all_s in taken.items():
        rows[name]["cycle_s"] = {"median": float(np.median(all_s)), "most": max(all_s)}
    memory_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    table = Table(title=f"{len(nodes)} nodes, {len(wanted)} services")
    for column in ("", "placed", "pending", "no unit\nfits", "its own\nfits not", "cycle\ns", "at most\ns"):
        table.add_column(column, justify="right")
    for name, row in rows.items():
        table.add_row(
            name,
            str(row["placed"]),
            str(row["pending"]),
            f"{row['fragmented_frac']:.1%}",
            f"{row['unusable_frac']:.1%}",
            f"{row['cycle_s']['median']:.2f}",
            f"{row['cycle_s']['most']:.2f}",
        )
    console.print(table)
    for name, taken_s in whole.items():
        median_s, pending = float(np.median([seconds for seconds, _ in taken_s])), taken_s[0][1]
        most_s = max(seconds for seconds, _ in taken_s)
        console.print(
            f"all of a cycle, {name}: {median_s:.2f} s, at most {most_s:.2f}; {pending} pending", highlight=False
        )
    console.print(f"{memory_gb:.2f} GB of memory")
    result = {"machine": platform.platform(), "rows": rows, "whole_cycle_s": whole, "memory_gb": memory_gb}
    write_file(out, json.dumps(result, indent=2) + "\n", "--out")


if __name__ == "__main__":
    typer.run(main)
