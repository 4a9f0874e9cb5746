"""A fake of Ray: an application's coordinator and Serve in this process, whose controller is the real one."""

from collections.abc import Mapping
from typing import Any

from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.controller import Controller
from autoscale.decide.status import STATUS, PlanRecord, ServiceStatus, Status
from autoscale.decide.tuning import Pools, merged, tuned
from autoscale.policies.heteroscale import observed_signals
from autoscale.types import Latency, PoolKey, PoolLimits, Snapshot, Traffic
from kvtransfer.topology import Role
from serve_app.local.cluster import DeployError
from tests.autoscale.virtual_serve import VirtualServe


class VirtualApplication:
    """One service ``m``; each status is a decision later. ``ask`` takes the place of ``ray_control.ask``."""

    def __init__(self, base: AutoscaleConfig, capacity: float = 1.0) -> None:
        limits = PoolLimits(lowest_replicas=1, highest_replicas=8, capacity=capacity)
        self.base, self.pools = base, Pools({PoolKey("g0", role): limits for role in Role})
        self.changes: dict[str, Any] = {}
        self.config = base
        self.serve = VirtualServe(Controller(base), dict.fromkeys(Role, 2.0), bounds=(1, 8), capacity=capacity)
        self.silent_asks = 0  # number of next calls that the coordinator does not answer
        self.requests_per_s = 0.0
        self.busy_requests_per_s: float | None = None  # while counts are set by hand; ``None``: as before
        self.asked: list[tuple[str, Any]] = []
        self._record: PlanRecord | None = None
        for _ in range(6):
            self._tick()

    def ask(self, app: str, method: str, *arguments: Any) -> Any:
        """Answer as the coordinator does."""
        if self.silent_asks:
            self.silent_asks -= 1
            raise DeployError("the coordinator of tandem does not answer")
        if method == "status":
            self._tick()
            return STATUS.dump_python(self._status(), mode="json")
        _, changes, why = arguments
        self.asked.append((why, changes))
        return self._tune(changes)

    def _tune(self, changes: Mapping[str, Any]) -> str | None:
        try:
            changed = merged(self.changes, changes) if changes else {}
            self.config = tuned(self.base, changed, self.pools)
        except ValueError as error:
            return str(error)
        self.changes, self.serve.controller = changed, Controller(self.config)
        return None

    @property
    def desired(self) -> tuple[int, int]:
        """Replicas of each role that should serve."""
        counts = {key.role: count for key, count in self.serve.state.desired.items()}
        return counts[Role.PREFILL], counts[Role.DECODE]

    def _tick(self) -> None:
        is_busy = self.config.override is not None and self.busy_requests_per_s is not None
        traffic = Traffic(requests_per_s=self.busy_requests_per_s if is_busy else self.requests_per_s)
        self.serve.tick(100.0 * sum(self.serve.targets.values()), latency=Latency(), traffic=traffic)
        snapshot: Snapshot = self.serve.snapshot({Role.DECODE: {"decode_tokens_per_s": 100.0}}, traffic=traffic)
        assert self.serve.plan is not None
        self._record = PlanRecord(
            plan=self.serve.plan,
            running={pool.key: tuple(each.replica_id for each in pool.replicas) for pool in snapshot.pools},
            draining={pool.key: pool.draining for pool in snapshot.pools},
            latency=Latency(),
            traffic=traffic,
            signals=observed_signals(snapshot),
        )

    def _status(self) -> Status:
        service = ServiceStatus(config=self.config, tuned=self.changes, pools=self.pools, last=self._record)
        return Status(log_path="", cordoned=(), topology=None, services={"m": service})
