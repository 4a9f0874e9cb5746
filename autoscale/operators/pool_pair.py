"""A prefill and a decode pool, their objectives, and what requests see on them (pure)."""

from dataclasses import dataclass

from autoscale.engines.profile import EngineProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthRule:
    """Numbers of the router's length rule (``router.config.LengthConfig``)."""

    local_max_tokens: float = 0.0
    local_cap_tokens: float = 0.0
    local_tokens_per_output_token: float = 0.0
    backlog_share_frac: float = 0.0
    decode_room_frac: float = 1.0
    decode_busy_frac: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    """The objectives of every request, and the share of requests that must keep both."""

    ttft_s: float
    tpot_s: float
    attained_frac: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPair:
    """A prefill and a decode pool: their engines, and the replicas of each."""

    prefill: EngineProfile
    decode: EngineProfile
    prefill_replicas: int
    decode_replicas: int

    @property
    def gpus(self) -> int:
        """GPUs of all replicas; an engine without a GPU counts as one."""
        return self.prefill_replicas * max(1, self.prefill.gpus) + self.decode_replicas * max(1, self.decode.gpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """What requests see: 90th percentiles, and the share of requests that keep both objectives."""

    gpus: int
    ttft_p90_s: float
    tpot_p90_s: float
    attained_frac: float
