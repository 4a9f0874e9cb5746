"""The latency objective of a service (pure)."""

from pydantic import BaseModel, ConfigDict, Field

from autoscale.types import Latency


class SloConfig(BaseModel):
    """What users were promised, and of how many of them it must hold."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    # Replicas count waiting times up to 300 s and 10 s; the safety net's largest step begins at 1.2 times these.
    ttft_s: float = Field(1.0, gt=0.0, le=250.0, description="Time to first token, from arrival at the endpoint.")
    ttft_s_per_input_token: float = Field(
        0.0,
        ge=0.0,
        description="A prompt that takes longer at this pace has that much instead of ttft_s: long prompts cannot be "
        "computed in what is promised for short ones. Replicas read it when they start.",
    )
    tpot_s: float = Field(0.05, gt=0.0, le=8.0, description="Time per output token after the first.")
    quantile_frac: float = Field(0.95, gt=0.0, lt=1.0, description="The share of requests that both must hold for.")

    def ttft_share(self, input_tokens: int) -> float:
        """What a request's time to first token is counted by, so that ``ttft_s`` is the objective of each."""
        return min(1.0, self.ttft_s / max(1e-9, self.ttft_s_per_input_token * input_tokens))

    def is_met(self, latency: Latency) -> bool:
        """Whether nobody waited, or the quantiles of those who did are inside."""
        return (latency.ttft_s is None or latency.ttft_s <= self.ttft_s) and (
            latency.tpot_s is None or latency.tpot_s <= self.tpot_s
        )
