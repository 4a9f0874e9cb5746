"""A virtual cluster: requests through prefill and decode engine models by a virtual clock (pure).

One deployment group and one ingress. Which replica gets a request, and where its prompt is prefilled, is decided by
``router``'s own functions, prefill by a router in each decode replica as it is live; what an engine does, and how long
that takes, by ``autoscale.engine_model``.
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from autoscale.engine_model import EngineModel, ModelRequest, Step
from autoscale.profile import EngineProfile
from autoscale.report import RequestRecord
from autoscale.trace import TraceRequest
from kvtransfer.topology import Role
from router.config import RouterConfig
from router.in_flight import InFlight
from router.length import prefill_path
from router.policy import POLICIES
from router.types import DecodeLoad, PrefillPath


@dataclass(slots=True, eq=False)
class VirtualReplica:
    """One engine: what it holds, and the step that it is in."""

    replica_id: str
    role: Role
    engine: EngineModel
    to_prefill: InFlight = field(default_factory=InFlight)
    step: Step | None = None
    ongoing_requests: int = 0
    local_prefill_tokens: int = 0


@dataclass(slots=True, eq=False)
class _Journey:
    """One request on its way."""

    number: int
    request: TraceRequest
    sent_s: float
    decode: VirtualReplica
    local_tokens: int = 0
    first_s: float | None = None
    last_s: float | None = None
    output_tokens: int = 0


@dataclass(slots=True)
class VirtualCluster:
    """See the module.

    Args:
        profiles: the engine of each role.
        router: how requests find their replicas.
        rng: breaks ties between replicas.
    """

    profiles: dict[Role, EngineProfile]
    router: RouterConfig
    rng: random.Random
    now_s: float = 0.0
    serving: dict[Role, list[VirtualReplica]] = field(default_factory=lambda: {role: [] for role in Role})
    _records: dict[int, RequestRecord] = field(default_factory=dict)
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _to_decode: InFlight = field(default_factory=InFlight)
    _turn: int = 0
    _count: int = 0
    _submitted: int = 0
    _journeys: dict[ModelRequest, _Journey] = field(default_factory=dict)
    _prefilling: dict[ModelRequest, _Journey] = field(default_factory=dict)

    def add(self, role: Role, replica_id: str) -> VirtualReplica:
        """A new replica, ready and in routing."""
        replica = VirtualReplica(replica_id, role, EngineModel(self.profiles[role]))
        self.serving[role].append(replica)
        return replica

    def at(self, time_s: float, event: Callable[[], None]) -> None:
        """Let something happen at a time; of one time, in the order in which they were asked for."""
        self._count += 1
        heapq.heappush(self._events, (time_s, self._count, event))

    def submit(self, request: TraceRequest) -> None:
        """Let a request arrive at its time."""
        number = self._submitted
        self._submitted += 1
        self.at(request.at_s, lambda: self._arrive(number, request))

    def run(self, until_s: float = float("inf")) -> None:
        """Let time pass until then, or until nothing happens any more."""
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, event = heapq.heappop(self._events)
            event()

    def records_in_order(self) -> list[RequestRecord]:
        """The requests that have ended, in the order in which they were submitted."""
        return [self._records[number] for number in sorted(self._records)]

    def _choose(self, role: Role, in_flight: InFlight, asked_replicas: int) -> VirtualReplica:
        self._turn += 1
        by_id = {replica.replica_id: replica for replica in self.serving[role]}
        order = POLICIES[self.router.policy]
        ordered = order([in_flight.view(name) for name in by_id], self._turn, self.rng)
        if asked := ordered[:asked_replicas]:
            known = [in_flight.view(view.replica_id, by_id[view.replica_id].ongoing_requests) for view in asked]
            ordered = order(known, self._turn, self.rng)
        return by_id[ordered[0].replica_id]

    def _arrive(self, number: int, request: TraceRequest) -> None:
        decode = self._choose(Role.DECODE, self._to_decode, asked_replicas=0)
        self._to_decode.begin(decode.replica_id, str(number), 1)
        journey = _Journey(number, request, self.now_s, decode)
        engine = decode.engine
        decision = prefill_path(
            input_tokens=request.input_tokens,
            cached_tokens=0,
            prefill_backlog_tokens=min(r.engine.queued_prefill_tokens for r in self.serving[Role.PREFILL]),
            decode=DecodeLoad(
                running_requests=len(engine.running),
                max_running_requests=engine.profile.max_running,
                kv_usage_frac=engine.kv_usage_frac,
                local_prefill_tokens=decode.local_prefill_tokens,
            ),
            config=self.router.length,
        )
        if decision.path is PrefillPath.LOCAL:
            journey.local_tokens = request.input_tokens
            decode.local_prefill_tokens += request.input_tokens
            self._decode(journey, ready_s=None)
            return
        asked = self.router.asked(routers=len(self.serving[Role.DECODE]))
        prefill = self._choose(Role.PREFILL, decode.to_prefill, asked)
        prefill.ongoing_requests += 1
        decode.to_prefill.begin(prefill.replica_id, str(number), request.input_tokens)
        computed = ModelRequest(request_id="", input_tokens=request.input_tokens, output_tokens=1)
        self._prefilling[computed] = journey
        prefill.engine.add(computed)
        self._wake(prefill)

    def _decode(self, journey: _Journey, ready_s: float | None) -> None:
        request = ModelRequest(
            request_id="",
            input_tokens=journey.request.input_tokens,
            output_tokens=journey.request.output_tokens,
            kv_ready_s=ready_s,
        )
        self._journeys[request] = journey
        journey.decode.engine.add(request)
        if ready_s is not None:
            self.at(ready_s, lambda: self._wake(journey.decode))
        self._wake(journey.decode)

    def _wake(self, replica: VirtualReplica) -> None:
        if replica.step is not None:
            return
        replica.step = step = replica.engine.plan(self.now_s)
        if step is not None:
            self.at(self.now_s + step.duration_s, lambda: self._end_step(replica, step))

    def _end_step(self, replica: VirtualReplica, step: Step) -> None:
        replica.step = None
        for request in replica.engine.apply(step):
            if replica.role is Role.PREFILL:
                journey = self._prefilling.pop(request)
                replica.ongoing_requests -= 1
                journey.decode.to_prefill.end(replica.replica_id, str(journey.number))
                handoff_s = replica.engine.profile.handoff.seconds_for(request.input_tokens)
                self._decode(journey, ready_s=self.now_s + handoff_s)
            else:
                self._count_token(replica, request)
        self._wake(replica)

    def _count_token(self, replica: VirtualReplica, request: ModelRequest) -> None:
        journey = self._journeys[request]
        journey.output_tokens += 1
        journey.last_s = self.now_s
        if journey.first_s is None:
            journey.first_s = self.now_s
            replica.local_prefill_tokens -= journey.local_tokens
        if request.produced_tokens >= request.output_tokens:
            del self._journeys[request]
            self._to_decode.end(replica.replica_id, str(journey.number))
            self._records[journey.number] = RequestRecord(
                sent_s=journey.sent_s,
                first_token_s=journey.first_s,
                last_token_s=journey.last_s,
                input_tokens=journey.request.input_tokens,
                output_tokens=journey.output_tokens,
            )
