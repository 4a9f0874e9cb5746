"""Dynamo's reactive loop: one engine more or fewer, by what every engine of a role shows at one instant (pure).

Source: ``planner/core/load_scaling.py`` of ai-dynamo 1.6.1 and what it asks ``perf_model/ais_adapter.py`` for; the
profile takes the place of its model of forward passes. Each function returns the engines wanted, or ``None`` for no
change; the present count, where some still start, gives these up.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autoscale.policies.dynamo_capacity import prefill_s
from autoscale.profile import EngineProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLoad:
    """One decode engine: its batch, requests that wait for it, and the KV of both, tokens."""

    requests: float
    waiting_requests: float
    kv_tokens: float
    waiting_kv_tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """From where one engine asks for more, and below what all of them allow fewer."""

    up: float
    down: float
    is_up_inclusive: bool
    is_down_inclusive: bool


# Queued prompt tokens over the longest context, and KV wanted over KV there is, by optimization target.
PREFILL_THRESHOLDS = {
    "throughput": Thresholds(up=1.0, down=0.1, is_up_inclusive=True, is_down_inclusive=False),
    "latency": Thresholds(up=0.1, down=0.0, is_up_inclusive=True, is_down_inclusive=True),
}
DECODE_THRESHOLDS = {
    "throughput": Thresholds(up=1.0, down=0.6, is_up_inclusive=False, is_down_inclusive=False),
    "latency": Thresholds(up=0.4, down=0.1, is_up_inclusive=False, is_down_inclusive=False),
}


def engines_by_threshold(values: Sequence[float], limits: Thresholds, *, are_starting: bool) -> int | None:
    """Any above: one more. All below, and the rest would not ask for it back: one fewer (the easy targets)."""
    count = len(values)
    if any(v >= limits.up if limits.is_up_inclusive else v > limits.up for v in values):
        return count + 1
    are_below = all(v <= limits.down if limits.is_down_inclusive else v < limits.down for v in values)
    if not are_below or (count == 1 and not are_starting):
        return None
    is_undone = count > 1 and max(values) * count / (count - 1) >= limits.up
    return count if is_undone else count - 1


def prefill_engines_by_ttft(
    queued_tokens: Sequence[float],
    profile: EngineProfile,
    *,
    input_tokens: float,
    ttft_s: float,
    slack_frac: float,
    are_starting: bool,
) -> int | None:
    """One more where every engine would miss the TTFT; one fewer where none did with the queue of one more of them.

    Args:
        queued_tokens: prompt tokens that wait at each engine.
        profile: of one of them.
        input_tokens: length of the next prompt.
        ttft_s: the objective.
        slack_frac: share of what the prompt itself leaves of it that queues may take after a scale-in.
        are_starting: whether engines start that can be given up.
    """
    count = len(queued_tokens)
    if all(prefill_s(profile, queued + input_tokens) > ttft_s for queued in queued_tokens):
        return count + 1
    share = count / (count - 1) if count > 1 else 1.0
    own_s = prefill_s(profile, input_tokens)
    slack_s = (ttft_s - own_s) * slack_frac
    fits = all(prefill_s(profile, queued * share + input_tokens) - own_s < slack_s for queued in queued_tokens)
    return count - 1 if fits and (count > 1 or are_starting) else None


def decode_engines_by_itl(
    loads: Sequence[DecodeLoad],
    profile: EngineProfile,
    *,
    context_tokens: float,
    itl_s: float,
    slack_frac: float,
    are_starting: bool,
) -> int | None:
    """One more where every engine would miss the ITL; one fewer where all fit with the load of one more of them.

    Args:
        loads: of each engine.
        profile: of one of them.
        context_tokens: KV of the next request.
        itl_s: the objective.
        slack_frac: share of it that may be used after a scale-in.
        are_starting: whether engines start that can be given up.
    """
    count = len(loads)

    def itl_with(load: DecodeLoad, share: float) -> float:
        requests = (load.requests + load.waiting_requests) * share + 1.0
        kv_tokens = (load.kv_tokens + load.waiting_kv_tokens) * share + context_tokens
        return profile.decode.seconds_for(math.ceil(requests), kv_tokens / requests)

    if all(itl_with(load, 1.0) > itl_s for load in loads):
        return count + 1
    share = count / (count - 1) if count > 1 else 1.0
    fits = all(
        int((load.kv_tokens + load.waiting_kv_tokens) * share) < profile.kv_tokens
        and itl_with(load, share) < itl_s * slack_frac
        for load in loads
    )
    return count - 1 if fits and (count > 1 or are_starting) else None
