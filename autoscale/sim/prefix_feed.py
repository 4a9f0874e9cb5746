"""What the routers of a virtual cluster learn of the replicas' caches, and when (pure)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from autoscale.engines.profile import EngineProfile
from autoscale.sim.clock import Clock
from autoscale.sim.replica import VirtualReplica
from autoscale.types import PoolKey
from router.config import PrefixConfig
from router.prefix_map import PrefixMap
from router.prompt_keys import PromptKeys


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What routers see of the cluster.

    Attributes:
        endpoint_routers: routers that share the endpoint's requests, each of which gets them in turn.
        report_delay_s: time after which replicas' reports are at the routers, seconds: of the prompts that they have
            accepted, and of the blocks that they store and remove. ``None``: there are no reports, and a router knows
            only what it has sent.
        is_shared: whether all routers to a pool know what any of them has sent. No live router does; with a delay of 0
            they then are an oracle.
    """

    endpoint_routers: int = 1
    report_delay_s: float | None = 0.1  # as the live reports
    is_shared: bool = False


@dataclass(slots=True, eq=False)
class _Pool:
    """The replicas of a pool that report, and the maps of the routers to them."""

    replicas: dict[str, VirtualReplica] = field(default_factory=dict)
    maps: list[PrefixMap] = field(default_factory=list)


class PrefixFeed:
    """Gives routers their maps, and tells these of the replicas' changes."""

    def __init__(self, clock: Clock, sight: Sight, config: PrefixConfig, block_tokens: int) -> None:
        """``block_tokens``: tokens in each block of the replicas' caches."""
        self._clock, self._sight, self._config, self._block_tokens = clock, sight, config, block_tokens
        self._pools: dict[PoolKey, _Pool] = {}

    def router_map(self, key: PoolKey, profile: EngineProfile) -> PrefixMap:
        """The map of a new router to a pool, which has all reports up to now; ``profile``: of the pool's engines."""
        pool = self._pools.setdefault(key, _Pool())
        if self._sight.is_shared and pool.maps:
            return pool.maps[0]
        made = PrefixMap(capacity_pieces=profile.kv_tokens // self._block_tokens, sent_s=self._config.sent_s)
        pool.maps.append(made)
        if self._sight.report_delay_s is not None:
            for name, replica in pool.replicas.items():
                made.store(name, replica.engine.prefixes.hashes())
        return made

    def end_map(self, key: PoolKey, ended: PrefixMap) -> None:
        """A router to a pool has gone, with its map."""
        if not self._sight.is_shared:
            self._pools[key].maps.remove(ended)

    def begin_replica(self, replica: VirtualReplica) -> None:
        """A replica has started, and reports from now on."""
        self._pools.setdefault(replica.key, _Pool()).replicas[replica.replica_id] = replica
        if self._sight.report_delay_s is not None:
            replica.engine.prefixes.on_change = lambda stored, removed: self._change(replica, stored, removed)

    def end_replica(self, replica: VirtualReplica) -> None:
        """A replica has gone."""
        pool = self._pools[replica.key]
        del pool.replicas[replica.replica_id]
        for each in pool.maps:
            each.clear(replica.replica_id)

    def accept(self, replica: VirtualReplica, prompt: PromptKeys) -> None:
        """A replica has accepted a prompt; its report of it is no news for the router that sent it."""
        if self._sight.report_delay_s and not self._sight.is_shared:
            self._clock.at(self._clock.now_s + self._sight.report_delay_s, self._report_accepted, replica, prompt)

    def maps(self, key: PoolKey) -> Sequence[PrefixMap]:
        """The maps of all routers to a pool that have not gone."""
        return self._pools[key].maps if key in self._pools else ()

    def _change(self, replica: VirtualReplica, stored: Sequence[int], removed: Sequence[int]) -> None:
        delay_s = self._sight.report_delay_s
        if delay_s:
            self._clock.at(self._clock.now_s + delay_s, self._report, replica, stored, removed)
        else:
            self._report(replica, stored, removed)

    def _report(self, replica: VirtualReplica, stored: Sequence[int], removed: Sequence[int]) -> None:
        pool = self._pools[replica.key]
        if replica.replica_id in pool.replicas:
            for each in pool.maps:
                each.store(replica.replica_id, stored)
                each.remove(replica.replica_id, removed)

    def _report_accepted(self, replica: VirtualReplica, prompt: PromptKeys) -> None:
        pool = self._pools[replica.key]
        if replica.replica_id in pool.replicas:
            for each in pool.maps:
                each.sent(replica.replica_id, prompt, self._clock.now_s)
