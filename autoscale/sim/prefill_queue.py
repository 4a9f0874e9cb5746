"""The queue of one group's prompts in front of its prefill replicas, by a virtual clock (pure)."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from autoscale.sim.clock import Clock
from autoscale.sim.journey import Journey
from autoscale.sim.replica import VirtualReplica
from autoscale.slo import SloConfig
from kvtransfer.topology import Role
from router.config import PrefillQueueConfig
from router.prefill_order import WaitingPrompt
from router.prefill_scheduler import PrefillScheduler

# Time from the end of a prompt on prefill until the next prompt of the queue is there, seconds: the answer to decode,
# the call of the queue, its answer, the call of the replica. Assumed: four calls between processes of about a
# millisecond each.
_BINDING_S = 0.005


class VirtualPrefillQueue:
    """A ``PrefillScheduler``, and the requests whose prompts wait in it."""

    def __init__(
        self,
        config: PrefillQueueConfig,
        slo: SloConfig,
        clock: Clock,
        *,
        on_bind: Callable[[Journey, str], None],
        on_leave: Callable[[Journey], None],
    ) -> None:
        """An empty queue without replicas.

        ``on_bind``: called with a request and the replica that gets its prompt. ``on_leave``: called with a request
        that waits while no prefill replica is in routing.
        """
        self._scheduler = PrefillScheduler(config)
        self._slo = slo
        self._clock = clock
        self._on_bind, self._on_leave = on_bind, on_leave
        self._journeys: dict[str, Journey] = {}

    def __iter__(self) -> Iterator[Journey]:
        return iter(self._journeys.values())

    def route(self, names: Sequence[str]) -> None:
        """Bind prompts to these replicas from now on."""
        self._scheduler.set_replicas(names, self._clock.now_s)
        if not names:
            journeys = list(self)
            for journey in journeys:
                self.leave(journey)
            for journey in journeys:
                self._on_leave(journey)
        self._bind()

    def add(self, journey: Journey, overlap_tokens: Mapping[str, int]) -> None:
        """Let the prompt of a request wait for a replica; ``overlap_tokens``: cached tokens of it, by replica."""
        now_s, tokens = self._clock.now_s, journey.request.input_tokens
        prompt = WaitingPrompt(
            prompt_id=journey.name,
            tokens=tokens,
            arrived_s=journey.request.at_s,
            deadline_s=journey.request.at_s + self._slo.objective_s(tokens),
            overlap_tokens=overlap_tokens,
        )
        self._journeys[journey.name] = journey
        self._scheduler.add(prompt, now_s)
        self._bind()

    def leave(self, journey: Journey) -> None:
        """The prompt of a request waits no longer."""
        del self._journeys[journey.name]
        self._scheduler.end(journey.name, self._clock.now_s)

    def lose(self, decode: VirtualReplica) -> list[Journey]:
        """Remove and return the waiting requests of a decode replica."""
        lost = [journey for journey in self if journey.decode is decode]
        for journey in lost:
            self.leave(journey)
        return lost

    def computed(self, journey: Journey) -> None:
        """A prefill replica has computed the prompt of a request; soon it gets the next one."""
        self._clock.at(self._clock.now_s + _BINDING_S, self._end, journey.name)

    def _end(self, name: str) -> None:
        self._scheduler.end(name, self._clock.now_s)
        self._bind()

    def _bind(self) -> None:
        for prompt, replica_id in self._scheduler.bind(self._clock.now_s):
            journey = self._journeys.pop(prompt.prompt_id)
            journey.expected_tokens[Role.PREFILL] = prompt.overlap_tokens.get(replica_id, 0)
            self._on_bind(journey, replica_id)
