"""What the forecasts of a service's load follow from in its configuration and in its state (pure)."""

from autoscale.decide.config import AutoscaleConfig
from autoscale.forecast.forecaster import Forecaster
from autoscale.policies.policy import ProfiledConfig
from autoscale.types import ControllerState
from kvtransfer.topology import Role


def forecaster_of(config: AutoscaleConfig) -> Forecaster | None:
    """The forecaster of a service that has observed nothing; ``None``: the load of this service is not forecast."""
    if (forecast := config.load_forecast) is None:
        return None
    return Forecaster(config=forecast, tpot_s=config.slo.tpot_s)


def start_ahead_s(config: AutoscaleConfig, state: ControllerState) -> float:
    """Time for which the load is forecast, seconds: the longest start of a role.

    Observed starts count, else those of the policy's profiles. It is 0, which is one step, if neither is known.
    """
    if (observed_s := state.longest_start_s) is not None:
        return observed_s
    policy = config.policy
    return max(policy.start_s(role) for role in Role) if isinstance(policy, ProfiledConfig) else 0.0
