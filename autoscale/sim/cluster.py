"""A virtual cluster: the way of a request through prefill and decode engine models by a virtual clock (pure).

``router``'s own code decides which replica gets a request, and where its prompt is prefilled. As in a live application,
each replica of the endpoint has one router for each group, and each decode replica has one for its group's prefill
pool. A group without prefill replicas prefills on its decode replicas. A replica in routing is one that may get new
requests.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from autoscale.engines.engine_model import EngineModel
from autoscale.engines.engine_step import ModelRequest
from autoscale.engines.profile import EngineProfile
from autoscale.observe.request_stats import RequestStats
from autoscale.report import RequestRecord
from autoscale.sim.clock import Clock
from autoscale.sim.endpoint import VirtualEndpoint
from autoscale.sim.journey import Journey
from autoscale.sim.prefill_queue import VirtualPrefillQueue
from autoscale.sim.prefix_feed import PrefixFeed, Sight
from autoscale.sim.replica import VirtualReplica
from autoscale.slo import SloConfig
from autoscale.traces.trace import TraceRequest
from autoscale.types import PoolKey
from kvtransfer.cost import Wire, transfer_end_s
from kvtransfer.topology import Role
from router.admission_config import AdmissionConfig
from router.config import RouterConfig
from router.groups import GroupLoad, choose_group
from router.length import DecodeLoad, PrefillPath, prefill_path
from router.pool_router import PoolRouter
from router.prefix_map import PrefixMap
from router.prompt_keys import PromptKeys


@dataclass(slots=True, eq=False)
class Group:
    """One deployment group.

    Attributes:
        to_decode: the endpoint's routers to the group's decode replicas; requests go to each in turn.
        uplink: the wire that all transfers of the group share; ``None``: only the replicas' network cards limit them.
        replicas: all replicas that have not gone, by name.
        queue: prompts that wait for a prefill replica; ``None``: each is sent at once.
        prefill, decode: names of the replicas of each role in routing.
        waiting: requests that arrived while no decode replica was in routing.
        load: requests that have not ended, and the prompt tokens of those without a first token.
    """

    to_decode: Sequence[PoolRouter]
    uplink: Wire | None
    queue: VirtualPrefillQueue | None
    replicas: dict[str, VirtualReplica] = field(default_factory=dict)
    prefill: Sequence[str] = ()
    decode: Sequence[str] = ()
    waiting: list[Journey] = field(default_factory=list)
    load: GroupLoad = field(default_factory=GroupLoad)


class VirtualCluster(Clock):
    """Groups of replicas, the requests on their way through them, and the clock for both."""

    def __init__(
        self,
        profiles: Mapping[PoolKey, EngineProfile],
        router: RouterConfig,
        rng: random.Random,
        *,
        link_frac: float = 1.0,
        uplink_bytes_per_s: float | None = None,
        prefix_block_tokens: int | None = None,
        slo: SloConfig | None = None,
        admission: AdmissionConfig | None = None,
        capacities: Mapping[PoolKey, tuple[float, float]] | None = None,
        sight: Sight | None = None,
    ) -> None:
        """A cluster without replicas, with the engine of each pool; ``rng`` breaks ties between replicas.

        ``link_frac``: share of the profiles' bandwidth that is available between prefill and decode.
        ``uplink_bytes_per_s``: bandwidth that all transfers of a group share; ``None``: only network cards limit them.
        ``prefix_block_tokens``: tokens of one of a request's ``hash_ids``; ``None``: no block is cached.
        ``slo``: objectives with which replicas scale down the TTFT of long prompts in their reports (``ttft_share``).
        ``admission``: rules of the endpoint; ``None``: every request goes on to the engines at once.
        ``capacities``: standard replicas that a replica of each pool is worth, in its role and for prompts beside it;
        ``None``: all are worth one.
        ``sight``: number of the endpoint's routers, and what all routers see of the prefixes that replicas have cached;
        ``None``: as by default.
        """
        super().__init__(self._arrive)
        self._profiles = profiles
        self._capacities = {key: own for key, (own, _) in (capacities or {}).items()}
        self._prompt_capacities = {key: prompts or own for key, (own, prompts) in (capacities or {}).items()}
        self._config = router
        self._rng = rng
        self._link_frac = link_frac
        self._prefix_block_tokens = prefix_block_tokens
        self._slo = slo or SloConfig()
        sight = sight or Sight()
        self._feed: PrefixFeed | None = None
        if router.policy == "prefix" and prefix_block_tokens is not None:
            self._feed = PrefixFeed(self, sight, router.prefix, prefix_block_tokens)
        names = dict.fromkeys(key.group for key in profiles)
        self._groups = {name: self._group(name, sight.endpoint_routers, uplink_bytes_per_s) for name in names}
        self._endpoint = (
            None
            if admission is None
            else VirtualEndpoint(
                admission,
                self,
                prefill_replicas=self._prompt_replicas,
                output_tokens=self._output_tokens,
                on_pass=lambda journey: self._admit(self._choose_group(), journey),
                on_refuse=self._refuse,
            )
        )
        # Timelines by number of the arrival; None until the request has ended.
        self._records: list[RequestRecord | None] = []
        # The journey of each request in an engine.
        self._journeys: dict[ModelRequest, Journey] = {}

    def _group(self, name: str, routers: int, uplink_bytes_per_s: float | None) -> Group:
        """A group without replicas; ``routers``: number of the endpoint's routers to it."""
        return Group(
            [self._router(PoolKey(name, Role.DECODE), routers) for _ in range(routers)],
            uplink=None if uplink_bytes_per_s is None else Wire(uplink_bytes_per_s),
            queue=self._prefill_queue(name),
        )

    def add(self, key: PoolKey, replica_id: str) -> VirtualReplica:
        """A new replica, ready but not in routing."""
        profile = self._profiles[key]
        replica = VirtualReplica(
            replica_id,
            key,
            EngineModel(profile, self._prefix_block_tokens),
            RequestStats(lambda: self.now_s, self._slo.ttft_share),
            self._to_prefill(key),
            Wire(profile.handoff.bytes_per_s * self._link_frac),
            clock=self,
            on_tokens=self._take_tokens,
        )
        self._groups[key.group].replicas[replica_id] = replica
        if self._feed is not None:
            self._feed.begin_replica(replica)
        return replica

    def replica(self, key: PoolKey, replica_id: str) -> VirtualReplica:
        """A replica that has not gone. Raises KeyError: there is none of this name."""
        return self._groups[key.group].replicas[replica_id]

    def prefix_maps(self, key: PoolKey) -> Sequence[PrefixMap]:
        """What each router to a pool knows of its replicas' prefixes; empty: they do not route by prefixes."""
        return () if self._feed is None else self._feed.maps(key)

    def _to_prefill(self, key: PoolKey) -> PoolRouter:
        """The router of a replica to its group's prefill pool; a prefill replica does not use it."""
        if key.role is Role.PREFILL:
            return PoolRouter(self._config.policy, 0, self._rng)
        # Two stand for any number of decode replicas above one: each of them routes to the prefill pool.
        return self._router(PoolKey(key.group, Role.PREFILL), routers=2)

    def _router(self, key: PoolKey, routers: int) -> PoolRouter:
        """One of several routers to a pool."""
        policy, asked = self._config.policy, self._config.asked(routers)
        if self._feed is None or key not in self._profiles:  # a decode replica of a group without prefill
            return PoolRouter(policy, asked, self._rng)
        is_decode = key.role is Role.DECODE
        return PoolRouter(
            policy,
            asked,
            self._rng,
            prefixes=self._feed.router_map(key, self._profiles[key]),
            request_tokens=self._config.prefix.request_tokens if is_decode else None,
        )

    def route(self, key: PoolKey, names: Sequence[str]) -> None:
        """Route a pool's requests to these replicas from now on."""
        group = self._groups[key.group]
        if key.role is Role.PREFILL:
            group.prefill = names
            if group.queue is not None:
                group.queue.route(names)
            return
        for router in group.to_decode:
            router.set_replicas(names)
        group.decode = names
        if names:
            waiting, group.waiting = group.waiting, []
            for journey in waiting:
                self._enter(group, journey)

    def replay(self, trace: Sequence[TraceRequest], counts: Mapping[PoolKey, int]) -> list[RequestRecord]:
        """The timeline of every request of a trace, in the trace's order, on ``counts`` new replicas of each pool."""
        for key, count in counts.items():
            names = [f"{key.role}-{index}" for index in range(count)]
            for name in names:
                self.add(key, name)
            self.route(key, names)
        self.submit(trace)
        self.run()
        return self.records()

    def drain(self, replica: VirtualReplica, on_empty: Callable[[], None]) -> None:
        """Let a replica that has left routing finish its requests; then call ``on_empty``."""
        replica.on_empty = on_empty
        self._leave_if_empty(replica)

    def kill(self, replica: VirtualReplica) -> None:
        """Let a replica die.

        All requests of a decode replica are lost; their prompts that prefill replicas have are still computed there.
        Prompts on a prefill replica, and prompts whose KV it still keeps, are computed on their decode replicas.
        """
        replica.die()
        self._forget(replica)
        group, engine = self._groups[replica.key.group], replica.engine
        if replica.key.role is Role.DECODE:
            for journey in self._journeys.values():
                if journey.decode is replica:
                    self._lose(journey)
            for request in (*engine.running, *engine.waiting, *engine.deferred):
                del self._journeys[request]
            for journey in queue.lose(replica) if (queue := group.queue) is not None else ():
                self._lose(journey)
            return
        # A prefill engine has no deferred requests: they wait for KV from another engine.
        for request in (*engine.running, *engine.waiting):
            journey = self._journeys.pop(request)
            journey.decode.to_prefill.end(replica.replica_id, journey.name)
            self._prefill_locally_instead(journey)
        unread = [journey for journey in self._journeys.values() if journey.kv_source is replica]
        for journey in unread:
            journey.kv_source = journey.prefilled_s = None
            journey.decode.engine.abort(journey.engine_requests[Role.DECODE])
            del self._journeys[journey.engine_requests[Role.DECODE]]
            self._prefill_locally(journey)

    @property
    def is_done(self) -> bool:
        """Whether every request has arrived and ended."""
        is_endpoint_empty = self._endpoint is None or self._endpoint.is_empty
        is_cluster_empty = not any(group.load.requests for group in self._groups.values())
        return not self.has_arrivals and is_endpoint_empty and is_cluster_empty

    @property
    def is_awaited(self) -> bool:
        """Whether requests wait in a group without decode replicas."""
        return any(group.waiting for group in self._groups.values())

    def give_up(self) -> None:
        """Count the requests that have not ended as failed."""
        waiting = (journey for group in self._groups.values() for journey in group.waiting)
        at_endpoint = () if self._endpoint is None else self._endpoint.waiting
        queued = (journey for group in self._groups.values() for journey in group.queue or ())
        for journey in (*self._journeys.values(), *waiting, *queued, *at_endpoint):
            if not journey.is_lost:  # a lost one has a record, but a prefill engine may still have its prompt
                self._records[journey.number] = journey.record(error="not ended")

    def records(self) -> list[RequestRecord]:
        """The requests that have ended or were given up, in the order of their arrivals."""
        return [record for record in self._records if record is not None]

    def report(self, replica: VirtualReplica) -> dict[str, float]:
        """The report of a replica to the autoscaler, as in ``VirtualReplica.report``."""
        replica.settle()
        if replica.key.role is Role.DECODE:
            # While several steps are one event, timers do not learn of each token.
            for request in replica.engine.running:
                timer = self._journeys[request].timer
                timer.add_tokens(replica.engine.produced(request) - timer.tokens, self.now_s)
        return replica.report()

    def _arrive(self, request: TraceRequest) -> None:
        # Only whole blocks of a prompt are cached.
        blocks = request.input_tokens // self._prefix_block_tokens if self._prefix_block_tokens else 0
        journey = Journey(len(self._records), request, request.hash_ids[:blocks])
        if self._feed is not None and self._prefix_block_tokens:
            journey.prompt = PromptKeys(
                keys=request.hash_ids[:blocks], piece_tokens=self._prefix_block_tokens, tokens=request.input_tokens
            )
        self._records.append(None)
        if self._endpoint is None:
            self._admit(self._choose_group(), journey)
        else:
            self._endpoint.arrive(journey)

    def _refuse(self, journey: Journey, reason: str) -> None:
        """Record that the endpoint has refused a request."""
        self._records[journey.number] = journey.record(error=f"refused: {reason}")

    def _prompt_replicas(self) -> float:
        """Replicas in routing that compute prompts, in those of the first group: prefill, or decode without prefill."""
        total = 0.0
        for name, group in self._groups.items():
            role, names = (Role.PREFILL, group.prefill) if group.prefill else (Role.DECODE, group.decode)
            total += len(names) * self._prompt_capacities.get(PoolKey(name, role), 1.0)
        return total

    def _output_tokens(self) -> dict[Journey, int]:
        """Output tokens so far of each request in a decode engine's batch."""
        tokens = {}
        for group in self._groups.values():
            for replica in group.replicas.values():
                if replica.key.role is Role.DECODE:
                    replica.settle()
                    engine = replica.engine
                    tokens.update({self._journeys[request]: engine.produced(request) for request in engine.running})
        return tokens

    def endpoint_report(self) -> dict[str, float] | None:
        """The endpoint's report to the autoscaler; ``None``: there is no admission, so no request waits there."""
        return None if self._endpoint is None else self._endpoint.figures(self._slo)

    def _admit(self, group: Group, journey: Journey) -> None:
        """Count a request in its group; route it, or let it wait for the first decode replica."""
        group.load.requests += 1
        group.load.prompt_tokens += journey.request.input_tokens
        if group.decode:
            self._enter(group, journey)
        else:
            group.waiting.append(journey)

    def _choose_group(self) -> Group:
        if len(self._groups) == 1:
            return next(iter(self._groups.values()))
        serving = {name: group for name, group in self._groups.items() if group.decode}
        groups = serving or self._groups
        loads = {name: group.load for name, group in groups.items()}
        capacities = {
            name: len(group.decode) * self._capacities.get(PoolKey(name, Role.DECODE), 1.0)
            for name, group in groups.items()
        }
        return groups[choose_group(loads, capacities, self._rng)]

    def _enter(self, group: Group, journey: Journey) -> None:
        """Route a request to a decode replica, and decide where its prompt is prefilled."""
        # Each router gets requests in turn.
        journey.to_decode = group.to_decode[journey.number % len(group.to_decode)]
        decode = self._route(journey, journey.to_decode, group.replicas, lambda replica: replica.ongoing_requests)
        request = journey.request
        journey.decode = decode
        journey.timer = decode.requests.begin(request.at_s, request.input_tokens, is_streamed=True)
        # Among decode replicas every request weighs the same.
        journey.to_decode.begin(decode.replica_id, journey.name, 1, journey.prompt, self.now_s)
        decode.ongoing_requests += 1
        decode.settle()  # ``_path`` reads the engine's state
        if group.prefill and self._path(journey) is PrefillPath.REMOTE:
            self._prefill_remotely(group, journey)
        else:
            self._prefill_locally(journey)

    def _path(self, journey: Journey) -> PrefillPath:
        decode, engine = journey.decode, journey.decode.engine
        load = DecodeLoad(
            running_requests=len(engine.running),
            max_running_requests=engine.profile.max_running,
            kv_usage_frac=engine.kv_usage_frac,
            local_prefill_tokens=decode.local_prefill_tokens,
            output_tokens_mean=decode.requests.output_tokens_mean,
        )
        return prefill_path(
            input_tokens=journey.request.input_tokens,
            cached_tokens=engine.prefixes.leading_tokens(journey.block_hashes),
            prefill_backlog_tokens=decode.backlog.tokens(self.now_s),
            decode=load,
            config=self._config.length,
        ).path

    def _prefill_locally(self, journey: Journey) -> None:
        if journey.is_lost:  # its decode replica died before its prefill replica
            return
        journey.local_tokens = journey.request.input_tokens
        journey.decode.local_prefill_tokens += journey.local_tokens
        self._decode(journey, None)

    def _prefill_remotely(self, group: Group, journey: Journey) -> None:
        journey.decode.backlog.sent(journey.request.input_tokens)
        if group.queue is None:
            self._prefill_on(group, journey, self._prefill_replica(group, journey))
            return
        prefixes, prompt = journey.decode.to_prefill.prefixes, journey.prompt
        overlaps = {} if prefixes is None or prompt is None else prefixes.overlap_tokens(prompt)
        group.queue.add(journey, overlaps)

    def _prefill_replica(self, group: Group, journey: Journey) -> str:
        """The replica to which a decode replica sends a prompt at once."""
        router = journey.decode.to_prefill
        router.set_replicas(group.prefill)
        return self._route(
            journey, router, group.replicas, lambda replica: replica.engine.queued_prefill_tokens
        ).replica_id

    def _prefill_on(self, group: Group, journey: Journey, replica_id: str) -> None:
        prefill = group.replicas[replica_id]
        prefill.ongoing_requests += 1
        journey.decode.to_prefill.begin(
            replica_id, journey.name, journey.request.input_tokens, journey.prompt, self.now_s
        )
        request = journey.model_request(Role.PREFILL)
        self._journeys[request] = journey
        prefill.engine.add(request)
        prefill.wake()

    def _prefill_queue(self, name: str) -> VirtualPrefillQueue | None:
        """The queue of a group; ``None``: decode replicas send prompts at once."""
        config = self._config.prefill_queue
        if config.strategy == "direct":
            return None
        return VirtualPrefillQueue(
            config,
            self._slo,
            self,
            on_bind=lambda journey, replica_id: self._prefill_on(self._groups[name], journey, replica_id),
            on_leave=self._prefill_locally_instead,
        )

    def _prefill_locally_instead(self, journey: Journey) -> None:
        """Let decode compute a prompt that no prefill replica has computed."""
        journey.decode.backlog.failed(journey.request.input_tokens)
        self._prefill_locally(journey)

    def _route(
        self,
        journey: Journey,
        router: PoolRouter,
        replicas: Mapping[str, VirtualReplica],
        queue: Callable[[VirtualReplica], int],
    ) -> VirtualReplica:
        """The replica that a router chooses for a request; ``queue``: what a replica answers if it is asked."""
        ordered = router.order(journey.prompt)
        if polled := router.ask(ordered):
            queues = {name: queue(replicas[name]) for name in polled}
            ordered = router.informed(ordered, queues, journey.prompt)
        chosen = replicas[ordered[0].replica_id]
        journey.expected_tokens[chosen.key.role] = ordered[0].overlap_tokens
        if self._feed is not None and journey.prompt is not None:
            self._feed.accept(chosen, journey.prompt)
        return chosen

    def _note_found(self, journey: Journey, router: PoolRouter, replica: VirtualReplica, found_tokens: int) -> None:
        """Tell a router how much of a prompt a replica had in its cache."""
        if router.prefixes is not None and journey.prompt is not None:
            router.prefixes.found(
                replica.replica_id,
                journey.prompt,
                expected_tokens=journey.expected_tokens[replica.key.role],
                found_tokens=found_tokens,
            )

    def _decode(self, journey: Journey, kv_ready_s: float | None) -> None:
        """Put a request into its decode engine.

        ``kv_ready_s``: time at which its KV arrives, when ``_end_pull`` wakes the replica; ``None``: the decode engine
        computes its prompt.
        """
        request = journey.model_request(Role.DECODE, kv_ready_s)
        self._journeys[request] = journey
        journey.decode.engine.add(request)
        if kv_ready_s is None:
            journey.decode.wake()

    def _take_tokens(
        self, replica: VirtualReplica, first: Sequence[ModelRequest], first_s: float, ended: Sequence[ModelRequest]
    ) -> None:
        """Note the first tokens, which came at ``first_s``, and the last tokens, which came now."""
        if replica.key.role is Role.PREFILL:
            for request in ended:
                self._hand_over(self._journeys.pop(request), replica)
            return
        for request in first:
            self._begin_stream(self._journeys[request], first_s)
        for request in ended:
            # The replica's next step begins at the end of the step with the last token.
            self._finish(self._journeys.pop(request), replica.step_began_s)

    def _hand_over(self, journey: Journey, prefill: VirtualReplica) -> None:
        """Begin to move the KV of a computed prompt to its decode replica."""
        decode, tokens = journey.decode, journey.request.input_tokens
        prefill.ongoing_requests -= 1
        if (queue := self._groups[prefill.key.group].queue) is not None:
            queue.computed(journey)
        if journey.is_lost:
            journey.release_kv(prefill)
            self._leave_if_empty(prefill)
            return
        prefill.unread_kv_requests += 1
        decode.to_prefill.end(prefill.replica_id, journey.name)
        decode.backlog.answered(tokens, prefill.replica_id, prefill.engine.queued_prefill_tokens, self.now_s)
        journey.prefilled_s = self.now_s
        journey.kv_source = prefill
        # Blocks that decode's prefix cache has are not pulled.
        held_tokens = decode.engine.prefixes.leading_tokens(journey.block_hashes)
        self._note_found(journey, journey.to_decode, decode, held_tokens)
        self._note_found(journey, decode.to_prefill, prefill, journey.engine_requests[Role.PREFILL].cached_tokens)
        pulled_tokens = max(1, tokens - held_tokens)
        # The pull begins now, even if decode has no room yet. So a full decode replica holds back prefill less than it
        # does live.
        ready_s = self._kv_arrival_s(pulled_tokens, prefill, decode)
        self._decode(journey, ready_s)
        self.at(ready_s, self._end_pull, journey, prefill)

    def _kv_arrival_s(self, tokens: int, prefill: VirtualReplica, decode: VirtualReplica) -> float:
        """Time at which the KV of ``tokens`` prompt tokens, requested now, is at the decode replica, seconds."""
        handoff, uplink = prefill.engine.profile.handoff, self._groups[prefill.key.group].uplink
        wires = [prefill.card, decode.card, *([] if uplink is None else [uplink])]
        size_bytes = tokens * handoff.kv_bytes_per_token
        arrival_s = transfer_end_s(self.now_s, size_bytes, handoff.base_s, wires)
        decode.pulled_bytes += size_bytes
        decode.pull_s += arrival_s - handoff.base_s - self.now_s
        return arrival_s

    def _end_pull(self, journey: Journey, prefill: VirtualReplica) -> None:
        """Free the KV of a prompt on its prefill replica, since decode has pulled it."""
        if journey.kv_source is not prefill:
            return  # the prefill replica has died in the meantime
        journey.kv_source = None
        prefill.unread_kv_requests -= 1
        journey.release_kv(prefill)
        if prefill.engine.waiting and prefill.step is None:  # its prompts waited for the room that is free now
            prefill.wake()
        self._leave_if_empty(prefill)
        if not journey.decode.is_dead:
            journey.decode.wake()

    def _begin_stream(self, journey: Journey, first_s: float) -> None:
        """Note the first token of a request."""
        decode = journey.decode
        journey.first_s = first_s
        self._groups[decode.key.group].load.prompt_tokens -= journey.request.input_tokens
        decode.local_prefill_tokens -= journey.local_tokens
        journey.timer.add_tokens(1, first_s)
        if journey.prefilled_s is None:
            self._note_found(journey, journey.to_decode, decode, journey.engine_requests[Role.DECODE].cached_tokens)
        if self._endpoint is not None:
            self._endpoint.note_first_token(journey)
        if journey.prefilled_s is not None:
            decode.handoffs += 1
            decode.handoff_s += first_s - journey.prefilled_s

    def _finish(self, journey: Journey, last_s: float) -> None:
        """Note the last token of a request, and with it all tokens that its timer has not got yet."""
        decode = journey.decode
        self._end(journey)
        decode.ongoing_requests -= 1
        journey.timer.add_tokens(journey.request.output_tokens - journey.timer.tokens, last_s)
        journey.timer.end()
        self._leave_if_empty(decode)
        self._records[journey.number] = journey.record(last_s=last_s)

    def _lose(self, journey: Journey) -> None:
        """Record that the decode replica of a request has died."""
        if journey.is_lost:
            return
        journey.is_lost = True
        group = self._end(journey)
        if journey.first_s is None:
            group.load.prompt_tokens -= journey.request.input_tokens
        self._records[journey.number] = journey.record(error="its decode replica died")

    def _end(self, journey: Journey) -> Group:
        """Remove a request from the load of its decode replica and of its group, which is returned."""
        group = self._groups[journey.decode.key.group]
        journey.to_decode.end(journey.decode.replica_id, journey.name)
        group.load.requests -= 1
        if self._endpoint is not None:
            self._endpoint.leave(journey)
        return group

    def _leave_if_empty(self, replica: VirtualReplica) -> None:
        """Let a draining replica go when it is empty."""
        if replica.on_empty is not None and replica.is_empty:
            on_empty, replica.on_empty = replica.on_empty, None
            self._forget(replica)
            on_empty()

    def _forget(self, replica: VirtualReplica) -> None:
        """Remove a replica that has gone."""
        del self._groups[replica.key.group].replicas[replica.replica_id]
        if self._feed is not None:
            self._feed.end_replica(replica)
            if replica.to_prefill.prefixes is not None:
                self._feed.end_map(PoolKey(replica.key.group, Role.PREFILL), replica.to_prefill.prefixes)
