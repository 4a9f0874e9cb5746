"""AutoRatioConfig: by which engines, inside which limits and how fast ``pd_ratio: auto`` follows the traffic (pure)."""

from typing import Self

from pydantic import Field, model_validator

from autoscale.policies.observed_ratio import ratio_of_lengths
from autoscale.policies.policy import EnginesConfig
from autoscale.ratio import PdRatio


class AutoRatioConfig(EnginesConfig):
    """The engines from whose profiles the ratio follows, its limits, and the rate of its changes."""

    lowest: PdRatio = Field(PdRatio(1, 5), validate_default=True)
    """Lowest P/D ratio. The default is the lowest that any configuration may have (HeteroScale section 4.1)."""
    highest: PdRatio = Field(PdRatio(9, 1), validate_default=True)
    """Highest P/D ratio. The default is the highest that any configuration may have (HeteroScale section 4.1)."""
    start_input_tokens: int = Field(1147, ge=1)
    """Tokens of a prompt for which the first ratio is computed, before any request was observed. The default is the
    mean of configs/traces/azure_conv_600s.csv.gz."""
    start_output_tokens: int = Field(260, ge=1)
    """Tokens of an answer for which the first ratio is computed. The default is the mean of the same trace."""
    interval_s: float = Field(100.0, ge=1.0)
    """Least time between two changes of the ratio. Each change follows from the requests of one such interval (DOPD
    section V-D: adjustments are hundreds of seconds apart)."""
    least_requests: int = Field(200, ge=1)
    """Fewest requests from which a ratio is computed. The interval goes on until they have come. With 200 requests of
    Azure's conversation trace, the ratio is within 8 % of that of the whole trace (90th percentile)."""
    least_change_frac: float = Field(0.1, ge=0.0, lt=1.0)
    """Share by which the computed ratio must differ from the one in force for a change: more than its error."""
    most_change_frac: float = Field(0.25, gt=0.0, le=10.0)
    """Largest change in one interval, as a share of the ratio. In the same trace, the ratios of neighbouring 100 s
    differ by 1 to 29 %."""

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.lowest.per_decode() > self.highest.per_decode() or self.lowest.is_aggregated:
            raise ValueError(
                f"lowest ({self.lowest}) must be between 1:5 and highest ({self.highest}): lower the first, or raise "
                "the second"
            )
        return self

    def start_ratio(self, tpot_s: float) -> PdRatio:
        """The ratio before any request was observed, inside the limits; ``tpot_s``: the objective, seconds."""
        best = ratio_of_lengths(self, self.start_input_tokens, self.start_output_tokens, tpot_s)
        return self.limited(best.prefill_per_decode)

    def limited(self, prefill_per_decode: float) -> PdRatio:
        """The ratio inside the limits; a ratio of fractions, since none of whole numbers need be near."""
        inside = min(max(prefill_per_decode, self.lowest.per_decode()), self.highest.per_decode())
        return PdRatio(inside, 1)

    def next_ratio(self, now: float, optimal: float) -> PdRatio:
        """The ratio of the next interval: the optimal one, as far as limits and the largest change allow.

        Both arguments are prefill replicas per decode replica. If the difference is too small, the ratio stays.
        """
        wanted = self.limited(optimal).per_decode()
        if abs(wanted - now) <= self.least_change_frac * now:
            return self.limited(now)
        most = 1.0 + self.most_change_frac
        return self.limited(min(max(wanted, now / most), now * most))
