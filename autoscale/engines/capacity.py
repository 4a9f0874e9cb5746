"""The capacity of one replica of each role, from its profile (pure)."""

from autoscale.engines.profile import EngineProfile


def prefill_engines(
    profile: EngineProfile, requests_per_s: float, input_tokens: float, cached_frac: float = 0.0
) -> float:
    """How many prefill engines arriving prompts keep busy; ``cached_frac``: the leading share that caches have."""
    return requests_per_s * profile.prefill.chunk_s(cached_frac * input_tokens, input_tokens)


def handoff_engines(profile: EngineProfile, requests_per_s: float, input_tokens: float) -> float:
    """How many decode replicas' links arriving prompts keep busy: the limit for long prompts and short answers."""
    handoff = profile.handoff
    return requests_per_s * input_tokens * handoff.kv_bytes_per_token / handoff.bytes_per_s


def decode_batch(profile: EngineProfile, context_tokens: float, tpot_s: float) -> int:
    """The largest batch that fits one decode replica's KV and keeps the TPOT objective, at least 1.

    Args:
        profile: of one decode replica.
        context_tokens: mean KV of a request: prompt and output so far.
        tpot_s: objective, seconds.

    Source: DOPD section IV-B, M' and the constraint on TPOT.
    """
    fits = int(profile.kv_tokens / max(1.0, context_tokens + profile.block_tokens / 2))
    low, high = 1, max(1, min(profile.max_running, fits))
    while low < high:
        middle = (low + high + 1) // 2
        if profile.decode.seconds_for(middle, context_tokens) <= tpot_s:
            low = middle
        else:
            high = middle - 1
    return low


def decode_tokens_per_s(profile: EngineProfile, context_tokens: float, tpot_s: float) -> float:
    """Output tokens per second of one decode replica at its ``decode_batch``."""
    batch = decode_batch(profile, context_tokens, tpot_s)
    return batch / profile.decode.seconds_for(batch, context_tokens)
