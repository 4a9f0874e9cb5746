"""The smallest fixed counts that serve a trace well enough, searched on engine models."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoscale.engines.profile import EngineProfile
from autoscale.report import Slo
from autoscale.sim.cluster import VirtualCluster
from autoscale.traces.trace import TraceRequest
from autoscale.types import PoolKey
from kvtransfer.topology import Role
from router.config import RouterConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticCounts:
    """Fixed counts, and the share of requests that they serve within their objectives."""

    prefill: int
    decode: int
    attainment_frac: float

    @property
    def replicas(self) -> int:
        """Replicas of both roles together."""
        return self.prefill + self.decode


class StaticSearch:
    """Fixed counts of one trace; every pair is simulated once."""

    def __init__(
        self,
        trace: Sequence[TraceRequest],
        slos: Sequence[Slo],
        profiles: Mapping[Role, EngineProfile],
        *,
        router: RouterConfig,
        highest_replicas: int,
        seed: int = 0,
    ) -> None:
        """``slos``: the objective of each request; ``highest_replicas``: the most of either role to look at."""
        self._trace = trace
        self._slos = slos
        self._profiles = dict(profiles)
        self._router = router
        self._highest = highest_replicas
        self._seed = seed
        self._known: dict[tuple[int, int], StaticCounts] = {}

    def counts(self, prefill: int, decode: int) -> StaticCounts:
        """What a pair of counts attains."""
        if (prefill, decode) not in self._known:
            counts = {PoolKey("g0", Role.PREFILL): prefill, PoolKey("g0", Role.DECODE): decode}
            profiles = {key: self._profiles[key.role] for key in counts}
            records = VirtualCluster(profiles, self._router, random.Random(self._seed)).replay(self._trace, counts)
            met = sum(slo.is_met(record) for slo, record in zip(self._slos, records, strict=True))
            self._known[prefill, decode] = StaticCounts(
                prefill=prefill, decode=decode, attainment_frac=met / len(records)
            )
        return self._known[prefill, decode]

    def smallest(self, attainment_frac: float) -> StaticCounts | None:
        """The fewest replicas in all that attain a share, and the best of their splits. ``None``: no counts attain it.

        It first looks along an edge, as if one more prefill replica never made more decode replicas necessary. That is
        not always so, since more routers know less of each other. So it then looks at every split of fewer replicas.
        """
        best: StaticCounts | None = None
        decode = self._highest
        for prefill in range(1, self._highest + 1):
            if best is not None and prefill >= best.replicas:
                break
            if self.counts(prefill, decode).attainment_frac < attainment_frac:
                continue
            while decode > 1 and self.counts(prefill, decode - 1).attainment_frac >= attainment_frac:
                decode -= 1
            found = self.counts(prefill, decode)
            if best is None or (found.replicas, -found.attainment_frac) < (best.replicas, -best.attainment_frac):
                best = found
        while best is not None and best.replicas > 2:
            fewer = self.best_of(best.replicas - 1)
            if fewer.attainment_frac < attainment_frac:
                break
            best = fewer
        return best

    def best_of(self, replicas: int) -> StaticCounts:
        """The split of this number of replicas with the highest attainment."""
        pairs = [(prefill, replicas - prefill) for prefill in range(1, replicas)]
        inside = [pair for pair in pairs if max(pair) <= self._highest]
        return max((self.counts(*pair) for pair in inside), key=lambda counts: counts.attainment_frac)
