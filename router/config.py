"""Settings of routing, each with its unit; DECISIONS 8 has the measurements behind the defaults."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from router.outliers import OutlierConfig


class LengthConfig(BaseModel):
    """Bounds of the length-aware rule (``router.length``)."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    local_max_tokens: int = Field(
        128,
        ge=0,
        description="Prompts of at most this many uncached tokens are prefilled where they decode; 0 and a "
        "local_cap_tokens of 0 send all to prefill.",
    )
    local_cap_tokens: int = Field(
        2048,
        ge=0,
        description="The bound never rises above this, however long the prefill queue: it limits how long "
        "one local prefill can stall the streams that decode beside it.",
    )
    local_tokens_per_output_token: float = Field(
        8.0,
        ge=0.0,
        description="Nor does it rise above so many tokens for each output token of an average answer: a stall counts "
        "the less in a stream's time per token the longer the stream.",
    )
    backlog_share_frac: float = Field(
        0.5, ge=0.0, le=1.0, description="How much the bound rises per token that waits on prefill and not on decode."
    )
    decode_room_frac: float = Field(
        0.3,
        gt=0.0,
        le=1.0,
        description="The bound rises only while decode has at least this share of slots and KV free.",
    )
    decode_busy_frac: float = Field(
        0.2,
        gt=0.0,
        le=1.0,
        description="Below this free share the bound falls in proportion, to 0 when nothing is free.",
    )

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.local_cap_tokens < self.local_max_tokens:
            raise ValueError(
                f"local_cap_tokens ({self.local_cap_tokens}) must be at least "
                f"local_max_tokens ({self.local_max_tokens})"
            )
        if self.decode_room_frac < self.decode_busy_frac:
            raise ValueError(
                f"decode_room_frac ({self.decode_room_frac}) must be at least "
                f"decode_busy_frac ({self.decode_busy_frac})"
            )
        return self


class RouterConfig(BaseModel):
    """How requests find their replicas."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    policy: Literal["least_tokens", "round_robin"] = Field(
        "least_tokens", description="Order in which the replicas of a pool are tried."
    )
    asked_replicas: int = Field(
        4,
        ge=0,
        le=64,
        description="Where several routers send to one pool, each asks so many replicas for their queue before it "
        "chooses (DECISIONS 44 and 87); 0 trusts its own count alone.",
    )
    length: LengthConfig = LengthConfig()
    outlier: OutlierConfig = OutlierConfig()
    prefill_timeout_s: float = Field(
        30.0,
        gt=0.0,
        le=3600.0,
        description="A prompt that no prefill replica has answered by then is prefilled on decode: Serve itself waits "
        "for ever where none is up. Choose more than the longest queue on prefill that you want to sit out.",
    )

    def asked(self, routers: int) -> int:
        """How many replicas of a pool are asked for their queue, where so many routers send to it."""
        return self.asked_replicas if routers > 1 and self.policy == "least_tokens" else 0
