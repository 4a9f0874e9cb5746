"""What one replica of each role can serve within an objective, from its profile (pure)."""

from autoscale.profile import EngineProfile


def prefill_engines(
    profile: EngineProfile, requests_per_s: float, input_tokens: float, cached_frac: float = 0.0
) -> float:
    """How many prefill engines such an arrival of prompts keeps busy.

    Args:
        profile: of one prefill replica.
        requests_per_s: prompts that arrive.
        input_tokens: their mean length.
        cached_frac: the leading share of them that is in prefix caches; the rest is computed behind it.
    """
    return requests_per_s * profile.prefill.chunk_s(cached_frac * input_tokens, input_tokens)


def handoff_engines(profile: EngineProfile, requests_per_s: float, input_tokens: float) -> float:
    """How many decode replicas' links such an arrival keeps busy: with long prompts and short answers that is most.

    Args:
        profile: of one decode replica.
        requests_per_s: prompts whose KV is pulled.
        input_tokens: their mean length.
    """
    handoff = profile.handoff
    return requests_per_s * input_tokens * handoff.kv_bytes_per_token / handoff.bytes_per_s


def decode_batch(profile: EngineProfile, context_tokens: float, tpot_s: float) -> int:
    """The largest batch that one decode replica serves within an objective, at least 1.

    Its KV must hold all of them, and a step must not take longer than ``tpot_s`` (DOPD section IV-B, M' and the
    constraint on TPOT).

    Args:
        profile: of one decode replica.
        context_tokens: mean KV of a request, prompt and what it has produced so far.
        tpot_s: time per output token that must be kept, seconds.
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
    """Output tokens per second of one decode replica at that batch."""
    batch = decode_batch(profile, context_tokens, tpot_s)
    return batch / profile.decode.seconds_for(batch, context_tokens)
