"""The values that a routing decision is made of."""

from dataclasses import dataclass
from enum import StrEnum


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
    AGGREGATED = "aggregated"  # its group has no prefill
    PREFILL_FAILED = "prefill_failed"
    KV_LATE = "kv_late"  # its lease on prefill may have ended before decode knew of it


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLoad:
    """What a decode replica knows of its own engine; ``None`` means not observed yet.

    ``output_tokens_mean``: of the answers that ended here of late.
    """

    running_requests: int | None = None
    max_running_requests: int | None = None
    kv_usage_frac: float | None = None
    local_prefill_tokens: int = 0
    output_tokens_mean: float | None = None

    def headroom_frac(self) -> float | None:
        """Free share, 0..1, of the scarcer of batch slots and KV blocks; ``None`` when neither was observed."""
        free = []
        if self.running_requests is not None and self.max_running_requests:
            free.append(1.0 - self.running_requests / self.max_running_requests)
        if self.kv_usage_frac is not None:
            free.append(1.0 - self.kv_usage_frac)
        return max(0.0, min(free)) if free else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaView:
    """One candidate replica as a router sees it."""

    replica_id: str
    queued_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PathDecision:
    """The path of one prompt, why, and the bound that was in force (tokens)."""

    path: PrefillPath
    reason: PathReason
    effective_tokens: int
    bound_tokens: float
