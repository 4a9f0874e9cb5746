"""What `tandem topology` and `tandem explain` show of nodes, groups and places (pure)."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from autoscale.config import AutoscaleConfig
from autoscale.controller import Controller
from autoscale.decision_log import NODES, STATE
from autoscale.placement import held_gpus, least_units, place
from autoscale.ratio import PdRatio
from autoscale.slots import Slots
from autoscale.tuning import Pools
from autoscale.types import PoolKey, PoolStats
from autoscale.warm import asked
from kvtransfer.topology import TIERS, LinkTier, Node, NodeSet, Role, SubgroupPriority, Topology

_PRIORITIES = {
    SubgroupPriority.S2_HOMOGENEOUS: "common",
    SubgroupPriority.S2_HETEROGENEOUS: "scarce: GPU types differ under its S2",
    SubgroupPriority.S1_HETEROGENEOUS: "scarcest: GPU types differ under its S1",
}
_LEVELS = {
    LinkTier.DATA_CENTRE: "data centre",
    LinkTier.CLUSTER: "cluster",
    LinkTier.S2: "S2",
    LinkTier.S1: "S1",
    LinkTier.S0: "S0",
}
# What a node is under whose labels do not say.
_UNKNOWN = "?"
Places = Mapping[str, tuple[str, Sequence[str]]]


def nodes_of(status: Mapping[str, Any]) -> list[Node] | None:
    """The nodes of the last decision; ``None`` where nobody looks at nodes."""
    raw = status.get("nodes")
    return None if raw is None else list(NODES.validate_python(raw))


def topology_tree(nodes: Sequence[Node], places: Places) -> Tree:
    """Data centres down to nodes, with GPUs, how many of them are free, and who is there.

    Args:
        nodes: of the cluster.
        places: of each replica its pool and nodes.
    """
    topology = Topology(nodes)
    here: dict[str, list[str]] = {}
    for pool, names in places.values():
        for name in names:
            here.setdefault(name, []).append(pool)
    root = Tree(_summary("Ray cluster", nodes, None), highlight=False)
    branches: dict[tuple[str, ...], Tree] = {(): root}
    for node in sorted(topology.nodes, key=lambda one: (one.under, one.name)):
        # Levels of which no label speaks are left out.
        known = [(tier, name) for tier, name in zip(TIERS, node.under, strict=True) if name]
        above: tuple[str, ...] = ()
        for tier, name in known:
            step = (*above, f"{tier.name}:{name}")
            if step not in branches:
                below = [one for one in topology.nodes if _is_below(one, node, tier)]
                bits = sum(1 << topology.nodes.index(one) for one in below)
                scarcity = topology.priority(bits) if tier <= LinkTier.S2 else None
                branches[step] = branches[above].add(_summary(f"{_LEVELS[tier]} {name}", below, scarcity))
            above = step
        branches[above].add(_node_line(node, here.get(node.name, ())))
    return root


def _is_below(node: Node, other: Node, tier: LinkTier) -> bool:
    depth = TIERS.index(tier) + 1
    return node.under[:depth] == other.under[:depth]


def _summary(name: str, nodes: Sequence[Node], scarcity: SubgroupPriority | None) -> Text:
    types = sorted({node.gpu_type for node in nodes if node.gpu_type is not None})
    gpus = ", ".join(
        f"{sum(n.free_gpus for n in nodes if n.gpu_type == kind):g} of "
        f"{sum(n.gpus for n in nodes if n.gpu_type == kind):g} {kind} free"
        for kind in types
    )
    text = Text(f"{name}: {gpus or 'no GPUs'}")
    if scarcity is not None and types:
        text.append(f" ({_PRIORITIES[scarcity]})", style="yellow" if scarcity else "dim")
    return text


def _node_line(node: Node, pools: Iterable[str]) -> Text:
    gpus = f"{node.free_gpus:g} of {node.gpus:g} {node.gpu_type} free" if node.gpu_type else "no GPU"
    text = Text(f"{_called(node)}: {gpus}, {node.free_cpus:g} of {node.cpus:g} CPUs")
    counted = {pool: list(pools).count(pool) for pool in sorted(pools)}
    if counted:
        text.append("  " + ", ".join(f"{count} {pool}" for pool, count in counted.items()), style="green")
    if node.is_cordoned:
        text.append("  cordoned", style="bold red")
    return text


def cordonable(name: str, nodes: Sequence[Node]) -> str | None:
    """The node, host or switch that is meant: by its name, or a node by the beginning of its id; ``None``: nobody."""
    names = {one for node in nodes for one in (node.name, node.host, *node.under) if one}
    if name in names:
        return name
    begins = [node.name for node in nodes if name and node.name.startswith(name)]
    return begins[0] if len(begins) == 1 else None


def _called(node: Node) -> str:
    return f"{node.host} {node.name[:12]}".strip()


def label_findings(nodes: Sequence[Node]) -> list[str]:
    """What is missing from labels, or contradicts itself."""
    topology = Topology(nodes)
    found = []
    for tier in TIERS:
        known = [node for node in topology.nodes if node.under[TIERS.index(tier)]]
        missing = [node.name[:12] for node in topology.nodes if node.gpu_type and node not in known]
        if known and missing:
            found.append(f"{len(missing)} nodes with GPUs have no {_LEVELS[tier]}, and others have: {_few(missing)}")
    for tier in TIERS[1:]:
        above: dict[str, set[tuple[str, ...]]] = {}
        for names in topology.domains[tier]:
            above.setdefault(names[-1], set()).add(names[:-1])
        for name, paths in above.items():
            if len(paths) > 1:
                where = " and ".join("/".join(part or _UNKNOWN for part in path) for path in sorted(paths))
                found.append(
                    f"{_LEVELS[tier]} {name!r} is under {where}: a selector of that label alone takes nodes of both"
                )
    found += [
        f"node {node.name[:12]} has {node.free_gpus:g} GPUs free of {node.gpus:g}"
        for node in topology.nodes
        if not 0 <= node.free_gpus <= node.gpus
    ]
    found += [f"node {node.name[:12]}: {node.contradiction}" for node in topology.nodes if node.contradiction]
    return found


def fragmentation(nodes: Sequence[Node], pools: Sequence[PoolStats]) -> str | None:
    """How many of the free GPUs are of no use to any group; ``None``: none is free."""
    slots = Slots(Topology(nodes))
    share, free = slots.fragmented_frac(least_units(pools)), slots.free_gpus(slots.topology.everywhere)
    if share is None:
        return None
    return f"of {free:g} free GPUs {share * free:g} lie where no unit of any group fits"


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")


def pools_now(status: Mapping[str, Any], limits: Pools, places: Places) -> list[PoolStats]:
    """The pools of a service as the controller saw them last, with what it should have, warm replicas too."""
    state = STATE.validate_python(status["plan"]["state"])
    desired, leaving = asked(state), {*state.victims, *state.withdrawn}
    controller = Controller(AutoscaleConfig.model_validate(status["config"]))
    pools = [
        PoolStats(
            key=key,
            replicas=(),
            target_replicas=desired.get(key, 0),
            lowest_replicas=limit.lowest_replicas,
            highest_replicas=limit.highest_replicas,
            gpus_per_replica=limit.gpus_per_replica,
            link_tier=limit.link_tier,
            cost=limit.cost,
            demand=limit.demand,
            # Who leaves still has its room.
            held_replicas=sum(pool == str(key) and name not in leaving for name, (pool, _) in places.items()),
            on={name: tuple(nodes) for name, (pool, nodes) in places.items() if pool == str(key)},
            preference=limit.preference,
            affinity=limit.affinity,
            is_preemptible=limit.is_preemptible,
        )
        for key, limit in limits.root.items()
    ]
    return controller.limited(pools, state)


def gpus_left(statuses: Mapping[str, Mapping[str, Any]], service: str, places: Places) -> list[dict[str, float]]:
    """GPUs by type that the application's budget leaves, and the quota of a service."""
    held: dict[str, dict[str, float]] = {}
    for name, status in statuses.items():
        pools = pools_now(status, Pools.model_validate(status["pools"]), places)
        held[name] = held_gpus(pools, {pool.key: pool.target_replicas for pool in pools})
    status = statuses[service]
    budget = ((status.get("topology") or {}).get("budget_gpus")) or {}
    quota = status["config"]["quota_gpus"]
    return [
        {kind: gpus - sum(of.get(kind, 0.0) for of in held.values()) for kind, gpus in budget.items()},
        {kind: gpus - held[service].get(kind, 0.0) for kind, gpus in quota.items()},
    ]


