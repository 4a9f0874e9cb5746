"""A virtual cluster on nodes: a replica is placed as Ray places it, and KV between switches shares their uplinks."""

import random
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.controller import Controller
from autoscale.sim.cluster import VirtualCluster
from autoscale.sim.fleet import Fleet, Life, VirtualPool
from autoscale.sim.replica import VirtualReplica
from autoscale.sim.scenario import Run, Scenario, run_serve
from autoscale.sim.serve import VirtualServe
from autoscale.types import Demand, Plan, PoolKey, Snapshot
from kvtransfer.cost import CROSS_SWITCH_FRAC, Wire, transfer_end_s
from kvtransfer.selectors import matches
from kvtransfer.topology import TIERS, LinkTier, Node, Path

# GPUs; smaller differences are rounding.
_EPSILON = 1e-6


class VirtualNodes:
    """The nodes of a virtual cluster.

    Args:
        nodes: their free GPUs leave out what others hold.
        rng: chooses between nodes that are equally full, as the random ids of Ray's nodes do.
    """

    def __init__(self, nodes: Iterable[Node], rng: random.Random) -> None:
        self._nodes = {node.name: node for node in nodes}
        self._rng = rng

    def now(self) -> tuple[Node, ...]:
        """All nodes with their free GPUs."""
        return tuple(self._nodes.values())

    def take(self, demand: Demand, allowed: Collection[str] | None = None) -> Node | None:
        """Place a replica on the fullest node that has room; ``None``: no node has.

        ``allowed``: names of the nodes that it may be on; ``None``: every node with the demanded labels and GPU type.
        """
        fitting = [node for node in self._nodes.values() if _has_room(node, demand)]
        if allowed is not None:
            fitting = [node for node in fitting if node.name in allowed]
        if not fitting:
            return None
        least = min(node.free_gpus for node in fitting)
        node = self._rng.choice([node for node in fitting if node.free_gpus <= least + _EPSILON])
        self._change(node.name, -demand.gpus)
        return node

    def give_back(self, name: str, demand: Demand) -> None:
        """Free the GPUs of a replica that has left its node."""
        self._change(name, demand.gpus)

    def _change(self, name: str, gpus: float) -> None:
        node = self._nodes[name]
        self._nodes[name] = replace(node, free_gpus=node.free_gpus + gpus)


def _has_room(node: Node, demand: Demand) -> bool:
    is_type = demand.gpu_type is None or node.gpu_type == demand.gpu_type
    is_selected = all(matches(node.labels.get(key), wanted) for key, wanted in demand.selector.items())
    return is_type and is_selected and not node.is_cordoned and node.free_gpus >= demand.gpus - _EPSILON


class SwitchedCluster(VirtualCluster):
    """A cluster whose transfers out of, or into, an S1 switch share ``switch_uplink_bytes_per_s`` each way."""

    switch_uplink_bytes_per_s: float

    def __init__(self, scenario: Scenario, config: AutoscaleConfig, switch_uplink_bytes_per_s: float) -> None:
        """The scenario's cluster without replicas."""
        super().__init__(scenario.profiles, scenario.router, random.Random(scenario.seed), slo=config.slo)
        self.switch_uplink_bytes_per_s = switch_uplink_bytes_per_s
        # The S1 switch of each replica.
        self.switches: dict[str, Path] = {}
        self._switch_uplinks: dict[tuple[Path, bool], Wire] = {}

    def _kv_arrival_s(self, tokens: int, prefill: VirtualReplica, decode: VirtualReplica) -> float:
        source, target = self.switches[prefill.replica_id], self.switches[decode.replica_id]
        if source == target:
            return super()._kv_arrival_s(tokens, prefill, decode)
        handoff = prefill.engine.profile.handoff
        size_bytes = tokens * handoff.kv_bytes_per_token
        size_bytes /= CROSS_SWITCH_FRAC  # the cards are busy longer, as the bandwidth is lower
        wires = [prefill.card, decode.card, self._uplink(source, is_out=True), self._uplink(target, is_out=False)]
        return transfer_end_s(self.now_s, size_bytes, handoff.base_s, wires)

    def _uplink(self, switch: Path, *, is_out: bool) -> Wire:
        """The wire from an S1 switch to the other switches, or back."""
        return self._switch_uplinks.setdefault((switch, is_out), Wire(self.switch_uplink_bytes_per_s))


