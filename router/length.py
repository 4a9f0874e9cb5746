"""The length-aware rule: which prompts are prefilled where they decode."""

from router.config import LengthConfig
from router.types import DecodeLoad, PathDecision, PathReason, PrefillPath


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
    tokens against 15-80 ms of transfer). What counts is the *effective* length, input minus the prefix cached on
    this decode replica. The bound it is held against rises with the tokens that wait on prefill, while decode has
    room, and falls to zero as decode runs out of slots or KV. It may rise the higher the longer answers are: a prompt
    that is computed here stalls the streams beside it, and in one of few tokens nothing makes up for that.

    Args:
        input_tokens: prompt length, tokens.
        cached_tokens: prompt tokens already in this decode replica's prefix cache; 0 when unknown.
        prefill_backlog_tokens: prompt tokens waiting or running on the prefill pool; ``None`` when not observed.
        decode: load of this decode replica.
        config: the bounds.

    Returns:
        The path, its reason and the bound in force.
    """
    effective = max(0, input_tokens - cached_tokens)
    base = float(config.local_max_tokens)
    bound = _bound_tokens(prefill_backlog_tokens, decode, config)
    if effective <= bound:
        if effective > base:
            reason = PathReason.PREFILL_BACKLOG
        elif input_tokens > bound:
            reason = PathReason.CACHED
        else:
            reason = PathReason.SHORT
        return PathDecision(path=PrefillPath.LOCAL, reason=reason, effective_tokens=effective, bound_tokens=bound)
    reason = PathReason.DECODE_BUSY if effective <= base else PathReason.LONG
    return PathDecision(path=PrefillPath.REMOTE, reason=reason, effective_tokens=effective, bound_tokens=bound)


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
