"""One replica of a virtual cluster: an engine model, and its steps by a virtual clock (pure)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from autoscale.engines.engine_model import EngineModel
from autoscale.engines.engine_step import ModelCounters, ModelRequest, Step
from autoscale.observe.replica_report import ReplicaReport
from autoscale.observe.request_stats import RequestStats
from autoscale.sim.clock import Clock
from autoscale.types import PoolKey
from kvtransfer.cost import Wire
from kvtransfer.topology import Role
from router.backlog import PrefillBacklog
from router.pool_router import PoolRouter

# Most decode-only steps that are simulated as one event. This is no limit in practice: a batch changes long before.
_MOST_STEPS = 2**20

# Called with the replica, the requests that got their first token, the time of these tokens, and the requests that got
# their last token.
OnTokens = Callable[["VirtualReplica", Sequence[ModelRequest], float, Sequence[ModelRequest]], None]


@dataclass(slots=True, eq=False)
class VirtualReplica:
    """One engine, its routers and counters, and the step that it is in.

    The cluster changes the counts of requests, prompts and handoffs, and calls ``on_empty``.

    Attributes:
        requests: counts and waiting times of a decode replica's requests.
        to_prefill: a decode replica's router to the prefill replicas of its group.
        card: its network card.
        on_tokens: called whenever requests got their first or last token.
        backlog: a decode replica's estimate of the prompts that wait at prefill replicas.
        step: the work that the engine has begun, one step or several; ``None``: it is idle.
        ongoing_requests: a decode replica counts a request from its arrival to its last token, a prefill replica until
            its prompt is computed.
        unread_kv_requests: prompts whose KV decode has yet to pull from this replica.
        local_prefill_tokens: tokens of the prompts that a decode replica computes itself, until their first tokens.
        handoffs: number of prompts whose KV came from prefill and that have got their first token.
        handoff_s: sum of their times from the end of prefill to the first token, seconds.
        pulled_bytes: KV that a decode replica has requested from prefill.
        pull_s: sum of the times of these transfers, without the base time of each, seconds.
        on_empty: called once, when a draining replica is empty.
    """

    replica_id: str
    key: PoolKey
    engine: EngineModel
    requests: RequestStats
    to_prefill: PoolRouter
    card: Wire
    clock: Clock
    on_tokens: OnTokens
    backlog: PrefillBacklog = field(default_factory=PrefillBacklog)
    step: Step | None = None
    step_began_s: float = 0.0
    ongoing_requests: int = 0
    unread_kv_requests: int = 0
    local_prefill_tokens: int = 0
    handoffs: int = 0
    handoff_s: float = 0.0
    pulled_bytes: float = 0.0
    pull_s: float = 0.0
    on_empty: Callable[[], None] | None = None
    is_dead: bool = False
    # Number of the present step: it tells events of replaced steps from the event of this one.
    _step_number: int = 0
    # Time, busy seconds and SM-active seconds of the last report.
    _reported: tuple[float, float, float] = (0.0, 0.0, 0.0)

    @property
    def is_empty(self) -> bool:
        """Whether neither a request nor a transfer needs this replica."""
        return not self.ongoing_requests and not self.unread_kv_requests

    def wake(self) -> None:
        """Let the engine take up a new request: an idle one now, a busy one at the end of the step that has begun."""
        step = self.step
        if step is None:
            self.step_began_s = self.clock.now_s
            self._plan()
            return
        begun = step.begun_by(self.clock.now_s - self.step_began_s)
        if begun < step.steps:  # end after the steps that have begun: the next plan then has the new request
            self._begin(step.until(begun))

    def settle(self) -> None:
        """Apply the steps that have ended. As several steps are one event, the engine may be behind the clock."""
        step = self.step
        if step is not None and not step.chunks:  # work with prompt chunks is a single step
            # The last step is left to the event at its end.
            ended = min(step.ended_by(self.clock.now_s - self.step_began_s), step.steps - 1)
            if ended:
                self._advance(step, ended)
                self.step = step.after(ended)

    def die(self) -> None:
        """Stop in the middle of a step."""
        self.is_dead = True
        self.step = None

    def work(self) -> ModelCounters:
        """Work of the engine since it started."""
        self.settle()
        return replace(self.engine.counters)

    def report(self) -> dict[str, float]:
        """The report to the autoscaler, by the names of ``autoscale.observe.signals``; call ``settle`` first."""
        engine, counters, now_s = self.engine, self.engine.counters, self.clock.now_s
        before_s, busy_s, active_s = self._reported
        self._reported = (now_s, counters.busy_s, counters.sm_active_s)
        passed_s = max(1e-9, now_s - before_s)  # two reports may have the same time
        is_prefill = self.key.role is Role.PREFILL
        report = ReplicaReport(
            running_requests=len(engine.running),
            waiting_requests=len(engine.waiting),
            deferred_requests=len(engine.deferred),
            kv_usage_frac=engine.kv_usage_frac,
            decode_tokens=counters.output_tokens,
            prefill_tokens=counters.prefill_tokens,
            cached_prefill_tokens=counters.cached_tokens,
            queued_prefill_tokens=engine.queued_prefill_tokens if is_prefill else self.local_prefill_tokens,
            gpu_utilization_frac=min(1.0, (counters.busy_s - busy_s) / passed_s),
            sm_activity_frac=min(1.0, (counters.sm_active_s - active_s) / passed_s),
            unread_kv_requests=self.unread_kv_requests if is_prefill else None,
            handoffs=None if is_prefill else self.handoffs,
            handoff_s=None if is_prefill else self.handoff_s,
            pulled_bytes=None if is_prefill else self.pulled_bytes,
            pull_s=None if is_prefill else self.pull_s,
            decode_steps=counters.decode_steps,
            decode_steps_s=counters.decode_steps_s,
            decode_steps_requests=counters.decode_steps_requests,
            decode_steps_kv_tokens=counters.decode_steps_kv_tokens,
        )
        return report.values(None if is_prefill else self.requests)

    def _plan(self) -> None:
        self._begin(self.engine.plan(self.step_began_s, _MOST_STEPS))

    def _begin(self, step: Step | None) -> None:
        """Make this the present work, from ``step_began_s`` on; the event of the work before it then does nothing."""
        self._step_number += 1
        self.step = step
        if step is not None:
            self.clock.at(self.step_began_s + step.duration_s, self._end_step, self._step_number)

    def _end_step(self, number: int) -> None:
        if number == self._step_number and self.step is not None and not self.is_dead:
            self._advance(self.step, self.step.steps)
            self._plan()

    def _advance(self, step: Step, steps: int) -> None:
        """Let the first ``steps`` steps of the present work pass."""
        first, ended = self.engine.apply(step, steps)
        first_s = self.step_began_s + step.first_s
        self.step_began_s += step.time_s(steps)
        if first or ended:
            self.on_tokens(self, first, first_s, ended)
