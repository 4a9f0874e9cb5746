"""Messages between Tandem's policy, its coordinator, commands and metrics, and the coordinator's stored state (pure).

The policy (``autoscale.ray_policy``) runs in Ray Serve's controller; the coordinator is an actor of the application.
After each cycle the policy sends a ``CycleRecord`` and gets ``Settings``. Commands and metrics get a ``Status``.
Each message is a frozen dataclass. ``CYCLE``, ``SETTINGS`` and ``STATUS`` turn it into plain values to send, so
processes with different versions of this code understand each other.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter, ValidationError

from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.tuning import Pools
from autoscale.forecast.forecaster import ForecastState
from autoscale.load_forecast import LoadForecast
from autoscale.policies.heteroscale import Signal
from autoscale.topology_config import TopologyConfig
from autoscale.types import ControllerState, Latency, Places, Plan, PoolKey, Traffic
from kvtransfer.topology import Node

logger = logging.getLogger("ray.serve")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord:
    """The plan of one service, the replica ids of each pool, and what the plan is based on: latency, traffic, signals.

    ``collector_faults``: what is wrong with the figures of its collector. ``signals``: those that were observed, from
    ``observed_signals``. ``forecast``: the load one start ahead; ``None``: it is not forecast, or not yet.
    """

    plan: Plan
    running: Mapping[PoolKey, tuple[str, ...]]
    draining: Mapping[PoolKey, tuple[str, ...]]
    latency: Latency
    traffic: Traffic
    collector_faults: tuple[str, ...] = ()
    signals: Mapping[Signal, float] = field(default_factory=dict)
    forecast: LoadForecast | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleRecord:
    """The plans of one cycle by service, from the policy to the coordinator.

    Attributes:
        nodes: nodes of the cluster; ``None``: the application has no topology.
        places: pool and nodes of each replica that is on nodes; ``None``: the application has no topology.
        policy_call_p99_s: 99th percentile of the time that a policy call takes. Calls that begin or end a tick are left
            out: Ray Serve calls the policy more often than it ticks.
        is_hooked: whether Ray Serve's scheduler follows the plans' choice of replicas and nodes.
        forecasts: what is remembered of forecasts, of the services where it has changed since the last cycle.
    """

    services: Mapping[str, PlanRecord]
    nodes: tuple[Node, ...] | None
    places: Places | None
    policy_call_p99_s: float
    is_hooked: bool
    forecasts: Mapping[str, ForecastState] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    """The configuration of one service from now on; ``why``: the cause of the last change, for the decision log."""

    config: AutoscaleConfig
    pools: Pools
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings that the coordinator sends to the policy.

    Attributes:
        version: grows with each change.
        cordoned: nodes and switches that get no new replica.
        states: controller states of the previous policy, by service, for a policy that has just started; otherwise
            empty.
        forecasts: in the same way, what is remembered of forecasts.
    """

    version: int
    services: Mapping[str, ServiceSettings]
    topology: TopologyConfig | None
    cordoned: frozenset[str]
    states: Mapping[str, ControllerState] = field(default_factory=dict)
    forecasts: Mapping[str, ForecastState] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceStatus:
    """One service of a running application.

    ``tuned``: fields of the configuration that differ from the deployed ones; ``last``: its last plan, ``None`` before
    the first.
    """

    config: AutoscaleConfig
    tuned: Mapping[str, Any]
    pools: Pools
    last: PlanRecord | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A running application, from the coordinator to commands and metrics.

    Fields that ``CycleRecord`` has too are from the last cycle.
    """

    log_path: str
    cordoned: tuple[str, ...]
    topology: TopologyConfig | None
    services: Mapping[str, ServiceStatus]
    nodes: tuple[Node, ...] | None = None
    places: Places | None = None
    policy_call_p99_s: float | None = None
    is_hooked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorState:
    """The state that outlives a coordinator.

    Attributes:
        changes: values that were tuned since the deployment, by service, nested as in the configuration.
        version: version of the settings.
        cordoned: nodes and switches that get no new replica.
        cycle: the last plans; ``None`` before the first.
        deployed_s: when the application was deployed last, as Serve says; ``None``: Serve did not say.
    """

    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    version: int = 0
    cordoned: tuple[str, ...] = ()
    cycle: CycleRecord | None = None
    deployed_s: float | None = None

    def to_json(self) -> bytes:
        """The state as JSON."""
        # Not dump_json: it writes an infinite number as null, which is refused when the state is read again.
        return json.dumps(_STATE.dump_python(self, mode="json")).encode()


CYCLE = TypeAdapter(CycleRecord)
SETTINGS = TypeAdapter(Settings)
STATUS = TypeAdapter(Status)
_STATE = TypeAdapter(CoordinatorState)
_FORECAST = TypeAdapter(ForecastState)


def stored_state(stored: bytes | None) -> CoordinatorState:
    """Read a stored state; returns an empty one if nothing is stored, or if this version cannot read it."""
    try:
        return CoordinatorState() if stored is None else _STATE.validate_python(json.loads(stored))
    except ValidationError as error:
        logger.warning("the coordinator's stored state cannot be read, and it starts as deployed: %s", error)
        return CoordinatorState()


def forecast_to_json(state: ForecastState) -> bytes:
    """What is remembered of a service's forecasts, as JSON. It has the load of a day, so it is stored by itself."""
    return _FORECAST.dump_json(state)


def stored_forecast(stored: bytes | None) -> ForecastState | None:
    """Read what is stored of a service's forecasts; ``None``: nothing, or this version cannot read it."""
    try:
        return None if stored is None else _FORECAST.validate_json(stored)
    except ValidationError as error:
        logger.warning("the stored load of a service cannot be read, so its forecasts begin anew: %s", error)
        return None
