"""What policies are told that size replicas from the profiles of their engines (pure)."""

from pydantic import BaseModel, ConfigDict, Field

from autoscale.profile import EngineProfile, ProfileRef
from kvtransfer.topology import Role


class ProfiledConfig(BaseModel):
    """The engines of both roles, and how long they take to start."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    prefill: ProfileRef = Field(description="The profile of one prefill replica, or the path of its file.")
    decode: ProfileRef = Field(description="The profile of one decode replica, or the path of its file.")
    prefill_start_s: float | None = Field(None, ge=0.0, description="From asked for to ready; the profile's.")
    decode_start_s: float | None = Field(None, ge=0.0, description="From asked for to ready; the profile's.")

    def profile(self, role: Role) -> EngineProfile:
        """Of one replica of a role."""
        return self.prefill if role is Role.PREFILL else self.decode

    def start_s(self, role: Role) -> float:
        """How long a replica of a role takes from asked for to ready, seconds."""
        own = self.prefill_start_s if role is Role.PREFILL else self.decode_start_s
        return self.profile(role).start_s if own is None else own
