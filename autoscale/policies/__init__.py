"""The policies that can size a live application: one per file, with its configuration class (pure).

Enters: a Snapshot, the ratio and the SLO. Leaves: a Decision, with the replicas that the policy wants of each role.
Bounds and cooldowns are applied in ``autoscale.decide``, not here. A new policy is one file here, one line in POLICIES
and one in PolicyConfig. The policies of other systems are in ``peers``, for the simulator only. A policy of one's own
needs no line here (docs/extending.md).

A policy decides once a *tick*. It has no state: its *memory*, series of numbers by name, comes with the snapshot and
leaves with the decision. In all files ``present`` is the number of replicas that should serve by the decision of the
last tick. The *guard* bounds and delays decisions and keeps the ratio; the *gate* lets new replicas serve. The
*leaders* are the replicas of the ratio's larger role, the *followers* those of its smaller role. A policy can mark a
decision as a *step*, a change that it wants at once, however small: the guard's hysteresis does not hold it back. A
*withdrawn* replica gets no requests, but it still runs and may return; a *victim* must stop. A *start* is the time from
the request for a replica until it is ready.
"""

from collections.abc import Mapping
from typing import Any

from autoscale.extension import ExtensionPoint
from autoscale.policies.default import Default, DefaultConfig
from autoscale.policies.dopd import Dopd, DopdConfig
from autoscale.policies.heteroscale import HeteroScale, HeteroScaleConfig
from autoscale.policies.periodic import Periodic, PeriodicConfig
from autoscale.policies.policy import Policy
from autoscale.policies.queue_depth import QueueDepth, QueueDepthConfig
from autoscale.policies.static import Static, StaticConfig
from autoscale.policies.token_velocity import TokenVelocity, TokenVelocityConfig
from autoscale.policies.wva import Wva, WvaConfig
from kvtransfer.strict_config import StrictConfig

PolicyConfig = (
    DefaultConfig
    | DopdConfig
    | HeteroScaleConfig
    | PeriodicConfig
    | QueueDepthConfig
    | StaticConfig
    | TokenVelocityConfig
    | WvaConfig
)


# Built as ``POLICIES[config.kind](config, ratio=..., slo=...)``.
POLICIES: Mapping[str, type[Policy[Any]]] = {
    "default": Default,
    "dopd": Dopd,
    "heteroscale": HeteroScale,
    "periodic": Periodic,
    "queue_depth": QueueDepth,
    "static": Static,
    "token_velocity": TokenVelocity,
    "wva": Wva,
}

# Policies of one's own, by import path or by the name of an entry point.
OWN_POLICIES = ExtensionPoint(noun="policy", group="tandem.policies", base=Policy, config_base=StrictConfig)
# Names of the policies in ``peers``; a live application that names one is refused with a reason.
SIMULATED_ONLY = ("dynamo", "dynamo_sla", "hpa", "llmd_token_aware", "ray_baseline")
