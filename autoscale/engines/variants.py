"""How much work a replica of another variant does, in replicas of the service's first group (pure).

A variant is hardware with a parallelism and a quantisation (WVA section II). A replica of the first group is a
*standard replica* of its role. The figures are those of one typical request: variants of unequal speed keep nearly the
same proportion at other lengths.
"""

from pydantic import Field

from autoscale.engines.capacity import decode_tokens_per_s
from autoscale.engines.profile import EngineProfile
from kvtransfer.strict_config import StrictConfig
from kvtransfer.topology import Role


class TypicalLengthsConfig(StrictConfig):
    """Lengths of a typical request, at which the speeds of variants are compared.

    The defaults are the means of configs/traces/azure_conv_600s.csv.gz.
    """

    input_tokens: int = Field(1147, ge=1)
    """Tokens of the prompt."""
    output_tokens: int = Field(260, ge=1)
    """Tokens of the answer."""

    @property
    def context_tokens(self) -> float:
        """Mean KV of a request while it is answered: its prompt and half of its answer."""
        return self.input_tokens + self.output_tokens / 2


def requests_per_s(role: Role, profile: EngineProfile, lengths: TypicalLengthsConfig, tpot_s: float) -> float:
    """Typical requests per second that one replica of a role serves within the TPOT objective, seconds."""
    if role is Role.PREFILL:
        return 1.0 / profile.prefill.seconds_for(lengths.input_tokens)
    return decode_tokens_per_s(profile, lengths.context_tokens, tpot_s) / lengths.output_tokens


def capacity(
    role: Role, profile: EngineProfile, standard: EngineProfile, lengths: TypicalLengthsConfig, tpot_s: float
) -> float:
    """Standard replicas of a role that one replica with this profile is worth; ``standard``: the first group's."""
    return requests_per_s(role, profile, lengths, tpot_s) / requests_per_s(role, standard, lengths, tpot_s)
