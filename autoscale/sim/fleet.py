"""All replicas of a virtual cluster, each from the request for it until it has gone, and their GPU-hours (pure)."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from autoscale.engines.engine_step import ModelCounters
from autoscale.sim.cluster import VirtualCluster
from autoscale.sim.replica import VirtualReplica
from autoscale.types import PoolKey, PoolLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualPool(PoolLimits):
    """A pool's limits, and the time that a replica takes to start, seconds."""

    start_s: float
    gpus_per_replica: int = 1

    @property
    def cost_per_gpu_hour(self) -> float:
        """Price of a GPU for an hour, in any currency."""
        return self.cost / self.gpus_per_replica


@dataclass(slots=True, eq=False)
class Life:
    """A replica, from the request for it until it has gone.

    Attributes:
        requested_s: time of the request for it, from which on its GPUs count.
        replica: its engine and routers; ``None``: it has not become ready.
        stopped_s: time at which it began to drain, stopped while it started, or died.
        gone_s: time from which on its GPUs do not count.
        work_before: work of its engine until measuring began.
        work_until: work of its engine until measuring ended, including the work before measuring.
    """

    key: PoolKey
    replica_id: str
    requested_s: float
    replica: VirtualReplica | None = None
    ready_s: float | None = None
    stopped_s: float | None = None
    gone_s: float | None = None
    work_before: ModelCounters | None = None
    work_until: ModelCounters | None = None

    @property
    def work(self) -> ModelCounters:
        """Work of its engine while measuring."""
        until = self.work_until
        if until is None:
            until = self.replica.engine.counters if self.replica else ModelCounters()
        return until.since(self.work_before or ModelCounters())

    def present_s(self, from_s: float, until_s: float) -> float:
        """The part of its time, from the request for it until it has gone, that lies between two times; seconds."""
        gone_s = until_s if self.gone_s is None else min(until_s, self.gone_s)
        return max(0.0, gone_s - max(from_s, self.requested_s))

    @property
    def is_stopping(self) -> bool:
        """Whether it has left routing: it drains, or has gone."""
        return self.stopped_s is not None


class Fleet:
    """All replicas of a virtual cluster, past and present."""

    def __init__(
        self, cluster: VirtualCluster, pools: Mapping[PoolKey, VirtualPool], on_ready: Callable[[], None]
    ) -> None:
        """A fleet without replicas; ``on_ready``: called when a replica that ``scale`` has started becomes ready."""
        self.pools = pools
        self.lives: list[Life] = []
        # Replicas that have not gone, by pool, in the order of the requests for them.
        self.here: dict[PoolKey, list[Life]] = {key: [] for key in pools}
        self._cluster = cluster
        self._on_ready = on_ready

    def running(self, key: PoolKey) -> list[Life]:
        """Replicas of a pool that are ready and do not drain, the oldest first."""
        return [life for life in self.here[key] if life.replica is not None and not life.is_stopping]

    def begin(self, key: PoolKey, count: int, requested_s: float | None = None) -> None:
        """Add replicas that are ready at once, as if requested at ``requested_s``; ``None``: now."""
        for _ in range(count):
            self._make_ready(self._request(key, requested_s))

    def scale(self, key: PoolKey, target: int, victims: Iterable[str] = ()) -> None:
        """Start missing replicas, or stop surplus ones in Serve's order: victims, starting ones, the youngest.

        ``victims``: replicas that the plan has chosen to stop.
        """
        working = [life for life in self.here[key] if not life.is_stopping]
        for _ in range(target - len(working)):
            self._start(self._request(key))
        surplus = len(working) - target
        if surplus > 0:
            chosen = set(victims)
            # False comes before True.
            working.sort(key=lambda life: (life.replica_id not in chosen, life.replica is not None, -life.requested_s))
            for life in working[:surplus]:
                self._stop(life)

    def kill(self, life: Life) -> None:
        """Let a running replica die."""
        assert life.replica is not None
        life.stopped_s = self._cluster.now_s
        self._cluster.kill(life.replica)
        self._end(life)

    def begin_measuring(self) -> None:
        """Count engines' work from now on."""
        for life in self.lives:
            if life.replica is not None:
                life.work_before = life.replica.work()

    def end_measuring(self) -> None:
        """Stop counting engines' work."""
        for life in self.lives:
            if life.replica is not None:
                life.work_until = life.replica.work()

    def gpu_hours(self, from_s: float, until_s: float) -> dict[PoolKey, float]:
        """GPU-hours of each pool between two times (s); a replica counts from the request for it until it has gone."""
        hours = dict.fromkeys(self.pools, 0.0)
        for life in self.lives:
            hours[life.key] += life.present_s(from_s, until_s) * self.pools[life.key].gpus_per_replica / 3600.0
        return hours

    def _request(self, key: PoolKey, requested_s: float | None = None) -> Life:
        requested_s = self._cluster.now_s if requested_s is None else requested_s
        life = Life(key, f"{key.role}-{key.group}-{len(self.lives)}", requested_s)
        self.lives.append(life)
        self.here[key].append(life)
        return life

    def _start(self, life: Life) -> None:
        """Let a requested replica become ready after the start time of its pool."""
        self._cluster.at(self._cluster.now_s + self.pools[life.key].start_s, self._become_ready, life)

    def _become_ready(self, life: Life) -> None:
        if not life.is_stopping:  # it was not stopped while it started
            self._make_ready(life)
            self._on_ready()

    def _make_ready(self, life: Life) -> None:
        life.ready_s = self._cluster.now_s
        life.replica = self._cluster.add(life.key, life.replica_id)

    def _stop(self, life: Life) -> None:
        life.stopped_s = self._cluster.now_s
        if life.replica is None:
            self._end(life)
        else:
            self._cluster.drain(life.replica, lambda: self._end(life))

    def _end(self, life: Life) -> None:
        life.gone_s = self._cluster.now_s
        self.here[life.key].remove(life)
