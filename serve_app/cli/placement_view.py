"""What the commands about nodes and places show (pure).

The unit of a group is here one replica of each of its roles. S0, S1 and S2 are the switches above a node, from its
rack's switch upwards. A switch is scarce if nodes of several GPU types are below it. ``kvtransfer.topology`` explains
levels and scarcity. ``places`` is the pool and the nodes of each replica, by replica id.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from autoscale.decide.limits import held_gpus, limited
from autoscale.decide.placement import Placed, place
from autoscale.decide.possible import possible_nodes, refused_types
from autoscale.decide.slots import Slots, least_units
from autoscale.decide.status import ServiceStatus, Status
from autoscale.headcount import standard_replicas
from autoscale.ratio import PdRatio
from autoscale.types import Places, PoolKey, PoolStats
from kvtransfer.topology import TIERS, LinkTier, Node, Path, Role, SubgroupPriority, Topology, path

# Scarcity in words, with the reason after a colon.
_PRIORITIES = {
    SubgroupPriority.S2_HOMOGENEOUS: "common",
    SubgroupPriority.S2_HETEROGENEOUS: "scarce: GPU types differ under its S2",
    SubgroupPriority.S1_HETEROGENEOUS: "scarcest: GPU types differ under its S1",
}
_LEVELS = dict(zip(TIERS, ("data centre", "cluster", "S2", "S1", "S0"), strict=True))
# Shown for a switch above a node that has no label of that level.
_UNKNOWN = "?"


def topology_tree(nodes: Sequence[Node], places: Places) -> Tree:
    """Data centres down to nodes, with their GPUs, how many of them are free, and the replicas on each node."""
    topology = Topology(nodes)
    root = Tree(_summary("Ray cluster", nodes, None), highlight=False)
    branches: dict[Path, Tree] = {}
    for node in sorted(topology.nodes, key=lambda one: (one.under, one.name)):
        branch = root
        for tier in TIERS:
            switch = path(node, tier)
            if switch is None:  # levels without a label are left out
                continue
            if switch not in branches:
                below = topology.domains[tier][switch]  # the set of nodes below the switch
                # Only S1 and S2 switches make a node scarce, so levels above them have no scarcity of their own.
                scarcity = topology.priority(below) if tier <= LinkTier.S2 else None
                title = f"{_LEVELS[tier]} {switch[-1]}"
                branches[switch] = branch.add(_summary(title, list(topology.listed(below)), scarcity))
            branch = branches[switch]
        pools = (str(pool) for pool, names in places.values() for name in names if name == node.name)
        branch.add(_node_line(node, pools))
    return root


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
    name = f"{node.host} {node.name[:12]}".strip()
    text = Text(f"{name}: {gpus}, {node.free_cpus:g} of {node.cpus:g} CPUs")
    if counts := sorted(Counter(pools).items()):
        text.append("  " + ", ".join(f"{count} {pool}" for pool, count in counts), style="green")
    if node.is_leaving:
        text.append("  will be taken away", style="bold red")
    elif node.is_cordoned:
        text.append("  cordoned", style="bold red")
    return text


def cordonable(name: str, nodes: Sequence[Node]) -> str | None:
    """``name`` if a node, host or switch has it; otherwise the id of the only node whose id begins with it.

    ``None``: no id begins with ``name``, or several do.
    """
    names = {one for node in nodes for one in (node.name, node.host, *node.under) if one}
    if name in names:
        return name
    matches = [node.name for node in nodes if name and node.name.startswith(name)]
    return matches[0] if len(matches) == 1 else None


def label_findings(nodes: Sequence[Node]) -> Iterator[str]:
    """Labels that are missing or contradict each other, one line each."""
    topology = Topology(nodes)
    for tier in TIERS:  # levels that some nodes have and others with GPUs lack
        missing = [node.name[:12] for node in topology.nodes if node.gpu_type and path(node, tier) is None]
        if topology.domains[tier] and missing:
            few = ", ".join(missing[:3]) + (" ..." if len(missing) > 3 else "")
            yield f"{len(missing)} nodes with GPUs have no {_LEVELS[tier]}, and others have: {few}"
    for tier in TIERS[1:]:  # names that several switches of one level have
        paths_above: dict[str, list[Path]] = {}
        for names in topology.domains[tier]:
            paths_above.setdefault(names[-1], []).append(names[:-1])
        for name, paths in paths_above.items():
            if len(paths) > 1:
                where = " and ".join("/".join(part or _UNKNOWN for part in names) for names in sorted(paths))
                yield f"{_LEVELS[tier]} {name!r} is under {where}: a selector of that label alone takes nodes of both"
    for node in topology.nodes:
        if not 0 <= node.free_gpus <= node.gpus:
            yield f"node {node.name[:12]} has {node.free_gpus:g} GPUs free of {node.gpus:g}"
    yield from (f"node {node.name[:12]}: {node.contradiction}" for node in topology.nodes if node.contradiction)


def fragmentation(nodes: Sequence[Node], pools: Sequence[PoolStats]) -> str | None:
    """Free GPUs on which no unit of any group fits; ``None``: no GPU is free."""
    slots = Slots(Topology(nodes))
    share, free = slots.fragmented_frac(least_units(pools)), slots.free_gpus(slots.topology.everywhere)
    if share is None:
        return None
    return f"of {free:g} free GPUs {share * free:g} lie where no unit of any group fits"


def nodes_to_come(status: Status, nodes: Sequence[Node], now_s: float) -> list[Node]:
    """The nodes that Ray's autoscaler may add to ``nodes``, without types that did not come in time."""
    if status.topology is None:
        return []
    refused = {
        kind
        for service in status.services.values()
        if service.last is not None
        for kind in refused_types(service.last.plan.state, now_s)
    }
    return possible_nodes(status.topology, nodes, refused)


