"""The capacity of one replica of each role, from its profile (pure)."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from enum import StrEnum

from autoscale.engines.profile import EngineProfile


class Limit(StrEnum):
    """What limits the requests per second of a replica."""

    PREFILL_COMPUTE = "prefill compute"
    KV_MEMORY = "decode KV memory"
    TPOT = "TPOT objective"  # the time to read weights and KV in each step
    MAX_RUNNING = "decode max_running"
    LINK = "hand-over link"


def prefill_engines(
    profile: EngineProfile, requests_per_s: float, input_tokens: float, cached_frac: float = 0.0
) -> float:
    """Number of prefill engines that arriving prompts keep busy.

    ``cached_frac``: share of a prompt, at its beginning, that prefix caches hold.
    """
    return requests_per_s * profile.prefill.chunk_s(cached_frac * input_tokens, input_tokens)


def prefill_engines_for(
    profile: EngineProfile, requests_per_s: float, lengths: Sequence[tuple[float, float]], cached_frac: float = 0.0
) -> float:
    """As ``prefill_engines``, for prompts of several lengths: pairs of tokens and the share of the prompts."""
    return math.fsum(prefill_engines(profile, requests_per_s * share, tokens, cached_frac) for tokens, share in lengths)


def handoff_engines(profile: EngineProfile, requests_per_s: float, input_tokens: float) -> float:
    """Number of decode replicas whose links arriving prompts keep busy: the limit if answers are short."""
    return requests_per_s * input_tokens * profile.handoff.kv_bytes_per_token / profile.handoff.bytes_per_s


def decode_batch(
    profile: EngineProfile, context_tokens: float, tpot_s: float, prompt_s_per_output_token: float = 0.0
) -> int:
    """The largest batch that fits one decode replica's KV and meets the TPOT objective, at least 1.

    Args:
        profile: the engine of the replica.
        context_tokens: mean KV of a request, its prompt and its output so far.
        tpot_s: the objective, seconds.
        prompt_s_per_output_token: mean time of a prompt on an engine that computes prompts too, divided by the output
            tokens of its answer. For each output token of each request, the engine computes this part of a prompt.

    Source: DOPD section IV-B, M' and the constraint on TPOT.
    """
    return decode_limit(profile, context_tokens, tpot_s, prompt_s_per_output_token)[0]


def decode_limit(
    profile: EngineProfile, context_tokens: float, tpot_s: float, prompt_s_per_output_token: float = 0.0
) -> tuple[int, Limit]:
    """The ``decode_batch``, and what limits it; the arguments are the same."""
    # On average the last block of a request is half empty.
    fitting = int(profile.kv_tokens / max(1.0, context_tokens + profile.block_tokens / 2))
    most = min(profile.max_running, fitting)
    batches = range(2, most + 1)
    # A step takes longer with each request in the batch, so the batches that meet the objective come first.

    def step_s(batch: int) -> float:
        return profile.decode.seconds_for(batch, context_tokens) + batch * prompt_s_per_output_token

    batch = 1 + bisect_right(batches, tpot_s, key=step_s)
    if batch < most:
        return batch, Limit.TPOT
    return batch, Limit.KV_MEMORY if fitting <= profile.max_running else Limit.MAX_RUNNING


def decode_tokens_per_s(
    profile: EngineProfile, context_tokens: float, tpot_s: float, prompt_s_per_output_token: float = 0.0
) -> float:
    """Output tokens per second of one decode replica at its ``decode_batch``, which has the same arguments."""
    batch = decode_batch(profile, context_tokens, tpot_s, prompt_s_per_output_token)
    return batch / (profile.decode.seconds_for(batch, context_tokens) + batch * prompt_s_per_output_token)
