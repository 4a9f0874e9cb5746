"""What Serve does with a plan: starts what is missing after a delay, stops what is too much."""

from dataclasses import dataclass, field
from typing import Any

from autoscale.decide.controller import Controller
from autoscale.types import ControllerState, Latency, Plan, PoolKey, PoolLimits, PoolStats, ReplicaStats, Snapshot
from kvtransfer.topology import Role
from router.membership import routable


@dataclass
class VirtualServe:
    """One group; time moves with ``tick``.

    ``has_hook``: victims are the plan's, else the newest replicas. ``drain_s``: how long a victim finishes what it has.
    ``is_idle``: replicas report that they have no request. ``capacity``: standard replicas that each one is worth.
    """

    controller: Controller
    start_s: dict[Role, float]
    interval_s: float = 2.0
    has_hook: bool = True
    drain_s: float = 0.0
    is_idle: bool = False
    room: dict[Role, int] = field(default_factory=lambda: dict.fromkeys(Role, 64))
    bounds: tuple[int, int] = (1, 32)
    capacity: float = 1.0
    now_s: float = 1000.0
    state: ControllerState = field(default_factory=ControllerState)
    running: dict[Role, list[str]] = field(default_factory=lambda: {role: [f"{role[0]}0"] for role in Role})
    starting: dict[Role, list[float]] = field(default_factory=lambda: {role: [] for role in Role})
    draining: dict[Role, dict[str, float]] = field(default_factory=lambda: {role: {} for role in Role})
    targets: dict[Role, int] = field(default_factory=lambda: dict.fromkeys(Role, 1))
    born: int = 1
    plan: Plan | None = None
    plans: list[Plan] = field(default_factory=list)

    def snapshot(self, load: dict[Role, dict[str, Any]], **fields: Any) -> Snapshot:
        """What the controller sees; ``load`` holds totals that the serving replicas of a role share."""
        pools = []
        for role in Role:
            names, serving = self.running[role], set(self.serving(role))
            shares = {name: value / max(1, len(serving)) for name, value in load.get(role, {}).items()}
            shown = {
                name: {"observed_s": self.now_s, **(shares if name in serving else dict.fromkeys(shares, 0.0))}
                for name in names
            }
            pools.append(
                PoolStats(
                    key=PoolKey("g0", role),
                    replicas=tuple(ReplicaStats(replica_id=name, **shown[name]) for name in names),
                    target_replicas=self.targets[role],
                    draining=tuple(name for name in self.draining[role] if name in self.state.victims),
                    limits=PoolLimits(
                        lowest_replicas=self.bounds[0],
                        highest_replicas=self.bounds[1],
                        gpus_per_replica=1,
                        capacity=self.capacity,
                    ),
                )
            )
        return Snapshot(now_s=self.now_s, pools=tuple(pools), state=self.state, **fields)

    def tick(
        self, decode_tps: float | None, *, backlog_tokens: float = 0.0, latency: Latency | None = None, **fields: Any
    ) -> Plan:
        """One interval under a load of decode's tokens per second and a prefill backlog."""
        self.advance()
        waiting = {"waiting_requests": 0.0, **({"running_requests": 0.0} if self.is_idle else {})}
        load: dict[Role, dict[str, Any]] = {
            Role.PREFILL: {"queued_prefill_tokens": backlog_tokens, **waiting},
            Role.DECODE: dict(waiting),
        }
        if decode_tps is not None:
            load[Role.DECODE]["decode_tokens_per_s"] = decode_tps
        return self.decide(load, latency=latency or Latency(), **fields)

    def advance(self) -> None:
        """One interval passes: replicas become ready, and victims end."""
        self.now_s += self.interval_s
        for role in Role:
            self.draining[role] = {name: at_s for name, at_s in self.draining[role].items() if at_s > self.now_s}
            for at_s in [at_s for at_s in self.starting[role] if at_s <= self.now_s]:
                if len(self.running[role]) < self.room[role]:
                    self.starting[role].remove(at_s)
                    self.running[role].append(f"{role[0]}{self.born}")
                    self.born += 1

    def decide(self, load: dict[Role, dict[str, Any]], **fields: Any) -> Plan:
        """The controller ticks, and Serve acts; ``load``: totals that the replicas of a role share."""
        plan = self.controller.tick(self.snapshot(load, **fields))
        self.plan, self.state = plan, plan.state
        self.plans.append(plan)
        for role in Role:
            self._apply(role, plan)
        return plan

    def _apply(self, role: Role, plan: Plan) -> None:
        self.targets[role] = plan.counts[PoolKey("g0", role)]
        have = len(self.running[role]) + len(self.starting[role])
        for _ in range(self.targets[role] - have):
            self.starting[role].append(self.now_s + self.start_s[role])
        for _ in range(have - self.targets[role]):
            own = [name for name in plan.victims if name in self.running[role]] if self.has_hook else []
            if own:
                self._stop(role, own[0])
            elif self.starting[role]:
                self.starting[role].pop()
            else:
                self._stop(role, self.running[role][-1])

    def _stop(self, role: Role, name: str) -> None:
        self.running[role].remove(name)
        self.draining[role][name] = self.now_s + self.drain_s

    def restart(self) -> None:
        """Serve's controller dies: the next one takes every replica that has not gone as running."""
        for role in Role:
            self.running[role] += self.draining[role]
            self.draining[role] = {}
            self.starting[role] = []

    def lose(self, role: Role, *, restarts: bool = True) -> str:
        """The oldest replica of a role dies; Serve starts another."""
        name = self.running[role].pop(0)
        if restarts:
            self.starting[role].append(self.now_s + self.start_s[role])
        return name

    def serving(self, role: Role) -> list[str]:
        """Running replicas that get requests."""
        admitted = None if self.plan is None else frozenset(self.plan.admitted)
        return list(routable(self.running[role], admitted))

    @property
    def gpus(self) -> int:
        """GPUs of the replicas that run, start or drain."""
        return sum(len(of[role]) for of in (self.running, self.starting, self.draining) for role in Role)

    @property
    def counts(self) -> tuple[int, int]:
        """Serve's target counts (P, D)."""
        return self.targets[Role.PREFILL], self.targets[Role.DECODE]