def type_lines(status: Status, nodes: Sequence[Node], now_s: float) -> Iterator[str]:
    """One line for each node type that Ray's autoscaler may add."""
    kinds = {} if status.topology is None else status.topology.node_types
    more = Counter(node.offer.node_type for node in nodes_to_come(status, nodes, now_s) if node.offer is not None)
    for name, kind in kinds.items():
        until_s = max(
            (s.last.plan.state.refused.get(name, 0.0) for s in status.services.values() if s.last is not None),
            default=0.0,
        )
        what = f"{kind.gpus:g} {kind.gpu_type}" if kind.gpu_type else f"{kind.cpus:g} CPUs"
        rest = f"up to {more[name]} more" if until_s <= now_s else f"none came, next request in {until_s - now_s:.0f} s"
        yield f"node type {name} ({what}): {rest}"


def waits_for(placed: Placed, pools: Iterable[PoolKey], nodes: Iterable[Node]) -> str:
    """The node types for which new replicas of these pools would wait; empty: for none."""
    offers = {node.name: node.offer.node_type for node in nodes if node.offer is not None}
    types = dict.fromkeys(offers[name] for key in pools for name in placed.nodes.get(key, ()) if name in offers)
    return f", on new nodes of type {' and '.join(types)}" if types else ""


def pools_now(service: ServiceStatus, places: Places) -> list[PoolStats]:
    """The pools of a service with the replicas that its last plan wants, warm ones included.

    A warm replica runs, but gets no requests yet.
    """
    assert service.last is not None  # commands come here after the first cycle, which made a plan for every service
    state = service.last.plan.state
    wanted_replicas, leaving = state.desired_and_warm, {*state.victims, *state.withdrawn}
    pools = []
    for key, limits in service.pools.root.items():
        nodes_by_replica = {name: nodes for name, (pool, nodes) in places.items() if pool == key}
        pools.append(
            PoolStats(
                key=key,
                replicas=(),
                target_replicas=wanted_replicas.get(key, 0),
                # Replicas that leave still have their room: they are not counted here, but are in ``on``.
                held_replicas=sum(name not in leaving for name in nodes_by_replica),
                on=nodes_by_replica,
                limits=limits,
            )
        )
    return limited(service.config, pools, state)


