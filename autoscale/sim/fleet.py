"""Replicas of a virtual cluster from asked for to gone, and the GPU-hours that they cost (pure)."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from autoscale.engine_model import ModelCounters
from autoscale.sim.cluster import VirtualCluster, VirtualReplica
from autoscale.sim.nodes import VirtualNodes
from autoscale.slots import Demand
from autoscale.types import PoolKey
from kvtransfer.topology import LinkTier, Node


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualPool:
    """One pool as it is declared: its limits, and how long a replica takes from asked for to ready, seconds.

    ``cost``: of a replica for an hour. ``demand``, ``affinity`` and ``preference`` as in ``PoolStats``, where the
    cluster has nodes.
    """

    lowest_replicas: int
    highest_replicas: int
    start_s: float
    gpus_per_replica: int = 1
    link_tier: LinkTier = LinkTier.S2
    cost: float = 0.0
    demand: Demand | None = None
    affinity: LinkTier = LinkTier.NONE
    preference: int = 0


@dataclass(slots=True, eq=False)
class Life:
    """A replica from asked for to gone."""

    key: PoolKey
    replica_id: str
    asked_s: float
    node: Node | None = None
    replica: VirtualReplica | None = None
    ready_s: float | None = None
    stopped_s: float | None = None
    gone_s: float | None = None
    before: ModelCounters | None = None  # what its engine had done when measuring began
    until: ModelCounters | None = None  # and when it ended

    @property
    def work(self) -> ModelCounters:
        """What its engine did while it was measured."""
        done = self.until or (self.replica.engine.counters if self.replica else ModelCounters())
        return done.since(self.before or ModelCounters())

    @property
    def is_stopping(self) -> bool:
        """Whether it was told to stop."""
        return self.stopped_s is not None


class Fleet:
    """All replicas of a virtual cluster, past and present."""

    def __init__(
        self,
        cluster: VirtualCluster,
        pools: Mapping[PoolKey, VirtualPool],
        on_ready: Callable[[], None],
        nodes: VirtualNodes | None = None,
    ) -> None:
        """No replicas yet.

        Args:
            cluster: where they run.
            pools: what each pool allows and takes.
            on_ready: called when one that was asked for has become ready.
            nodes: where they must find room; ``None``: there is always some.
        """
        self.pools = pools
        self.nodes = nodes
        # Of each pool the nodes that new replicas may be on, where that is said.
        self.allowed: dict[PoolKey, Collection[str] | None] = {}
        self.lives: list[Life] = []
        # All that have not gone, in the order in which they were asked for.
        self.here: dict[PoolKey, list[Life]] = {key: [] for key in pools}
        self._cluster = cluster
        self._on_ready = on_ready

    def running(self, key: PoolKey) -> list[Life]:
        """Ready and not told to stop, oldest first."""
        return [life for life in self.here[key] if life.replica is not None and not life.is_stopping]

    def begin(self, key: PoolKey, count: int, asked_s: float | None = None) -> None:
        """Replicas that are ready at once, as if they had been asked for then; without it, just now."""
        for _ in range(count):
            life = self._ask_for(key)
            if asked_s is not None:
                life.asked_s = asked_s
            if self._has_room(life):
                self._make_ready(life)

    def scale(self, key: PoolKey, target: int, victims: Iterable[str] = ()) -> None:
        """Ask for what is missing; stop what is too much.

        As Serve does: first who was chosen, then who has not started yet, then the youngest.
        """
        working = [life for life in self.here[key] if not life.is_stopping]
        for _ in range(target - len(working)):
            self._start(self._ask_for(key))
        surplus = len(working) - target
        if surplus > 0:
            chosen = set(victims)
            working.sort(key=lambda life: (life.replica_id not in chosen, life.replica is not None, -life.asked_s))
            for life in working[:surplus]:
                self._stop(life)

    def waiting(self) -> list[Life]:
        """Those that have found no room yet."""
        return [] if self.nodes is None else [life for of in self.here.values() for life in of if life.node is None]

    def find_room(self) -> None:
        """Let those that wait for room look for it again."""
        for life in self.waiting():
            self._start(life)

    def kill(self, life: Life) -> None:
        """Let a running replica die."""
        assert life.replica is not None
        life.stopped_s = self._cluster.now_s
        self._cluster.kill(life.replica)
        self._end(life)

    def begin_measuring(self) -> None:
        """What engines did before now does not count."""
        for life in self.lives:
            if life.replica is not None:
                life.before = self._cluster.work(life.replica)

    def end_measuring(self) -> None:
        """Nor what they do from now on."""
        for life in self.lives:
            if life.replica is not None:
                life.until = self._cluster.work(life.replica)

    def gpu_hours(self, from_s: float, until_s: float) -> dict[PoolKey, float]:
        """What each pool's replicas took between two times, from asked for to gone."""
        hours = dict.fromkeys(self.pools, 0.0)
        for life in self.lives:
            gone_s = until_s if life.gone_s is None else min(until_s, life.gone_s)
            taken_s = max(0.0, gone_s - max(from_s, life.asked_s)) if self._has_taken(life) else 0.0
            hours[life.key] += taken_s * self.pools[life.key].gpus_per_replica / 3600.0
        return hours

    def _has_taken(self, life: Life) -> bool:
        """Whether it holds GPUs."""
        return self.nodes is None or self.pools[life.key].demand is None or life.node is not None

    def _ask_for(self, key: PoolKey) -> Life:
        life = Life(key, f"{key.role}-{key.group}-{len(self.lives)}", self._cluster.now_s)
        self.lives.append(life)
        self.here[key].append(life)
        return life

    def _start(self, life: Life) -> None:
        if self._has_room(life):
            self._cluster.at(self._cluster.now_s + self.pools[life.key].start_s, self._become_ready, life)

    def _has_room(self, life: Life) -> bool:
        """Whether it has room, or has just found some."""
        demand = self.pools[life.key].demand
        if self.nodes is None or demand is None:
            return True
        if life.node is None:
            life.node = self.nodes.take(demand, self.allowed.get(life.key))
        return life.node is not None

    def _become_ready(self, life: Life) -> None:
        if not life.is_stopping:
            self._make_ready(life)
            self._on_ready()

    def _make_ready(self, life: Life) -> None:
        life.ready_s = self._cluster.now_s
        life.replica = self._cluster.add(life.key, life.replica_id, () if life.node is None else life.node.under)

    def _stop(self, life: Life) -> None:
        life.stopped_s = self._cluster.now_s
        if life.replica is None:
            self._end(life)
        else:
            self._cluster.drain(life.replica, lambda: self._end(life))

    def _end(self, life: Life) -> None:
        life.gone_s = self._cluster.now_s
        self.here[life.key].remove(life)
        demand = self.pools[life.key].demand
        if self.nodes is not None and life.node is not None and demand is not None:
            self.nodes.give_back(life.node.name, demand)
