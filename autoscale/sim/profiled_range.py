"""Which lengths the profiles of a cluster's engines know (pure)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from autoscale.profile import EngineProfile
from autoscale.types import PoolKey
from kvtransfer.topology import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledRange:
    """What every profile covers: prompts from ``low_tokens`` to ``high_tokens``, contexts up to ``longest_tokens``."""

    low_tokens: int
    high_tokens: int
    longest_tokens: int

    @classmethod
    def of(cls, profiles: Mapping[PoolKey, EngineProfile]) -> Self:
        """That of some pools; without a prefill pool decode computes prompts."""
        prompts = [each.prefill for key, each in profiles.items() if key.role is Role.PREFILL]
        prompts = prompts or [each.prefill for each in profiles.values()]
        return cls(
            low_tokens=max(each.tokens[0] for each in prompts),
            high_tokens=min(each.tokens[-1] for each in prompts),
            longest_tokens=min(
                each.decode.context_tokens[-1] for key, each in profiles.items() if key.role is Role.DECODE
            ),
        )

    def covers(self, input_tokens: int, output_tokens: int) -> bool:
        """Whether a request of these lengths is never extrapolated; its batch may be."""
        is_known = self.low_tokens <= input_tokens <= self.high_tokens
        return is_known and input_tokens + output_tokens <= self.longest_tokens