def gpus_left(status: Status, name: str) -> list[dict[str, float]]:
    """GPUs by type that two limits leave: the budget of the application, and the quota of the service ``name``.

    A type without a limit is left out.
    """
    held: dict[str, dict[str, float]] = {}  # by service
    for other, service in status.services.items():
        pools = pools_now(service, status.places or {})
        held[other] = held_gpus(pools, {pool.key: pool.target_replicas for pool in pools})
    budget = {} if status.topology is None else status.topology.budget_gpus
    quota = status.services[name].config.quota_gpus
    return [
        {kind: gpus - sum(one.get(kind, 0.0) for one in held.values()) for kind, gpus in budget.items()},
        {kind: gpus - held[name].get(kind, 0.0) for kind, gpus in quota.items()},
    ]


def would_fit(
    pools: Sequence[PoolStats],
    ratio: PdRatio,
    nodes: Sequence[Node],
    more: Mapping[Role, int],
    limits: Sequence[dict[str, float]] = (),
) -> tuple[dict[str, tuple[int, int]], Placed]:
    """Where further replicas would go if they were wanted now.

    Args:
        pools: all pools of a service.
        ratio: P/D ratio that each group keeps.
        nodes: nodes of the cluster.
        more: number of further replicas of each role, in replicas of the first group.
        limits: GPUs by type that each budget leaves.

    Returns:
        Prefill and decode replicas that each group would gain, and the placement, which has the replicas without room.
    """
    current = {pool.key: pool.target_replicas for pool in pools}
    present = standard_replicas(current, pools)
    counts = {role: present[role] + more[role] for role in Role}
    placed = place(counts, current, pools, ratio, slots=Slots(Topology(nodes)), limits=[dict(one) for one in limits])
    gained: dict[str, tuple[int, int]] = {}
    for group in dict.fromkeys(pool.key.group for pool in pools):
        keys = PoolKey(group, Role.PREFILL), PoolKey(group, Role.DECODE)
        prefill, decode = (placed.counts[key] - current[key] if key in placed.counts else 0 for key in keys)
        if prefill or decode:
            gained[group] = (prefill, decode)
    return gained, placed


def explain_table(pools: Sequence[PoolStats], nodes: Sequence[Node], places: Places) -> Table:
    """One row for each group: its counts, its cost, and the nodes that it may be on and is on."""
    slots = Slots(Topology(nodes))
    heads = "group", "P", "D", "GPUs", "cost/h", "its nodes", "scarcity", "apart by", "replicas are on"
    table = Table(*heads, box=None, pad_edge=False)
    for group in dict.fromkeys(pool.key.group for pool in pools):
        roles = {pool.key.role: pool for pool in pools if pool.key.group == group}
        table.add_row(group, *_group_row(roles, slots, places))
    return table


def _group_row(pools: Mapping[Role, PoolStats], slots: Slots, places: Places) -> Iterator[str | Text]:
    """The cells of a group, in the order of the heads of ``explain_table`` after the first; ``pools``: its pools."""
    topology = slots.topology
    # The set of nodes that a replica of any role may be on.
    reach = slots.candidates_of_any(pool.demand for pool in pools.values())
    keys = {pool.key for pool in pools.values()}
    types = [
        f"{pool.limits.gpus_per_replica:g} {'+'.join(pool.demand.gpus_by_type())}"
        for pool in pools.values()
        if pool.demand is not None and pool.demand.gpus_by_type()
    ]
    for role in (Role.PREFILL, Role.DECODE):
        yield str(pools[role].target_replicas) if role in pools else "-"
    yield " / ".join(types) or "-"
    yield f"{sum(pool.limits.cost for pool in pools.values()):g}"
    yield str(reach.bit_count())  # number of nodes: ``reach`` has one bit for each
    yield _PRIORITIES[topology.priority(reach)].partition(":")[0] if reach else "-"  # without the reason
    yield _apart(topology.tier(reach), min(pool.limits.affinity for pool in pools.values())) if reach else "-"
    yield ", ".join(sorted({name[:12] for key, names in places.values() for name in names if key in keys})) or "-"


def _apart(tier: LinkTier, affinity: LinkTier) -> Text:
    """``tier``, the lowest level that all nodes of a group share; red if it is above the group's affinity."""
    if tier > affinity:
        return Text(f"{tier.name.lower()}, beyond {affinity.name.lower()}", style="bold red")
    return Text(tier.name.lower())
