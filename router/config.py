"""Settings of routing; decision 8 in docs/decisions has the measurements behind the defaults."""

from typing import Literal, Self

from pydantic import Field, model_validator

from kvtransfer.strict_config import StrictConfig
from router.ejection import OutlierConfig

# Three quarters of the largest message between replicas (``RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH``, 64 MiB): a
# prompt's token ids, at most 5 bytes each, are in the same message.
_MOST_MEDIA_BYTES = 48 << 20


class LengthConfig(StrictConfig):
    """Bounds of the length-aware rule (``router.length``): which prompts a decode replica computes itself.

    The *bound* is the number of uncached prompt tokens up to which it does.
    """

    local_max_tokens: int = Field(128, ge=0)
    """Uncached prompt tokens up to which decode computes a prompt itself (the bound). 0, with local_cap_tokens 0, sends
    all prompts to prefill. The default is measured (DECISIONS 8)."""
    local_cap_tokens: int = Field(2048, ge=0)
    """Uncached prompt tokens above which decode never computes a prompt, however long the prefill queue is. This limits
    the time for which one local prefill stalls the streams on the replica."""
    local_tokens_per_output_token: float = Field(8.0, ge=0.0)
    """The bound rises at most to this number times the tokens of the mean answer: in a long answer, a stall costs less
    per token."""
    backlog_share_frac: float = Field(0.5, ge=0.0, le=1.0)
    """Tokens by which the bound (local_max_tokens) rises for each prompt token that prefill's queue is longer than
    decode's."""
    decode_room_frac: float = Field(0.3, gt=0.0, le=1.0)
    """Free share of batch slots and KV on decode, 0 to 1, from which the bound (local_max_tokens) may rise."""
    decode_busy_frac: float = Field(0.2, gt=0.0, le=1.0)
    """Free share of batch slots and KV on decode, 0 to 1, below which the bound (local_max_tokens) falls in proportion.
    The bound is 0 when nothing is free."""

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


class PrefillQueueConfig(StrictConfig):
    """The queue of a group's prompts in front of its prefill replicas (router/prefill_scheduler.py)."""

    strategy: Literal["direct", "fcfs", "edf", "dopd"] = "direct"
    """Order in which prompts wait for a prefill replica. direct: no common queue, each decode replica sends a prompt at
    once. fcfs: by arrival. edf: by deadline, which is the arrival plus the TTFT objective. dopd: Algorithm 1 of DOPD,
    short prompts gather in batches (DECISIONS 254)."""
    window_tokens: int = Field(1024, ge=1)
    """Prompt tokens that a prefill replica may have before further prompts wait in the queue. It may always have one
    prompt beside those that it computes (DECISIONS 255)."""
    timeout_frac: float = Field(0.5, gt=0.0, le=1.0)
    """Share of Kingman's mean wait after which short prompts go although they are no whole batch: alpha in Eq. 17 of
    DOPD. Used by dopd alone."""
    credit_wait_s: float = Field(1.0, gt=0.0, le=60.0)
    """Longest time, seconds, for which a prompt waits until its decode replica will have room for its KV. After that
    decode computes it. The default is the usual TTFT objective: a prompt that waited longer is late anyway."""


class PrefixConfig(StrictConfig):
    """How requests find the replica that has computed the beginning of their prompt, with policy `prefix`."""

    request_tokens: int = Field(100, ge=1, le=1_000_000)
    """Prompt tokens that one running request of a decode replica is worth. A replica with one request more is chosen if
    it holds this number of tokens more. The default is the best in simulations (DECISIONS 260)."""
    sent_s: float = Field(120.0, ge=0.0, le=3600.0)
    """Time, seconds, for which a router takes a replica to hold a prompt that it has sent there, unless the replica's
    own report says so."""
    piece_tokens: int = Field(128, ge=16, le=4096)
    """Tokens in a piece, by which prompts are compared. Smaller pieces find shorter common beginnings, and take more
    memory and work in every router. The default is the usual bound up to which decode computes a prompt itself
    (length.local_max_tokens): a shorter beginning saves little."""


class RouterConfig(StrictConfig):
    """How requests find their replicas."""

    policy: Literal["least_tokens", "round_robin", "prefix"] = "least_tokens"
    """Order in which the replicas of a pool are tried: fewest queued tokens first; in turn; or fewest tokens to compute
    first, which are those queued and those of the prompt that a replica does not hold."""
    asked_replicas: int = Field(4, ge=0, le=64)
    """Replicas that each router asks for their queue before it chooses one, if several routers send to the pool
    (DECISIONS 44 and 87). 0: a router relies on its own count."""
    length: LengthConfig = LengthConfig()
    outlier: OutlierConfig = OutlierConfig()
    prefill_queue: PrefillQueueConfig = PrefillQueueConfig()
    prefix: PrefixConfig = PrefixConfig()
    prefill_timeout_s: float = Field(30.0, gt=0.0, le=3600.0)
    """Time, seconds, after which decode computes a prompt that no prefill replica has answered. Serve itself waits
    without limit while no replica is up. Choose more than the longest wait on prefill that you accept."""
    max_media_bytes: int = Field(_MOST_MEDIA_BYTES, ge=0, le=_MOST_MEDIA_BYTES)
    """Bytes of a prompt's images, audio and video, after the model's processor, up to which prefill computes it. Decode
    computes a prompt with more bytes itself. 0: decode computes all prompts with such parts."""

    @property
    def follows_prefixes(self) -> bool:
        """Whether routers must know what the replicas have computed."""
        return self.policy == "prefix"

    def asked(self, routers: int) -> int:
        """Replicas of a pool that a router asks for their queue; ``routers``: number of the pool's routers."""
        return 0 if routers < 2 or self.policy == "round_robin" else self.asked_replicas