def would_fit(
    pools: Sequence[PoolStats],
    ratio: PdRatio,
    nodes: Sequence[Node],
    more: Mapping[Role, int],
    limits: Sequence[dict[str, float]] = (),
) -> tuple[dict[str, tuple[int, int]], Mapping[Role, int], Mapping[str, str]]:
    """Where so many more replicas would go now, what would be pending, and which groups were passed over and why.

    ``limits``: GPUs by type that budgets leave.
    """
    current = {pool.key: pool.target_replicas for pool in pools}
    counts = {role: sum(n for key, n in current.items() if key.role is role) + more[role] for role in Role}
    placed = place(counts, current, pools, ratio, slots=Slots(Topology(nodes)), limits=[dict(of) for of in limits])
    groups = dict.fromkeys(pool.key.group for pool in pools)
    moved = {key: count - current[key] for key, count in placed.counts.items()}
    gained = {
        group: (moved.get(PoolKey(group, Role.PREFILL), 0), moved.get(PoolKey(group, Role.DECODE), 0))
        for group in groups
    }
    return {group: pair for group, pair in gained.items() if any(pair)}, placed.pending, placed.passed_over


def explain_table(pools: Sequence[PoolStats], nodes: Sequence[Node], places: Places) -> Table:
    """Of each group: what it has, on which nodes, how scarce and how far apart those are, and what it costs."""
    topology = Topology(nodes)
    slots = Slots(topology)
    table = Table(box=None, pad_edge=False)
    for name in ("group", "P", "D", "GPUs", "cost/h", "its nodes", "scarcity", "apart by", "replicas are on"):
        table.add_column(name)
    for group in dict.fromkeys(pool.key.group for pool in pools):
        of = {pool.key.role: pool for pool in pools if pool.key.group == group}
        reach: NodeSet = 0
        for pool in of.values():
            reach |= 0 if pool.demand is None else slots.candidates(pool.demand)
        on = sorted({name[:12] for pool, names in places.values() for name in names if pool.endswith(f":{group}")})
        types = " / ".join(
            f"{pool.gpus_per_replica:g} {pool.demand.gpu_type}"
            for pool in of.values()
            if pool.demand is not None and pool.demand.gpu_type
        )
        tier = topology.tier(reach) if reach else None
        affinity = min(pool.affinity for pool in of.values())
        is_apart = tier is not None and tier > affinity
        table.add_row(
            group,
            *(str(of[role].target_replicas) if role in of else "-" for role in (Role.PREFILL, Role.DECODE)),
            types or "-",
            f"{sum(pool.cost for pool in of.values()):g}",
            str(reach.bit_count()),
            _PRIORITIES[topology.priority(reach)].partition(":")[0] if reach else "-",
            Text(
                "-" if tier is None else tier.name.lower() + (f", beyond {affinity.name.lower()}" if is_apart else ""),
                style="bold red" if is_apart else "",
            ),
            ", ".join(on) or "-",
        )
    return table
