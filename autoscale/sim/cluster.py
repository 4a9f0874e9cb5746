"""A virtual cluster: requests through prefill and decode engine models by a virtual clock (pure).

Which replica gets a request, and where its prompt is prefilled, is decided by ``router``'s own code: one router at the
ingress for each group, one in each decode replica for its group's prefill pool, as it is live. What an engine does, and
how long that takes, is ``autoscale.engine_model``'s. A group without prefill replicas prefills where it decodes.
"""

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from autoscale.engine_model import EngineModel, ModelCounters, ModelRequest, Step
from autoscale.profile import EngineProfile
from autoscale.report import RequestRecord
from autoscale.request_stats import RequestStats, RequestTimer
from autoscale.sim.host import Host, SharedCores
from autoscale.slo import SloConfig
from autoscale.trace import TraceRequest
from autoscale.types import PoolKey
from kvtransfer.cost import CROSS_SWITCH_FRAC, Wire, transfer_end_s
from kvtransfer.topology import TIERS, LinkTier, Path, Role
from router.backlog import PrefillBacklog
from router.config import RouterConfig
from router.groups import GroupLoad, choose_group
from router.length import prefill_path
from router.pool_router import PoolRouter
from router.types import DecodeLoad, PrefillPath

# Of steps in which everyone decodes, so many at a time where nothing happens in between.
_MOST_STEPS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Saturation:
    """From when on a decode replica is full: so much of its KV used, 0..1, or so many requests waiting."""

    kv_usage_frac: float
    waiting_requests: int

    def holds(self, engine: EngineModel) -> bool:
        """Whether an engine is."""
        return engine.kv_usage_frac >= self.kv_usage_frac or len(engine.waiting) >= self.waiting_requests


