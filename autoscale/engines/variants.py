"""How much work a replica of another variant does, in replicas of the service's first group (pure).

A variant is hardware with a parallelism and a quantisation (WVA section II). A replica of the first group is a
*standard replica* of its role. The figures are those of one typical request. At other lengths the proportion is nearly
the same, unless the slower engine barely keeps the TPOT objective.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from pydantic import Field

from autoscale.engines.capacity import decode_tokens_per_s
from autoscale.engines.profile import EngineProfile
from autoscale.ratio import PdRatio
from autoscale.types import PoolKey
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


def aggregated_requests_per_s(profile: EngineProfile, lengths: TypicalLengthsConfig, tpot_s: float) -> float:
    """As ``requests_per_s``, for a replica that computes prompts and answers."""
    prompt_s_per_output_token = profile.prefill.seconds_for(lengths.input_tokens) / lengths.output_tokens
    tokens_per_s = decode_tokens_per_s(profile, lengths.context_tokens, tpot_s, prompt_s_per_output_token)
    return tokens_per_s / lengths.output_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """Standard replicas that one replica is worth.

    Attributes:
        own: in its own role.
        prompts: in prefill, beside ``own``: the prompts that a replica of an aggregated group computes too.
    """

    own: float = 1.0
    prompts: float = 0.0


def worths(
    profiles: Mapping[PoolKey, EngineProfile],
    aggregated: Collection[str],
    standard_group: str,
    lengths: TypicalLengthsConfig,
    tpot_s: float,
) -> dict[PoolKey, Worth]:
    """The worth of a replica of each pool beside those of the standard group, by their profiles.

    An engine of an aggregated group shares its time between prompts and answers.

    Args:
        profiles: those of the pools whose worth is wanted, and of all pools of the standard group.
        aggregated: names of the groups without prefill.
        standard_group: name of the group whose replicas are the standard.
        lengths: the typical request.
        tpot_s: the objective, seconds.
    """
    standards = {key.role: profile for key, profile in profiles.items() if key.group == standard_group}
    result = {}
    for key, profile in profiles.items():
        if key.group not in aggregated:
            per_s, standard_per_s = (
                requests_per_s(key.role, each, lengths, tpot_s) for each in (profile, standards[key.role])
            )
            result[key] = Worth(own=per_s / standard_per_s)
            continue
        per_s = aggregated_requests_per_s(profile, lengths, tpot_s)
        if Role.PREFILL in standards:
            own, prompts = (
                per_s / requests_per_s(role, standards[role], lengths, tpot_s) for role in (Role.DECODE, Role.PREFILL)
            )
            result[key] = Worth(own=own, prompts=prompts)
        else:  # all groups are aggregated
            result[key] = Worth(own=per_s / aggregated_requests_per_s(standards[Role.DECODE], lengths, tpot_s))
    return result


def aggregated_worth_at(ratio: PdRatio, own: float | None = None) -> Worth:
    """The worth of a replica that computes prompts and answers, without profiles.

    ``own``: standard decode replicas that it is worth; ``None``: the engine is as fast as the first group's. Such an
    engine shares its time: for the work of one decode replica it needs the time of that one and of ``ratio`` prefill
    replicas.
    """
    own = 1.0 / (1.0 + ratio.per_decode()) if own is None else own
    return Worth(own=own, prompts=own * ratio.per_decode())
