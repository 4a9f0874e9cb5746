"""The length-aware rule: which prompts the decode replica prefills itself.

A prompt's *effective length* is its number of tokens that are not in the decode replica's prefix cache. The *bound* is
the effective length up to which the decode replica prefills a prompt itself (LOCAL). It moves with the load. A longer
prompt goes to a prefill replica (REMOTE).
"""

from dataclasses import dataclass
from enum import StrEnum

from router.config import LengthConfig


class PrefillPath(StrEnum):
    """Where a prompt is prefilled."""

    LOCAL = "local"
    REMOTE = "remote"


class PathReason(StrEnum):
    """Why a prompt took its path; a label of ``tandem_prefill_path_total``."""

    # LOCAL by the length-aware rule.
    SHORT = "short"  # the whole prompt is within the bound
    CACHED = "cached"  # the prompt is longer, but its effective length is within the bound
    PREFILL_BACKLOG = "prefill_backlog"  # the effective length is within the bound only because prefill has a backlog
    # REMOTE by the length-aware rule.
    LONG = "long"  # the effective length is above the bound
    DECODE_BUSY = "decode_busy"  # the effective length is above the bound only because decode is busy
    # LOCAL without the rule, or after the rule chose REMOTE.
    MEDIA_TOO_LARGE = "media_too_large"  # the prompt's images are more bytes than ``RouterConfig.max_media_bytes``
    NOT_TRANSFERABLE = "not_transferable"  # KV of such a request cannot be handed over, e.g. with several answers
    AGGREGATED = "aggregated"  # the group has no prefill pool
    PREFILL_FAILED = "prefill_failed"  # no prefill replica computed the prompt
    NO_CREDIT = "no_credit"  # decode would have had no room for the KV (``router.kv_credit``)
    # Prefill may have freed the KV. The lease, for which prefill keeps it, may have ended before decode extended it.
    KV_LATE = "kv_late"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLoad:
    """Load of a decode replica's own engine; ``None``: not observed yet."""

    running_requests: int | None = None
    max_running_requests: int | None = None  # batch slots
    kv_usage_frac: float | None = None  # share of the KV blocks in use
    local_prefill_tokens: int = 0  # prompt tokens that this decode replica has still to compute itself
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
    """The path of one prompt, and why."""

    path: PrefillPath
    reason: PathReason
    effective_tokens: int  # prompt tokens that are not in the decode replica's prefix cache
    bound_tokens: float  # the bound under the present load


def prefill_path(
    *,
    input_tokens: int,
    cached_tokens: int,
    prefill_backlog_tokens: int | None,
    decode: DecodeLoad,
    config: LengthConfig,
) -> PathDecision:
    """Choose LOCAL or REMOTE prefill for one prompt: LOCAL if its effective length is within the bound.

    A short prompt gains nothing from a prefill replica, because the transfer of its KV takes as long as its prefill
    (DOPD section 4.3: at 100 tokens 36 ms of prefill, and 15-80 ms of transfer).

    Args:
        input_tokens: length of the prompt.
        cached_tokens: prompt tokens in this decode replica's prefix cache; 0 when unknown.
        prefill_backlog_tokens: prompt tokens that wait or run on the prefill replica with the shortest queue;
            ``None``: not observed.
        decode: load of this decode replica.
        config: settings of the rule.
    """
    effective = max(0, input_tokens - cached_tokens)
    bound = _bound_tokens(prefill_backlog_tokens, decode, config)
    return PathDecision(
        path=PrefillPath.LOCAL if effective <= bound else PrefillPath.REMOTE,
        reason=_reason(input_tokens, effective, bound, config.local_max_tokens),
        effective_tokens=effective,
        bound_tokens=bound,
    )


def _reason(input_tokens: int, effective_tokens: int, bound_tokens: float, usual_bound_tokens: int) -> PathReason:
    """Why the path was taken; ``usual_bound_tokens``: the bound without backlog on prefill and with room on decode."""
    is_usually_local = effective_tokens <= usual_bound_tokens
    if effective_tokens > bound_tokens:
        return PathReason.DECODE_BUSY if is_usually_local else PathReason.LONG
    if not is_usually_local:
        return PathReason.PREFILL_BACKLOG
    is_short = input_tokens <= min(bound_tokens, usual_bound_tokens)
    return PathReason.SHORT if is_short else PathReason.CACHED


def _bound_tokens(backlog_tokens: int | None, decode: DecodeLoad, config: LengthConfig) -> float:
    """The bound: ``local_max_tokens`` in general.

    It falls towards 0 as a busy decode replica runs out of batch slots or KV. It rises with the backlog on prefill
    while decode has room.
    """
    usual_bound = float(config.local_max_tokens)
    headroom = decode.headroom_frac()
    if headroom is None:
        return usual_bound
    if headroom < config.decode_busy_frac:
        return usual_bound * headroom / config.decode_busy_frac
    if backlog_tokens is None or headroom < config.decode_room_frac:
        return usual_bound
    # Prompt tokens that wait on decode are subtracted. Otherwise all prompts of a burst would go to decode at once.
    excess_tokens = max(0, backlog_tokens - decode.local_prefill_tokens)
    return min(_cap_tokens(decode, config), usual_bound + config.backlog_share_frac * excess_tokens)


def _cap_tokens(decode: DecodeLoad, config: LengthConfig) -> float:
    """The highest bound that a backlog on prefill can cause.

    A local prefill stalls the streams on the replica. The longer the answers are, the less a stall counts per token.
    Until a first answer has ended, a backlog does not raise the bound.
    """
    by_answers = config.local_tokens_per_output_token * (decode.output_tokens_mean or 0.0)
    return max(float(config.local_max_tokens), min(float(config.local_cap_tokens), by_answers))