class PlacedFleet(Fleet):
    """Replicas that must find room on nodes; one without a node waits for it, and counts in GPU-hours."""

    def __init__(
        self,
        cluster: SwitchedCluster,
        pools: Mapping[PoolKey, VirtualPool],
        on_ready: Callable[[], None],
        nodes: VirtualNodes,
    ) -> None:
        """No replicas yet."""
        super().__init__(cluster, pools, on_ready)
        self._switches = cluster.switches
        self.nodes = nodes
        # The node of each replica that has one.
        self.placed: dict[str, Node] = {}
        # The nodes that a pool's new replicas may be on; None, or no entry: all that fit.
        self.allowed: dict[PoolKey, Collection[str] | None] = {}

    def find_room(self) -> None:
        """Look again for nodes for the replicas that have none."""
        for life in [each for lives in self.here.values() for each in lives if each.replica_id not in self.placed]:
            self._start(life)

    def _start(self, life: Life) -> None:
        if self._has_room(life):
            super()._start(life)

    def _make_ready(self, life: Life) -> None:
        if self._has_room(life):
            self._switches[life.replica_id] = self.placed[life.replica_id].under[: TIERS.index(LinkTier.S1) + 1]
            super()._make_ready(life)

    def _has_room(self, life: Life) -> bool:
        """Whether a replica has a node, or finds one now."""
        if life.replica_id not in self.placed:
            node = self.nodes.take(self._demand(life.key), self.allowed.get(life.key))
            if node is None:
                return False
            self.placed[life.replica_id] = node
        return True

    def _end(self, life: Life) -> None:
        super()._end(life)
        if life.replica_id in self.placed:
            self.nodes.give_back(self.placed[life.replica_id].name, self._demand(life.key))

    def _demand(self, key: PoolKey) -> Demand:
        demand = self.pools[key].demand
        assert demand is not None
        return demand


class PlacedServe(VirtualServe):
    """The shell around a cluster on nodes."""

    fleet: PlacedFleet

    def __init__(
        self,
        cluster: SwitchedCluster,
        controller: Controller,
        scenario: Scenario,
        nodes: VirtualNodes,
        sees_nodes: bool,
    ) -> None:
        """``sees_nodes``: whether the controller places replicas by these nodes; else only Ray does."""
        super().__init__(cluster, controller, scenario.pools, decides_from_s=scenario.warm_up_s)
        self.fleet = PlacedFleet(cluster, scenario.pools, self._decide, nodes)
        self._sees_nodes = sees_nodes

    def _snapshot(self) -> Snapshot:
        snapshot, fleet = super()._snapshot(), self.fleet
        if not self._sees_nodes:
            unplaced = (replace(each, limits=replace(each.limits, demand=None)) for each in snapshot.pools)
            return replace(snapshot, pools=tuple(unplaced))
        pools = tuple(
            replace(
                each,
                held_replicas=sum(
                    life.replica_id in fleet.placed and not life.is_stopping for life in fleet.here[each.key]
                ),
            )
            for each in snapshot.pools
        )
        return replace(snapshot, pools=pools, nodes=fleet.nodes.now())

    def _follow(self, plan: Plan) -> None:
        self.fleet.allowed |= {key: names or None for key, names in plan.nodes.items()}
        self.fleet.find_room()
        super()._follow(plan)


def run_placed(
    scenario: Scenario,
    config: AutoscaleConfig,
    counts: Mapping[PoolKey, int],
    nodes: Iterable[Node],
    *,
    switch_uplink_bytes_per_s: float,
    sees_nodes: bool,
) -> tuple[Run, Mapping[str, Node]]:
    """A scenario under the controller on these nodes, with the GPUs that others hold; and the node of each replica.

    Args:
        scenario: with a demand for every pool.
        config: of the controller.
        counts: the ready replicas of each pool that it begins with.
        nodes: where replicas must find room.
        switch_uplink_bytes_per_s: bandwidth, each way, that all transfers out of or into an S1 switch share.
        sees_nodes: whether the controller places replicas by these nodes; else only Ray does.
    """
    cluster = SwitchedCluster(scenario, config, switch_uplink_bytes_per_s)
    cluster.submit(scenario.trace)
    room = VirtualNodes(nodes, random.Random(scenario.seed))
    serve = PlacedServe(cluster, Controller(config), scenario, room, sees_nodes)
    return run_serve(scenario, serve, counts), serve.fleet.placed
