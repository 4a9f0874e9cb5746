"""The gain from placement by topology and from two GPU types: ``make bench-hetero``, simulated.

``where`` runs one service on a cluster of mixed switches, at the same counts with topology (a group under each S1
switch) and without (one group, on any nodes with room). KV between switches moves a fifth slower (HeteroScale section
1) and shares their uplinks, which other applications use more and more.
``which`` finds the cheapest fixed counts that meet one objective: with H100s, with A100s, and with prompts on H100s and
answers on A100s (HeteroScale section 1 cites 41 % more cost per token for one type).
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.placement import place
from autoscale.decide.slots import Slots
from autoscale.engines.profile import EngineProfile
from autoscale.policies.static import StaticConfig
from autoscale.ratio import PdRatio
from autoscale.report import Slo
from autoscale.sim.fleet import VirtualPool
from autoscale.sim.scenario import Run, Scenario, unloaded_ttft_s
from autoscale.traces.trace import TraceRequest, load_trace, scale_rate
from autoscale.types import Demand, PoolKey, PoolLimits, PoolStats
from kvtransfer.labels import DEFAULT_LABELS
from kvtransfer.topology import LinkTier, Node, Role, SubgroupPriority, Topology
from router.config import RouterConfig
from serve_app.output import write_file
from tests.lab.stand.fixed_counts import ROOT
from tests.lab.stand.placed import run_placed
from tests.lab.stand.static_search import StaticSearch

_CONFIGS = ROOT / "configs"
_PROFILES = {kind: _CONFIGS / f"profiles/{kind.lower()}_llama2_70b_tp4.json" for kind in ("H100", "A100")}
_TRACE = _CONFIGS / "traces/azure_conv_600s.csv.gz"
_GPUS, _GPUS_PER_NODE, _NODES_PER_S1 = 4, 8, 4
# (S2 switch, S1 switch) -> types of its nodes: an S2 of H100s, an S2 with two different S1s, an S2 with mixed S1s.
_SWITCHES = {
    ("b0", "b0-m0"): ("H100",) * 4,
    ("b0", "b0-m1"): ("H100",) * 4,
    ("b1", "b1-m0"): ("H100",) * 4,
    ("b1", "b1-m1"): ("A100",) * 4,
    ("b2", "b2-m0"): ("H100", "H100", "A100", "A100"),
    ("b2", "b2-m1"): ("H100", "H100", "A100", "A100"),
}
# Share of the nodes of which other applications use half.
_HALF_FRAC = 0.4
_COUNTS = {Role.PREFILL: 4, Role.DECODE: 8}
_RATIO = PdRatio(1, 2)
_WHERE_RATE_SCALE = 6.0
# Free part of a switch's uplink, bytes/s: all of it (400 Gbit/s for each pair of its 32 GPUs), and less.
_UPLINKS_BYTES_PER_S = (100e9, 25e9, 10e9, 5e9)
_SEEDS = range(5)
# Objective of Splitwise (ISCA 2024): TTFT as a multiple of an idle A100's.
_TTFT_FACTOR = 3.0
# TBT as a multiple of an idle A100's.
_TPOT_FACTOR = 1.5
# Share of requests that must meet both.
_ATTAINMENT_FRAC = 0.9
# H100 price / A100 price: in 2026 clouds ask 1.6 to 1.8 times as much (pricegpu.pages.dev/blog/h100-vs-a100-cloud-price
# and jarvislabs.ai/blog/h100-vs-a100, from which the A100's price is).
_PRICE_RATIOS = (1.25, 1.5, 1.65, 1.8, 2.0, 2.5, 3.0)
_A100_PER_HOUR = 1.49
_WHICH_RATE_SCALE = 4.0
_MOST_REPLICAS = 60
_HARDWARE = {
    "H100 both": {Role.PREFILL: "H100", Role.DECODE: "H100"},
    "A100 both": {Role.PREFILL: "A100", Role.DECODE: "A100"},
    "H100 prefill, A100 decode": {Role.PREFILL: "H100", Role.DECODE: "A100"},
    "A100 prefill, H100 decode": {Role.PREFILL: "A100", Role.DECODE: "H100"},
}
_ROUTER = RouterConfig()


def slos(trace: Sequence[TraceRequest], slowest: EngineProfile) -> list[Slo]:
    """The objective of each request, by its times on idle engines of the slower type."""
    engines = dict.fromkeys(Role, slowest)
    alone_s = {n: unloaded_ttft_s(n, engines, _ROUTER) for n in {request.input_tokens for request in trace}}
    step_s = slowest.decode.seconds_for(1, 1024)
    return [Slo(ttft_s=_TTFT_FACTOR * alone_s[request.input_tokens], tpot_s=_TPOT_FACTOR * step_s) for request in trace]


def nodes(rng: random.Random) -> list[Node]:
    """The cluster; other applications use half of some nodes."""
    made = []
    for (s2, s1), types in _SWITCHES.items():
        for number, kind in enumerate(types):
            used_gpus = _GPUS if rng.random() < _HALF_FRAC else 0
            node = Node(
                name=f"{s1}-n{number}",
                labels={DEFAULT_LABELS.s2: s2, DEFAULT_LABELS.s1: s1},
                under=("d0", "c0", s2, s1, ""),
                gpu_type=kind,
                gpus=_GPUS_PER_NODE,
                free_gpus=_GPUS_PER_NODE - used_gpus,
                cpus=128.0,
                free_cpus=128.0,
            )
            made.append(node)
    return made


def pools(kinds: Mapping[Role, str], switches: Sequence[str | None], start_s: float) -> dict[PoolKey, VirtualPool]:
    """A group under each of these switches; ``None``: one group on any node with its GPU types."""
    made = {}
    for switch in switches:
        selector = {} if switch is None else {DEFAULT_LABELS.s1: switch}
        for role in Role:
            demand = Demand(selector=selector, gpu_type=kinds[role], workers=_GPUS, gpus_per_worker=1.0)
            made[PoolKey(switch or "anywhere", role)] = VirtualPool(
                lowest_replicas=0,
                highest_replicas=_MOST_REPLICAS,
                start_s=start_s,
                gpus_per_replica=_GPUS,
                link_tier=LinkTier.S2 if switch is None else LinkTier.S1,
                demand=demand,
                affinity=LinkTier.NONE if switch is None else LinkTier.S1,
            )
    return made


def where(
    trace: Sequence[TraceRequest], objectives: Sequence[Slo], uplink_bytes_per_s: float, seed: int
) -> dict[str, dict[str, float]]:
    """One service with and without topology, at the same counts on the same cluster."""
    profile = EngineProfile.load(_PROFILES["H100"])
    free = nodes(random.Random(seed))
    homogeneous = [s1 for (_, s1), types in _SWITCHES.items() if "H100" in types]
    rows = {}
    for name, switches in (("aware", homogeneous), ("agnostic", [None])):
        of = pools(dict.fromkeys(Role, "H100"), switches, profile.start_s)
        policy = StaticConfig(prefill=_COUNTS[Role.PREFILL], decode=_COUNTS[Role.DECODE])
        scenario = Scenario(
            trace=trace,
            slos=objectives,
            profiles=dict.fromkeys(of, profile),
            pools=of,
            router=_ROUTER,
            seed=seed,
            warm_up_s=2 * profile.start_s,
        )
        config = AutoscaleConfig(pd_ratio=_RATIO, policy=policy)
        first = place(_COUNTS, dict.fromkeys(of, 0), _stats(of), _RATIO, slots=Slots(Topology(free))).counts
        run, placed = run_placed(
            scenario, config, first, free, switch_uplink_bytes_per_s=uplink_bytes_per_s, sees_nodes=name == "aware"
        )
        rows[name] = _where_row(run, free, placed)
    return rows


def _where_row(run: Run, free: Sequence[Node], placed: Mapping[str, Node]) -> dict[str, float]:
    """Figures of a run, and of the GPUs that it leaves free; ``placed``: the node of each replica."""
    lives = [life for life in run.fleet.lives if life.replica_id in placed and life.gone_s is None]
    taken: dict[str, int] = {}
    for life in lives:
        name = placed[life.replica_id].name
        taken[name] = taken.get(name, 0) + _GPUS
    remaining = [replace(node, free_gpus=node.free_gpus - taken.get(node.name, 0)) for node in free]
    topology = Topology(remaining)
    scarce = topology.subgroups[SubgroupPriority.S1_HETEROGENEOUS]
    waited = [record.ttft_s for record in run.measured if record.ttft_s is not None]
    return {
        "replicas": len(lives),
        "ttft_p50_s": float(np.quantile(waited, 0.5)),
        "ttft_p90_s": float(np.quantile(waited, 0.9)),
        "attainment_frac": run.attainment_frac,
        "scarce_gpus_free": sum(node.free_gpus for node in topology.listed(scarce)),
        "mixed_units_left": _mixed_units(remaining),
    }


def _mixed_units(remaining: Sequence[Node]) -> int:
    """Units that still fit of a service with prefill on H100s and decode on A100s under one S1 switch."""
    of = pools({Role.PREFILL: "H100", Role.DECODE: "A100"}, [s1 for _, s1 in _SWITCHES], 0.0)
    wanted = dict.fromkeys(Role, _MOST_REPLICAS)
    placed = place(wanted, dict.fromkeys(of, 0), _stats(of), PdRatio(1, 1), slots=Slots(Topology(remaining)))
    return sum(count for key, count in placed.counts.items() if key.role is Role.PREFILL)


def _stats(of: Mapping[PoolKey, VirtualPool]) -> list[PoolStats]:
    """Pools that have no replica."""
    return [
        PoolStats(
            key=key,
            replicas=(),
            target_replicas=0,
            held_replicas=0,
            limits=PoolLimits(
                lowest_replicas=0, highest_replicas=pool.highest_replicas, demand=pool.demand, affinity=pool.affinity
            ),
        )
        for key, pool in of.items()
    ]


def which(trace: Sequence[TraceRequest], objectives: Sequence[Slo]) -> dict[str, list[tuple[int, int]]]:
    """For each choice of GPU types: pairs of counts that meet the objective, of which neither count can be reduced."""
    profiles = {kind: EngineProfile.load(path) for kind, path in _PROFILES.items()}
    edges = {}
    for name, kinds in _HARDWARE.items():
        search = StaticSearch(
            trace,
            objectives,
            {role: profiles[kinds[role]] for role in Role},
            router=_ROUTER,
            highest_replicas=_MOST_REPLICAS,
        )
        edges[name] = edge(search)
    return edges


def edge(search: StaticSearch) -> list[tuple[int, int]]:
    """The fewest decode replicas for each count of prefill, until more prefill saves no decode replicas."""
    found: list[tuple[int, int]] = []
    decode, idle = _MOST_REPLICAS, 0
    for prefill in range(1, _MOST_REPLICAS + 1):
        if search.counts(prefill, decode).attainment_frac < _ATTAINMENT_FRAC:
            continue
        before = decode
        while decode > 1 and search.counts(prefill, decode - 1).attainment_frac >= _ATTAINMENT_FRAC:
            decode -= 1
        if not found or decode < before:
            found.append((prefill, decode))
            idle = 0
        else:
            idle += 1
        if found and idle == 3:
            break
    return found


def cost_per_million(
    pairs: Sequence[tuple[int, int]], kinds: Mapping[Role, str], price_ratio: float, tokens_per_hour: float
) -> tuple[float, tuple[int, int]] | None:
    """The cheapest of these counts, dollars for a million output tokens; ``None``: none meets the objective."""
    price = {"H100": _A100_PER_HOUR * price_ratio * _GPUS, "A100": _A100_PER_HOUR * _GPUS}
    priced = [
        ((p * price[kinds[Role.PREFILL]] + d * price[kinds[Role.DECODE]]) / tokens_per_hour * 1e6, (p, d))
        for p, d in pairs
    ]
    return min(priced, default=None)


def main(
    out: Annotated[Path, typer.Option("--json", help="Write the figures here.")] = Path("reports/hetero.json"),
) -> None:
    """Simulate, show and write."""
    console = Console()
    trace = load_trace(_TRACE)
    slowest = EngineProfile.load(_PROFILES["A100"])
    busy = scale_rate(trace, _WHERE_RATE_SCALE, random.Random(0))
    objectives = slos(busy, slowest)
    rows: list[dict[str, Any]] = []
    for uplink_bytes_per_s in _UPLINKS_BYTES_PER_S:
        runs = [where(busy, objectives, uplink_bytes_per_s, seed) for seed in _SEEDS]
        for name in runs[0]:
            medians = {key: float(np.median([run[name][key] for run in runs])) for key in runs[0][name]}
            rows.append({"placement": name, "uplink_bytes_per_s": uplink_bytes_per_s, **medians})
    console.print(_where_table(rows))
    load = scale_rate(trace, _WHICH_RATE_SCALE, random.Random(0))
    hours = load[-1].at_s / 3600.0
    tokens_per_hour = sum(request.output_tokens for request in load) / hours
    edges = which(load, slos(load, slowest))
    costs = [
        {"hardware": name, "price_ratio": ratio, "cost_per_million_tokens": found[0], "counts": found[1]}
        for ratio in _PRICE_RATIOS
        for name, pairs in edges.items()
        if (found := cost_per_million(pairs, _HARDWARE[name], ratio, tokens_per_hour)) is not None
    ]
    console.print(_which_table(costs))
    result = {"trace": _TRACE.name, "where": rows, "edges": edges, "which": costs}
    write_file(out, json.dumps(result, indent=1) + "\n", "--json")


def _where_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Scarce GPUs: free ones under S1 switches with two types, and units of a service of two types that still fit."""
    table = Table(title="Where: the same counts, by topology or not; medians of five clusters", title_justify="left")
    for column in ("uplink\nGB/s", "placed", "TTFT\np50 s", "TTFT\np90 s", "within", "scarce\nGPUs", "mixed\nunits"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            f"{row['uplink_bytes_per_s'] / 1e9:g}",
            row["placement"],
            f"{row['ttft_p50_s']:.3f}",
            f"{row['ttft_p90_s']:.3f}",
            f"{row['attainment_frac']:.2%}",
            f"{row['scarce_gpus_free']:g}",
            f"{row['mixed_units_left']:g}",
        )
    return table


def _which_table(costs: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="Which: dollars for a million output tokens, and replicas P:D", title_justify="left")
    table.add_column("H100 /\nA100")
    for name in _HARDWARE:
        table.add_column(name.replace(", ", ",\n").replace(" both", "\nboth"), justify="right")
    for ratio in _PRICE_RATIOS:
        of = {cost["hardware"]: cost for cost in costs if cost["price_ratio"] == ratio}
        cells = [
            f"{of[name]['cost_per_million_tokens']:.2f} ({of[name]['counts'][0]}:{of[name]['counts'][1]})"
            if name in of
            else "-"
            for name in _HARDWARE
        ]
        table.add_row(f"{ratio:g}", *cells)
    return table


if __name__ == "__main__":
    typer.run(main)
