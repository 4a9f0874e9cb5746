"""What one engine serves by Dynamo's search over batches, from its profile (pure).

Source: ``planner/core/perf_model/engine_query.py`` of ai-dynamo 1.6.1 (_find_prefill_capacity, _find_decode_capacity,
get_queued_prefill_time). Its times come from a tuned model of forward passes, here from the profile.
"""

import math
from collections.abc import Iterable

from autoscale.profile import EngineProfile

# MAX_CAPACITY_SEARCH_CANDIDATES.
_MOST_BATCHES = 128


def prefill_s(profile: EngineProfile, tokens: float) -> float:
    """Seconds for so many prompt tokens, in steps of at most what one takes (get_queued_prefill_time)."""
    full, rest = divmod(math.ceil(tokens), profile.max_batch_tokens)
    seconds = full * profile.prefill.seconds_for(profile.max_batch_tokens)
    return seconds + (profile.prefill.seconds_for(rest) if rest else 0.0)


def prefill_capacity(profile: EngineProfile, input_tokens: float, ttft_s: float) -> float:
    """Requests per second of one engine: ``batch / TTFT`` of the best batch that keeps the objective, else of any.

    Args:
        profile: of one prefill replica.
        input_tokens: mean length that is to be computed.
        ttft_s: the objective.
    """
    tokens = max(1, math.ceil(input_tokens))
    batches = _batches(max(1, min(profile.max_running, profile.max_batch_tokens // tokens)))
    passes = ((batch, prefill_s(profile, batch * tokens)) for batch in batches)
    return _best(((batch / seconds, seconds) for batch, seconds in passes), ttft_s)


def decode_capacity(profile: EngineProfile, input_tokens: float, output_tokens: float, itl_s: float) -> float | None:
    """Requests per second of one engine: ``batch / (OSL * ITL)`` of the best batch that keeps the objective.

    Args:
        profile: of one decode replica.
        input_tokens: mean length of the prompts.
        output_tokens: mean length of the answers.
        itl_s: the objective.

    Returns:
        ``None`` where not even one such request fits its KV.
    """
    outputs = max(1, math.ceil(output_tokens))
    context = max(1, math.ceil(input_tokens) + outputs // 2)
    batches = _batches(min(profile.max_running, profile.kv_tokens // context))
    if not batches:
        return None
    steps = ((batch, profile.decode.seconds_for(batch, context)) for batch in batches)
    return _best(((batch / (outputs * seconds), seconds) for batch, seconds in steps), itl_s)


def _batches(most: int) -> list[int]:
    """Every batch up to the largest, or so many evenly spaced ones."""
    if most <= _MOST_BATCHES:
        return list(range(1, most + 1))
    return [1 + index * (most - 1) // (_MOST_BATCHES - 1) for index in range(_MOST_BATCHES)]


def _best(rates: Iterable[tuple[float, float]], limit_s: float) -> float:
    """The highest rate whose time is inside the limit; where none is, the highest."""
    return max((seconds <= limit_s, rate) for rate, seconds in rates)[1]
