"""What the policy has from the coordinator: settings of its services, as controllers, and which counts are stored."""

from collections.abc import Callable, Mapping
from functools import partial

from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.containment import Call, PolicyLate, Run, directly
from autoscale.decide.controller import Controller
from autoscale.decide.decision_log import config_line
from autoscale.decide.ray_policy_limit import LimitedCalls
from autoscale.decide.status import Settings
from autoscale.decide.tuning import Pools
from autoscale.extension import Extension
from autoscale.forecast.forecaster import ForecastState
from autoscale.ray_coordinator_client import CoordinatorClient, Cycle, Ticked
from autoscale.topology_config import TopologyConfig
from autoscale.types import ControllerState, Decision, PoolKey


class Link:
    """The last answers of the coordinator.

    Attributes:
        client: sends and receives, in its own thread once it is started.
        controllers: one for each service, with its present configuration.
        pools: pools of each service, as deployed.
        topology: how nodes are read, and shared limits; ``None``: placement ignores nodes.
        cordoned: nodes and switches on which no replica may start.
        awaited: services that sleep and for which requests wait.
        resumed: controller states from before a restart, until the policy takes them.
        resumed_forecasts: what is remembered of forecasts, in the same way.
        confirmed: replica counts of the newest plans that the coordinator has confirmed; ``None``: of no plan yet.
    """

    def __init__(self, app: str, complain: Callable[[BaseException, str | None], None]) -> None:
        """``complain``: logs an error, once for each cause (a text); may be called in the thread of a tick."""
        self.app = app
        self.client = CoordinatorClient(app)
        self.controllers: dict[str, Controller] = {}
        self.pools: dict[str, Pools] = {}
        self.topology: TopologyConfig | None = None
        self.cordoned: frozenset[str] = frozenset()
        self.awaited: frozenset[str] = frozenset()
        self.resumed: dict[str, ControllerState] | None = None
        self.resumed_forecasts: dict[str, ForecastState] | None = None
        self.confirmed: Mapping[PoolKey, int] | None = None
        self._complain = complain
        # Calls of policies of one's own, by service and kind. They outlive a changed configuration: a call may go on.
        self._calls: dict[tuple[str, str], LimitedCalls] = {}
        # Configurations that are not in the log yet: the service, the configuration, and why it changed.
        self._config_lines: list[tuple[str, AutoscaleConfig, str]] = []

    def poll(self) -> None:
        """Take what the coordinator has sent. Waits for nothing."""
        while not self.client.news.empty():
            news = self.client.news.get()
            if news.settings is not None:
                self._take(news.settings)
            if news.awaited is not None:
                self.awaited = news.awaited
            self.confirmed = news.confirmed or self.confirmed  # an answer to ``join`` confirms no counts
            if news.error is not None:
                self._complain(news.error, None)

    def _take(self, settings: Settings) -> None:
        """Take new settings; a service whose configuration has changed gets a new controller."""
        if not self.controllers:  # the first answer: later, states of this process are newer
            self.resumed = dict(settings.states) or None
            self.resumed_forecasts = dict(settings.forecasts) or None
        self.cordoned, self.topology = settings.cordoned, settings.topology
        # Pools of a service that has left stay: a cycle that runs in the thread may still read them.
        self.pools |= {name: service.pools for name, service in settings.services.items()}
        controllers = {}
        for name, service in settings.services.items():
            controller = self.controllers.get(name)
            if controller is None or controller.config != service.config:
                controller = Controller(service.config, self._runner(name, service.config))
                self._config_lines.append((name, service.config, service.why))
            controllers[name] = controller
        self.controllers = controllers

    def _runner(self, service: str, config: AutoscaleConfig) -> Run:
        """How the policy of a service is called: with a limit of time if it is one's own. An error is logged."""
        run, kind = directly, config.policy.kind
        if isinstance(config.policy, Extension):
            calls = self._calls.setdefault((service, kind), LimitedCalls())
            run = partial(calls.run, limit_s=config.policy_timeout_s)

        def logged(call: Call) -> Decision:
            try:
                return run(call)
            except PolicyLate:
                late = f"policy {kind} of {service} takes longer than {config.policy_timeout_s:g} s (policy_timeout_s)"
                self._complain(TimeoutError(late), late)
                raise
            except BaseException as error:
                self._complain(error, f"policy {kind} of {service}: {type(error).__name__}")  # its message may vary
                raise

        return logged

    @property
    def unlogged_configs(self) -> int:
        """Number of configurations that are not in the log yet."""
        return len(self._config_lines)

    def take_config_lines(self, number: int, now_s: float) -> list[str]:
        """The log lines of the first ``number`` configurations that are not in the log yet."""
        taken, self._config_lines = self._config_lines[:number], self._config_lines[number:]
        return [config_line(name, config, now_s, why) for name, config, why in taken]

    def publish(self, ticked: Ticked, lines: list[str], call_p99_s: float) -> None:
        """Let the client send a cycle; see ``Cycle`` for the arguments."""
        self.client.cycles.put(Cycle(ticked, lines, call_p99_s))
