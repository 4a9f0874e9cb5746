"""The latency objective of a service (pure)."""

from pydantic import Field

from autoscale.types import Latency
from kvtransfer.strict_config import StrictConfig


class SloConfig(StrictConfig):
    """The objectives of a service, and the share of requests that must meet them."""

    # Upper bounds: replicas measure TTFT up to 300 s and TPOT up to 10 s. The largest safety step of a policy begins at
    # 1.2 times the objective, which must be below these times.
    ttft_s: float = Field(1.0, gt=0.0, le=250.0)
    """Time to first token, from arrival at the endpoint."""
    ttft_s_per_input_token: float = Field(0.0, ge=0.0)
    """Time to first token per prompt token, since long prompts take longer to compute. The objective of a prompt is its
    number of tokens times this, but at least ttft_s. Replicas read it when they start."""
    tpot_s: float = Field(0.05, gt=0.0, le=8.0)
    """Time per output token after the first."""
    quantile_frac: float = Field(0.95, gt=0.0, lt=1.0)
    """Share of requests that must meet both objectives."""

    def ttft_share(self, input_tokens: int) -> float:
        """Factor by which a request's TTFT is multiplied, so that ``ttft_s`` is the objective of every prompt."""
        prompt_ttft_s = self.ttft_s_per_input_token * input_tokens
        return min(1.0, self.ttft_s / max(1e-9, prompt_ttft_s))  # prompt_ttft_s is 0 by default

    def objective_s(self, input_tokens: int) -> float:
        """The TTFT objective of a prompt, seconds."""
        return max(self.ttft_s, self.ttft_s_per_input_token * input_tokens)

    def is_met(self, latency: Latency) -> bool:
        """Whether each observed quantile meets its objective, and few enough requests are refused."""
        return (
            (latency.ttft_s is None or latency.ttft_s <= self.ttft_s)
            and (latency.tpot_s is None or latency.tpot_s <= self.tpot_s)
            and not self.refuses_too_many(latency)
        )

    def refuses_too_many(self, latency: Latency) -> bool:
        """Whether so many requests are refused that too few can meet the objectives."""
        return (latency.refused_frac or 0.0) > 1.0 - self.quantile_frac
