"""The length-aware rule: which prompts the decode replica prefills itself."""

from dataclasses import dataclass
from enum import StrEnum

from router.config import LengthConfig


class PrefillPath(StrEnum):
    """Where a prompt is prefilled."""

    LOCAL = "local"
    REMOTE = "remote"


class PathReason(StrEnum):
    """Why a prompt took its path; a label of ``tandem_prefill_path_total``."""

    SHORT = "short"
    CACHED = "cached"
    PREFILL_BACKLOG = "prefill_backlog"
    LONG = "long"
    DECODE_BUSY = "decode_busy"
    NOT_TRANSFERABLE = "not_transferable"
    AGGREGATED = "aggregated"  # the group has no prefill pool
    PREFILL_FAILED = "prefill_failed"
    KV_LATE = "kv_late"  # the lease on prefill may have ended before decode could extend it


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLoad:
    """Load of a decode replica's own engine; ``None``: not observed yet."""

    running_requests: int | None = None
    max_running_requests: int | None = None
    kv_usage_frac: float | None = None
    local_prefill_tokens: int = 0
    output_tokens_mean: float | None = None  # mean length of the answers that ended lately

    def headroom_frac(self) -> float | None:
        """Free share, 0..1, of the scarcer of batch slots and KV blocks; ``None`` when neither was observed."""
        free = []
        if self.running_requests is not None and self.max_running_requests:
            free.append(1.0 - self.running_requests / self.max_running_requests)
        if self.kv_usage_frac is not None:
            free.append(1.0 - self.kv_usage_frac)
        return max(0.0, min(free)) if free else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PathDecision:
    """The path of one prompt, why, and the bound that was in force (tokens)."""

    path: PrefillPath
    reason: PathReason
    effective_tokens: int
    bound_tokens: float


def prefill_path(
    *,
    input_tokens: int,
    cached_tokens: int,
    prefill_backlog_tokens: int | None,
    decode: DecodeLoad,
    config: LengthConfig,
) -> PathDecision:
    """Choose LOCAL or REMOTE prefill for one prompt.

    A prefill shorter than its transfer gains nothing from another engine (DOPD section 4.3: 36 ms of prefill at 100
    tokens against 15-80 ms of transfer). The effective length counts: input minus the prefix cached on this decode
    replica. The bound rises with the tokens that wait on prefill while decode has room, and falls to 0 as decode runs
    out of slots or KV. Longer answers let it rise higher, since a local prefill stalls the streams beside it and a long
    stream makes up for that.

    ``cached_tokens``: prompt tokens in this decode replica's prefix cache, 0 when unknown; ``prefill_backlog_tokens``:
    prompt tokens that wait or run on the prefill pool, ``None`` when not observed.
    """
    effective = max(0, input_tokens - cached_tokens)
    base = float(config.local_max_tokens)
    bound = _bound_tokens(prefill_backlog_tokens, decode, config)
    if effective > bound:
        reason = PathReason.DECODE_BUSY if effective <= base else PathReason.LONG
    elif effective > base:
        reason = PathReason.PREFILL_BACKLOG
    else:
        reason = PathReason.CACHED if input_tokens > bound else PathReason.SHORT
    path = PrefillPath.LOCAL if effective <= bound else PrefillPath.REMOTE
    return PathDecision(path=path, reason=reason, effective_tokens=effective, bound_tokens=bound)


def _bound_tokens(backlog_tokens: int | None, decode: DecodeLoad, config: LengthConfig) -> float:
    bound = float(config.local_max_tokens)
    headroom = decode.headroom_frac()
    if headroom is None:
        return bound
    if headroom < config.decode_busy_frac:
        return bound * headroom / config.decode_busy_frac
    if backlog_tokens is not None and headroom >= config.decode_room_frac:
        # Prompts already queued on decode count against it, or a burst would pile up there at once.
        excess = max(0, backlog_tokens - decode.local_prefill_tokens)
        shared = config.local_tokens_per_output_token * (decode.output_tokens_mean or 0.0)
        cap = max(bound, min(float(config.local_cap_tokens), shared))
        bound = min(cap, bound + config.backlog_share_frac * excess)
    return bound
