"""The latency objective of a service (pure)."""

from pydantic import Field

from autoscale.types import Latency
from kvtransfer.strict_config import StrictConfig


class SloConfig(StrictConfig):
    """The objectives of a service, and the share of requests that must be inside them."""

    # Bounds: replicas count waiting times up to 300 s and 10 s, and the largest safety step begins at 1.2 x these.
    ttft_s: float = Field(1.0, gt=0.0, le=250.0, description="Time to first token, from arrival at the endpoint.")
    ttft_s_per_input_token: float = Field(
        0.0,
        ge=0.0,
        description="Objective per prompt token, since long prompts take longer to compute; it holds for a prompt for "
        "which it gives more than ttft_s. Replicas read it when they start.",
    )
    tpot_s: float = Field(0.05, gt=0.0, le=8.0, description="Time per output token after the first.")
    quantile_frac: float = Field(
        0.95, gt=0.0, lt=1.0, description="Share of requests that must be inside both objectives."
    )

    def ttft_share(self, input_tokens: int) -> float:
        """Factor of a request's time to first token, so that ``ttft_s`` is the objective of every request."""
        return min(1.0, self.ttft_s / max(1e-9, self.ttft_s_per_input_token * input_tokens))

    def is_met(self, latency: Latency) -> bool:
        """Whether no request waited, or the quantiles of those that did are inside."""
        return (latency.ttft_s is None or latency.ttft_s <= self.ttft_s) and (
            latency.tpot_s is None or latency.tpot_s <= self.tpot_s
        )
