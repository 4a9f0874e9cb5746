"""The endpoint of a virtual cluster: the live endpoint's rules say which requests wait or are refused (pure)."""

from collections.abc import Callable, Mapping

from autoscale.observe.endpoint_report import endpoint_figures
from autoscale.sim.clock import Clock
from autoscale.sim.journey import Journey
from autoscale.slo import SloConfig
from router.admission import Admission, QueuedRequest
from router.admission_config import AdmissionConfig, Priority

# Time between two searches for requests that have waited too long, seconds; the live endpoint has the same.
_TICK_S = 0.05


class VirtualEndpoint:
    """One replica of the endpoint without API keys; all requests are streams of normal priority."""

    def __init__(
        self,
        config: AdmissionConfig,
        clock: Clock,
        *,
        prefill_replicas: Callable[[], float],
        output_tokens: Callable[[], Mapping[Journey, int]],
        on_pass: Callable[[Journey], None],
        on_refuse: Callable[[Journey, str], None],
    ) -> None:
        """An endpoint without requests.

        Args:
            config: the rules; its API keys are not used.
            clock: the cluster's clock.
            prefill_replicas: returns the number of replicas in routing that compute prompts.
            output_tokens: returns the output tokens so far of each request that streams.
            on_pass: called with a request that goes on to the engines.
            on_refuse: called with a request that is refused or dropped, and the reason.
        """
        self._clock = clock
        self._prefill_replicas, self._output_tokens = prefill_replicas, output_tokens
        self._on_pass, self._on_refuse = on_pass, on_refuse
        self._needs_pace = config.tpot_s is not None
        self._admission = Admission(config, replicas=1, prefill_replicas=max(1, prefill_replicas()), now_s=clock.now_s)
        self._places: dict[Journey, QueuedRequest] = {}
        self._journeys: dict[QueuedRequest, Journey] = {}
        self._is_ticking = False

    @property
    def is_empty(self) -> bool:
        """Whether no request waits."""
        return not self._admission.waiting

    @property
    def waiting(self) -> list[Journey]:
        """The requests that wait."""
        return [journey for place, journey in self._journeys.items() if place.passed_s is None]

    def arrive(self, journey: Journey) -> None:
        """Let a request pass, wait, or be refused."""
        now_s, request = self._clock.now_s, journey.request
        place = QueuedRequest(
            tokens=request.input_tokens,
            most_output_tokens=request.output_tokens,
            is_stream=True,
            key=None,
            priority=Priority.NORMAL,
        )
        self._admission.set_prefill_replicas(max(1, self._prefill_replicas()), now_s)
        if (refusal := self._admission.arrive(place, now_s)) is not None:
            self._on_refuse(journey, refusal.reason)
            return
        self._places[journey], self._journeys[place] = place, journey
        self._let_through()
        if not self._is_ticking:
            self._is_ticking = True
            self._clock.at(now_s + _TICK_S, self._tick)

    def note_first_token(self, journey: Journey) -> None:
        """A request has its first token."""
        self._admission.output(self._places[journey], 1, self._clock.now_s)
        self._let_through()

    def leave(self, journey: Journey) -> None:
        """A request that has passed has ended."""
        place = self._places.pop(journey)
        del self._journeys[place]
        self._admission.leave(place, self._clock.now_s)
        self._let_through()

    def figures(self, slo: SloConfig) -> dict[str, float]:
        """The report to the autoscaler."""
        return endpoint_figures(self._admission.demand.figures(), self._admission.waits(self._clock.now_s), slo)

    def _let_through(self) -> None:
        for place in self._admission.passed(self._clock.now_s):
            self._on_pass(self._journeys[place])

    def _tick(self) -> None:
        """Drop requests that have waited too long, and observe the streams' pace, while there are requests."""
        now_s = self._clock.now_s
        self._admission.set_prefill_replicas(max(1, self._prefill_replicas()), now_s)
        if self._needs_pace:
            self._observe_pace()
        for place in self._admission.late(now_s):
            journey = self._journeys.pop(place)
            del self._places[journey]
            self._on_refuse(journey, "queued_tokens" if place.is_displaced else "late")
        self._let_through()
        self._is_ticking = bool(self._places)
        if self._is_ticking:
            self._clock.at(now_s + _TICK_S, self._tick)

    def _observe_pace(self) -> None:
        for journey, tokens in self._output_tokens().items():
            place = self._places[journey]
            if place.first_token is not None and tokens > place.output_tokens:
                self._admission.output(place, tokens - place.output_tokens, self._clock.now_s)