@dataclass(slots=True, eq=False)
class VirtualReplica:
    """One engine: what it holds, and the step that it is in since ``began_s``.

    ``ongoing_requests``: of decode from arrival to end, of prefill until the answer; ``unread_kv_requests``: whose KV
    is still to be pulled.
    """

    replica_id: str
    key: PoolKey
    engine: EngineModel
    requests: RequestStats
    to_prefill: PoolRouter
    card: Wire
    under: Path = ()
    backlog: PrefillBacklog = field(default_factory=PrefillBacklog)
    step: Step | None = None
    began_s: float = 0.0
    plans: int = 0
    ongoing_requests: int = 0
    unread_kv_requests: int = 0
    local_prefill_tokens: int = 0
    handoffs: int = 0
    handoff_s: float = 0.0
    shown: tuple[float, float, float] = (0.0, 0.0, 0.0)
    on_empty: Callable[[], None] | None = None
    is_dead: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left that anybody waits for."""
        return not self.ongoing_requests and not self.unread_kv_requests


@dataclass(slots=True, eq=False)
class _Group:
    """One deployment group: its replicas, and who of them is routed to."""

    to_decode: PoolRouter
    uplink: Wire | None
    replicas: dict[str, VirtualReplica] = field(default_factory=dict)
    prefill: Sequence[str] = ()
    decode: Sequence[str] = ()
    waiting: list[tuple[int, TraceRequest]] = field(default_factory=list)  # while no decode replica is up
    load: GroupLoad = field(default_factory=GroupLoad)


@dataclass(slots=True, eq=False)
class _Journey:
    """One request on its way."""

    number: int
    name: str
    request: TraceRequest
    group: _Group
    decode: VirtualReplica
    timer: RequestTimer
    block_hashes: Sequence[int]
    local_tokens: int = 0
    answered_s: float | None = None
    first_s: float | None = None
    source: VirtualReplica | None = None  # that keeps its KV until decode has pulled it
    computed: ModelRequest | None = None  # what it was there
    decoding: ModelRequest | None = None
    is_lost: bool = False


class VirtualCluster:
    """See the module."""

    def __init__(
        self,
        profiles: Mapping[PoolKey, EngineProfile],
        router: RouterConfig,
        rng: random.Random,
        *,
        link_frac: float = 1.0,
        uplink_bytes_per_s: float | None = None,
        switch_uplink_bytes_per_s: float | None = None,
        prefix_block_tokens: int | None = None,
        refuse_at: Saturation | None = None,
        slo: SloConfig | None = None,
        host: Host | None = None,
    ) -> None:
        """A cluster without replicas.

        Args:
            profiles: the engine of each pool.
            router: how requests find their replicas.
            rng: breaks ties between replicas.
            link_frac: share of the profiles' bandwidth that is left on the way from prefill to decode.
            uplink_bytes_per_s: what all transfers of a group share; ``None``: nothing but their own cards.
            switch_uplink_bytes_per_s: what all transfers that leave or enter an S1 switch share, each way; ``None``: as
                much as their cards give. Only between replicas of which it is known what they are under.
            prefix_block_tokens: tokens for which one of a request's ``hash_ids`` stands.
            refuse_at: a request is refused where every decode replica of its group is so full; ``None``: never.
            slo: by which replicas count what users wait.
            host: whose cores all engines share, as on CPU; then steps are taken one by one.
        """
        self._refuse_at = refuse_at
        self._slo = slo or SloConfig()
        self._cores = None if host is None else SharedCores(host, rng)
        self._most_steps = _MOST_STEPS if host is None else 1
        self._link_frac = link_frac
        self._switch_uplink_bytes_per_s = switch_uplink_bytes_per_s
        self._uplinks: dict[tuple[Path, bool], Wire] = {}
        self._prefix_block_tokens = prefix_block_tokens
        self.now_s = 0.0
        self._profiles = profiles
        self._config = router
        self._rng = rng
        self._groups = {
            key.group: _Group(
                PoolRouter(router.policy, 0, rng), None if uplink_bytes_per_s is None else Wire(uplink_bytes_per_s)
            )
            for key in profiles
        }
        self._records: list[RequestRecord | None] = []
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._count = 0
        self._arrivals: Iterator[TraceRequest] = iter(())
        self._next: TraceRequest | None = None
        self._journeys: dict[ModelRequest, _Journey] = {}

    def add(self, key: PoolKey, replica_id: str, under: Path = ()) -> VirtualReplica:
        """A new replica, ready but not in routing; ``under``: what its node is under, as in ``Node``."""
        replica = VirtualReplica(
            replica_id,
            key,
            EngineModel(self._profiles[key], self._prefix_block_tokens),
            RequestStats(lambda: self.now_s, self._slo.ttft_share),
            PoolRouter(self._config.policy, self._config.asked(routers=2), self._rng),
            Wire(self._profiles[key].handoff.bytes_per_s * self._link_frac),
            under,
        )
        self._groups[key.group].replicas[replica_id] = replica
        return replica

    def route(self, key: PoolKey, names: Sequence[str]) -> None:
        """Who of a pool gets requests from now on."""
        group = self._groups[key.group]
        if key.role is Role.DECODE:
            group.to_decode.set_replicas(names)
            group.decode = names
            waiting, group.waiting = group.waiting, []
            for number, request in waiting if names else ():
                self._enter(group, number, request)
            group.waiting += () if names else waiting
        else:
            group.prefill = names

    def drain(self, replica: VirtualReplica, on_empty: Callable[[], None]) -> None:
        """Let a replica that is out of routing finish what it has, and say so then."""
        replica.on_empty = on_empty
        self._leave_if_empty(replica)

    def kill(self, replica: VirtualReplica) -> None:
        """Let a replica die.

        What decode was streaming is lost; prompts on prefill, and those whose KV was not pulled yet, are computed where
        they decode.
        """
        replica.is_dead = True
        replica.step = None
        del self._groups[replica.key.group].replicas[replica.replica_id]
        if replica.key.role is Role.DECODE:
            for journey in {id(j): j for j in self._journeys.values() if j.decode is replica}.values():
                self._lose(journey)
            for request in (*replica.engine.running, *replica.engine.waiting, *replica.engine.deferred):
                del self._journeys[request]
            return
        for request in (*replica.engine.running, *replica.engine.waiting):
            journey = self._journeys.pop(request)
            journey.decode.to_prefill.end(replica.replica_id, journey.name)
            journey.decode.backlog.failed(journey.request.input_tokens)
            self._prefill_locally(journey)
        for journey in [j for j in self._journeys.values() if j.source is replica]:
            assert journey.decoding is not None
            journey.source = journey.answered_s = None
            journey.decode.engine.abort(journey.decoding)
            del self._journeys[journey.decoding]
            self._prefill_locally(journey)

    def at(self, time_s: float, event: Callable[..., None], *arguments: object) -> None:
        """Let something happen at a time; of one time, in the order in which they were asked for."""
        self._count += 1
        heappush(self._events, (time_s, self._count, event, arguments))

    def submit(self, requests: Iterable[TraceRequest]) -> None:
        """Let requests arrive, each at its time; they are in the order of it."""
        self._arrivals = iter(requests)
        self._next = next(self._arrivals, None)

    def run(self, until_s: float = math.inf) -> None:
        """Let time pass until then, or until nothing happens any more."""
        events = self._events
        while True:
            arrival_s = math.inf if self._next is None else self._next.at_s
            if events and events[0][0] < arrival_s:
                if events[0][0] > until_s:
                    return
                self.now_s, _, event, arguments = heappop(events)
                event(*arguments)
            elif arrival_s <= until_s and self._next is not None:
                self.now_s, request = arrival_s, self._next
                self._next = next(self._arrivals, None)
                self._arrive(request)
            else:
                return

    @property
    def is_done(self) -> bool:
        """Whether every request has arrived and ended."""
        return self._next is None and not any(group.load.requests for group in self._groups.values())

    @property
    def is_awaited(self) -> bool:
        """Whether requests wait for a group without decode replicas."""
        return any(group.waiting for group in self._groups.values())

    def give_up(self) -> None:
        """Count the requests that have not ended as failed."""
        for journey in self._journeys.values():
            if not journey.is_lost:
                self._records[journey.number] = self._unfinished(journey, "not ended")
        for number, request in [entry for group in self._groups.values() for entry in group.waiting]:
            self._records[number] = _not_begun(request, "not ended")

    def records(self) -> list[RequestRecord]:
        """The requests that have ended or were given up, in the order in which they arrived."""
        return [record for record in self._records if record is not None]

    def work(self, replica: VirtualReplica) -> ModelCounters:
        """What a replica's engine has done up to now."""
        self._settle(replica)
        return replace(replica.engine.counters)

    def report(self, replica: VirtualReplica) -> dict[str, float]:
        """What a replica tells the autoscaler, as live."""
        self._settle(replica)
        engine, counters = replica.engine, replica.engine.counters
        then_s, busy_s, active_s = replica.shown
        replica.shown = (self.now_s, counters.busy_s, counters.sm_active_s)
        passed_s = max(1e-9, self.now_s - then_s)
        report = {
            "running_requests": float(len(engine.running)),
            "waiting_requests": float(len(engine.waiting)),
            "deferred_requests": float(len(engine.deferred)),
            "kv_usage_frac": engine.kv_usage_frac,
            "decode_tokens": float(counters.output_tokens),
            "prefill_tokens": float(counters.prefill_tokens),
            "cached_prefill_tokens": float(counters.cached_tokens),
            "gpu_utilization_frac": min(1.0, (counters.busy_s - busy_s) / passed_s),
            "sm_activity_frac": min(1.0, (counters.sm_active_s - active_s) / passed_s),
        }
        if replica.key.role is Role.PREFILL:
            report["queued_prefill_tokens"] = float(engine.queued_prefill_tokens)
            report["unread_kv_requests"] = float(replica.unread_kv_requests)
            return report
        for request in engine.running:
            timer = self._journeys[request].timer
            timer.add_tokens(engine.produced(request) - timer.tokens, self.now_s)
        report |= replica.requests.report()
        report["queued_prefill_tokens"] = float(replica.local_prefill_tokens)
        report["handoffs"] = float(replica.handoffs)
        report["handoff_s"] = replica.handoff_s
        return report

    def _arrive(self, request: TraceRequest) -> None:
        group = self._choose_group()
        number = len(self._records)
        self._records.append(None)
        if self._is_full(group):
            self._records[number] = _not_begun(request, "refused")
            return
        group.load.requests += 1
        group.load.prompt_tokens += request.input_tokens
        if group.decode:
            self._enter(group, number, request)
        else:
            group.waiting.append((number, request))

    def _is_full(self, group: _Group) -> bool:
        if self._refuse_at is None or not group.decode:
            return False
        for name in group.decode:
            self._settle(group.replicas[name])
            if not self._refuse_at.holds(group.replicas[name].engine):
                return False
        return True

    def _enter(self, group: _Group, number: int, request: TraceRequest) -> None:
        decode = group.replicas[group.to_decode.order()[0].replica_id]
        timer = decode.requests.begin(request.at_s, request.input_tokens, is_streamed=True)
        journey = _Journey(number, str(number), request, group, decode, timer, self._full_blocks(request))
        group.to_decode.begin(decode.replica_id, journey.name, 1)
        decode.ongoing_requests += 1
        self._settle(decode)
        engine = decode.engine
        if not group.prefill:
            path = PrefillPath.LOCAL
        else:
            path = prefill_path(
                input_tokens=request.input_tokens,
                cached_tokens=engine.cached_tokens(journey.block_hashes),
                prefill_backlog_tokens=decode.backlog.tokens(self.now_s),
                decode=DecodeLoad(
                    running_requests=len(engine.running),
                    max_running_requests=engine.profile.max_running,
                    kv_usage_frac=engine.kv_usage_frac,
                    local_prefill_tokens=decode.local_prefill_tokens,
                    output_tokens_mean=decode.requests.output_tokens_mean,
                ),
                config=self._config.length,
            ).path
        if path is PrefillPath.LOCAL:
            self._prefill_locally(journey)
        else:
            self._prefill(journey)

    def _full_blocks(self, request: TraceRequest) -> Sequence[int]:
        """Only whole blocks of a prompt are cached."""
        if not request.hash_ids or self._prefix_block_tokens is None:
            return ()
        return request.hash_ids[: request.input_tokens // self._prefix_block_tokens]

    def _choose_group(self) -> _Group:
        if len(self._groups) == 1:
            return next(iter(self._groups.values()))
        groups = {name: group for name, group in self._groups.items() if group.decode} or self._groups
        loads = {name: group.load for name, group in groups.items()}
        return groups[choose_group(loads, {name: len(group.decode) for name, group in groups.items()}, self._rng)]

    def _prefill_locally(self, journey: _Journey) -> None:
        if journey.is_lost:
            return
        journey.local_tokens = journey.request.input_tokens
        journey.decode.local_prefill_tokens += journey.local_tokens
        self._decode(journey, None)

    def _lose(self, journey: _Journey) -> None:
        """Its decode replica has died."""
        if journey.is_lost:
            return
        journey.is_lost = True
        journey.group.to_decode.end(journey.decode.replica_id, journey.name)
        journey.group.load.requests -= 1
        if journey.first_s is None:
            journey.group.load.prompt_tokens -= journey.request.input_tokens
        self._records[journey.number] = self._unfinished(journey, "its decode replica died")

    def _prefill(self, journey: _Journey) -> None:
        group, router = journey.group, journey.decode.to_prefill
        router.set_replicas(group.prefill)
        ordered = router.order()
        if asked := router.ask(ordered):
            ordered = router.informed(
                ordered, {name: group.replicas[name].engine.queued_prefill_tokens for name in asked}
            )
        prefill = group.replicas[ordered[0].replica_id]
        prefill.ongoing_requests += 1
        tokens = journey.request.input_tokens
        journey.decode.backlog.sent(tokens)
        router.begin(prefill.replica_id, journey.name, tokens)
        computed = ModelRequest(
            request_id=journey.name,
            input_tokens=tokens,
            output_tokens=1,
            block_hashes=journey.block_hashes,
            keeps_kv=True,
        )
        journey.computed = computed
        self._journeys[computed] = journey
        prefill.engine.add(computed)
        self._wake(prefill)

    def _decode(self, journey: _Journey, kv_ready_s: float | None) -> None:
        request = ModelRequest(
            request_id=journey.name,
            input_tokens=journey.request.input_tokens,
            output_tokens=journey.request.output_tokens,
            block_hashes=journey.block_hashes,
            kv_ready_s=kv_ready_s,
        )
        journey.decoding = request
        self._journeys[request] = journey
        journey.decode.engine.add(request)
        if kv_ready_s is None:
            self._wake(journey.decode)

    def _wake(self, replica: VirtualReplica) -> None:
        """Let who has just come in take part as soon as the step that has begun is over."""
        step = replica.step
        if step is None:
            replica.began_s = self.now_s
            self._plan(replica)
        elif (begun := step.begun_by(self.now_s - replica.began_s)) < step.steps:
            self._begin(replica, step.until(begun))

    def _settle(self, replica: VirtualReplica) -> None:
        """Bring counters up to date with the steps that have ended."""
        step = replica.step
        if step is not None and not step.chunks:
            ended = min(step.ended_by(self.now_s - replica.began_s), step.steps - 1)
            if ended:
                self._advance(replica, step, ended)
                replica.step = step.after(ended)

    def _plan(self, replica: VirtualReplica) -> None:
        self._begin(replica, self._slowed(replica, replica.engine.plan(replica.began_s, self._most_steps)))

    def _slowed(self, replica: VirtualReplica, step: Step | None) -> Step | None:
        """What a step takes beside other engines on the same cores."""
        if step is None or self._cores is None:
            return step
        others = (r for group in self._groups.values() for r in group.replicas.values() if r is not replica)
        computing = sum(other.step is not None for other in others)
        slowdown = self._cores.slowdown(replica.key.role, replica.began_s, computing)
        return step._replace(first_s=step.first_s * slowdown)

    def _begin(self, replica: VirtualReplica, step: Step | None) -> None:
        replica.plans += 1
        replica.step = step
        if step is not None:
            self.at(replica.began_s + step.duration_s, self._end_step, replica, replica.plans)

    def _end_step(self, replica: VirtualReplica, plans: int) -> None:
        if plans == replica.plans and replica.step is not None and not replica.is_dead:
            self._advance(replica, replica.step, replica.step.steps)
            self._plan(replica)

    def _advance(self, replica: VirtualReplica, step: Step, steps: int) -> None:
        first, ended = replica.engine.apply(step, steps)
        if first and replica.key.role is Role.DECODE:
            first_s = replica.began_s + step.first_s
            for request in first:
                self._begin_stream(self._journeys[request], first_s)
        replica.began_s += step.time_s(steps)
        for request in ended:
            journey = self._journeys.pop(request)
            if replica.key.role is Role.PREFILL:
                self._hand_over(journey, replica)
            else:
                self._finish(journey, replica.began_s)

    def _hand_over(self, journey: _Journey, prefill: VirtualReplica) -> None:
        decode, tokens = journey.decode, journey.request.input_tokens
        prefill.ongoing_requests -= 1
        if journey.is_lost:
            self._release(journey, prefill)
            self._leave_if_empty(prefill)
            return
        prefill.unread_kv_requests += 1
        decode.to_prefill.end(prefill.replica_id, journey.name)
        decode.backlog.answered(tokens, prefill.replica_id, prefill.engine.queued_prefill_tokens, self.now_s)
        journey.answered_s = self.now_s
        # Blocks that decode has are not pulled again.
        moved = max(1, tokens - decode.engine.cached_tokens(journey.block_hashes))
        handoff = prefill.engine.profile.handoff
        size_bytes = moved * handoff.kv_bytes_per_token
        wires = [prefill.card, decode.card, *([journey.group.uplink] if journey.group.uplink else [])]
        if prefill.under and decode.under and _s1(prefill) != _s1(decode):
            size_bytes /= CROSS_SWITCH_FRAC  # on the cards for so much longer
            wires += [self._uplink(_s1(prefill), is_out=True), self._uplink(_s1(decode), is_out=False)]
        ready_s = transfer_end_s(self.now_s, size_bytes, handoff.base_s, wires)
        journey.source = prefill
        self._decode(journey, ready_s)
        self.at(ready_s, self._read, journey, prefill)

    def _uplink(self, switch: Path, *, is_out: bool) -> Wire:
        """The way between an S1 switch and all others."""
        if (switch, is_out) not in self._uplinks:
            self._uplinks[switch, is_out] = Wire(self._switch_uplink_bytes_per_s or math.inf)
        return self._uplinks[switch, is_out]

    def _read(self, journey: _Journey, prefill: VirtualReplica) -> None:
        """Decode has pulled a prompt's KV."""
        if journey.source is not prefill:
            return  # which died meanwhile
        journey.source = None
        prefill.unread_kv_requests -= 1
        self._release(journey, prefill)
        if prefill.engine.waiting and prefill.step is None:  # for that room
            self._wake(prefill)
        self._leave_if_empty(prefill)
        if not journey.decode.is_dead:
            self._wake(journey.decode)

    def _release(self, journey: _Journey, prefill: VirtualReplica) -> None:
        """Nobody needs a prompt's KV where it was computed any more."""
        assert journey.computed is not None
        prefill.engine.release(journey.computed)
        journey.computed = None

    def _unfinished(self, journey: _Journey, error: str) -> RequestRecord:
        return RequestRecord(
            sent_s=journey.request.at_s,
            first_token_s=journey.first_s,
            last_token_s=None,
            input_tokens=journey.request.input_tokens,
            output_tokens=journey.request.output_tokens,
            error=error,
            prefilled_s=journey.answered_s,
        )

    def _begin_stream(self, journey: _Journey, first_s: float) -> None:
        journey.first_s = first_s
        journey.group.load.prompt_tokens -= journey.request.input_tokens
        decode = journey.decode
        decode.local_prefill_tokens -= journey.local_tokens
        journey.timer.add_tokens(1, first_s)
        if journey.answered_s is not None:
            decode.handoffs += 1
            decode.handoff_s += first_s - journey.answered_s

    def _finish(self, journey: _Journey, last_s: float) -> None:
        decode, request = journey.decode, journey.request
        journey.group.to_decode.end(decode.replica_id, journey.name)
        journey.group.load.requests -= 1
        decode.ongoing_requests -= 1
        journey.timer.add_tokens(request.output_tokens - journey.timer.tokens, last_s)
        journey.timer.end()
        self._leave_if_empty(decode)
        self._records[journey.number] = RequestRecord(
            sent_s=request.at_s,
            first_token_s=journey.first_s,
            last_token_s=last_s,
            input_tokens=request.input_tokens,
            output_tokens=request.output_tokens,
            prefilled_s=journey.answered_s,
        )

    def _leave_if_empty(self, replica: VirtualReplica) -> None:
        if replica.on_empty is not None and replica.is_empty:
            on_empty, replica.on_empty = replica.on_empty, None
            del self._groups[replica.key.group].replicas[replica.replica_id]
            on_empty()


def _s1(replica: VirtualReplica) -> Path:
    """The S1 switch that a replica's node is under."""
    return replica.under[: TIERS.index(LinkTier.S1) + 1]


def _not_begun(request: TraceRequest, error: str) -> RequestRecord:
    return RequestRecord(
        sent_s=request.at_s,
        first_token_s=None,
        last_token_s=None,
        input_tokens=request.input_tokens,
        output_tokens=request.output_tokens,
        error=error,
    )
