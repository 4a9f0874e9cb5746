"""The policies of other systems, with which the simulator compares Tandem (pure).

The same enters and leaves as in ``autoscale.policies``, and the same words of ours hold. Each file names the other
system, its version and the source files that it follows. Only ``autoscale.sim`` reads this room: these policies cannot
size a live application.

Each policy here sizes a role by itself, so its decisions carry the ratio of their own counts (``independent``).
"""

from collections.abc import Mapping
from typing import Any

from autoscale import policies
from autoscale.policies.peers.dynamo import Dynamo, DynamoConfig
from autoscale.policies.peers.dynamo_sla import DynamoSla, DynamoSlaConfig
from autoscale.policies.peers.hpa import Hpa, HpaConfig
from autoscale.policies.peers.llmd_token_aware import LlmdTokenAware, LlmdTokenAwareConfig
from autoscale.policies.peers.serve_baseline import RayBaseline, RayBaselineConfig
from autoscale.policies.policy import Policy

# The configuration of every policy that a simulation may name.
SimPolicyConfig = (
    policies.PolicyConfig | DynamoConfig | DynamoSlaConfig | HpaConfig | LlmdTokenAwareConfig | RayBaselineConfig
)
SIM_POLICIES: Mapping[str, type[Policy[Any]]] = {
    **policies.POLICIES,
    "dynamo": Dynamo,
    "dynamo_sla": DynamoSla,
    "hpa": Hpa,
    "llmd_token_aware": LlmdTokenAware,
    "ray_baseline": RayBaseline,
}
