"""Which engines are fit for each role: that they serve the longest request, and that KV moves between them (pure).

Of each GPU type, prefill takes the fewest GPUs with which an engine holds and computes the longest prompt in time:
further replicas serve more than further GPUs of one engine do (DOPD section IV-C, Eq. 15).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from autoscale.engines.lengths import Lengths
from autoscale.engines.profile import EngineProfile

# Share of its capacity for which a replica is planned: 0.9 of the concurrency, DOPD section IV-B.
BUSY_FRAC = 0.9
# GPU type of engines without a GPU, each of which counts as one.
CPU = "CPU"
# KV per token is measured, so two profiles of one type may differ by this share.
_KV_TOLERANCE = 0.01


class NoEngineError(ValueError):
    """No engine, or no number of engines, is fit; the message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """The requests that are to be served, and their objectives.

    Attributes:
        lengths: of the requests.
        longest_input_tokens: the longest prompt that must be served.
        ttft_s: objective of the time to first token.
        tpot_s: objective of the time per output token.
        busy_frac: share of its capacity for which a replica is planned.
    """

    lengths: Lengths
    longest_input_tokens: float
    ttft_s: float
    tpot_s: float
    busy_frac: float = BUSY_FRAC


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """The engine of one role, and why it is not taken.

    Attributes:
        longest_s: prefill: time from the begin of the longest prompt until decode has its KV. Decode: time of a step
            with one request.
        refusal: why it is not fit; ``None``: it is.
    """

    profile: EngineProfile
    longest_s: float
    refusal: str | None = None


def gpu_type(profile: EngineProfile) -> str:
    """The GPU type of an engine; CPU: it has none."""
    return profile.gpu or CPU


def gpus_each(profile: EngineProfile) -> int:
    """GPUs of one engine; an engine without a GPU counts as one of type CPU."""
    return max(1, profile.gpus)


def check_alike(profiles: Sequence[EngineProfile]) -> None:
    """Raise NoEngineError unless all profiles are of one model, with the same KV per token."""
    first = profiles[0]
    for other in profiles[1:]:
        if other.model != first.model:
            raise NoEngineError(
                f"profile {first.name} is of {first.model!r}, and {other.name} is of {other.model!r}: give profiles of "
                "one model"
            )
        kv, other_kv = (each.handoff.kv_bytes_per_token for each in (first, other))
        if not math.isclose(kv, other_kv, rel_tol=_KV_TOLERANCE):
            raise NoEngineError(
                f"profile {first.name} has {kv:.0f} bytes of KV per token, and {other.name} has {other_kv:.0f}: KV of "
                "another type cannot be handed over; give profiles with the same kv_cache_dtype"
            )


def prefill_candidates(profiles: Sequence[EngineProfile], need: Need) -> list[Candidate]:
    """The prefill engines, and which are fit: the fewest GPUs of each type that serve the longest prompt in time."""
    judged = [_judged_prefill(profile, need) for profile in profiles]
    fewest: dict[str, int] = {}
    for each in judged:
        if each.refusal is None:
            kind = gpu_type(each.profile)
            fewest[kind] = min(fewest.get(kind, gpus_each(each.profile)), gpus_each(each.profile))
    return [
        replace(each, refusal=f"{fewest[kind]} GPUs of this type are enough for the longest prompt")
        if each.refusal is None and gpus_each(each.profile) > fewest[kind := gpu_type(each.profile)]
        else each
        for each in judged
    ]


def _judged_prefill(profile: EngineProfile, need: Need) -> Candidate:
    tokens = need.longest_input_tokens
    longest_s = profile.prefill.seconds_for(tokens) + profile.handoff.seconds_for(tokens)
    refusal = None
    if tokens > profile.kv_tokens:
        refusal = f"the longest prompt, {tokens:.0f} tokens, does not fit its KV of {profile.kv_tokens} tokens"
    elif longest_s > need.ttft_s:
        refusal = f"the longest prompt, {tokens:.0f} tokens, takes {longest_s:.3g} s, more than ttft_s {need.ttft_s:g}"
    return Candidate(profile=profile, longest_s=longest_s, refusal=refusal)


def decode_candidates(profiles: Sequence[EngineProfile], need: Need) -> list[Candidate]:
    """The decode engines, and which are fit: those that hold the longest request, and keep the TPOT objective."""
    return [_judged_decode(profile, need) for profile in profiles]


def _judged_decode(profile: EngineProfile, need: Need) -> Candidate:
    tokens = need.longest_input_tokens + need.lengths.longest_output_tokens
    step_s = profile.decode.seconds_for(1, need.lengths.context_tokens)
    refusal = None
    if tokens > profile.kv_tokens:
        refusal = f"the longest request, {tokens:.0f} tokens, does not fit its KV of {profile.kv_tokens} tokens"
    elif step_s > need.tpot_s:
        refusal = f"a step with one request takes {step_s:.3g} s, more than tpot_s {need.tpot_s:g}"
    return Candidate(profile=profile, longest_s=step_s, refusal=refusal)


def fit_pairs(prefills: Sequence[Candidate], decodes: Sequence[Candidate]) -> list[tuple[EngineProfile, EngineProfile]]:
    """The pairs of fit engines between which KV can be handed over.

    Raises:
        NoEngineError: no pair is fit.
    """
    for role, candidates in (("prefill", prefills), ("decode", decodes)):
        if all(each.refusal for each in candidates):
            reasons = "; ".join(f"{each.profile.name}: {each.refusal}" for each in candidates)
            raise NoEngineError(
                f"no {role} engine is fit ({reasons}): give a profile with more GPUs, a shorter longest prompt, or a "
                "longer objective"
            )
    fit_prefills, fit_decodes = (
        [each.profile for each in candidates if each.refusal is None] for candidates in (prefills, decodes)
    )
    pairs = [
        (prefill, decode)
        for prefill, decode in product(fit_prefills, fit_decodes)
        if _can_hand_over(gpus_each(prefill), gpus_each(decode))
    ]
    if not pairs:
        sizes = [", ".join(str(gpus_each(each)) for each in profiles) for profiles in (fit_prefills, fit_decodes)]
        raise NoEngineError(
            f"prefill engines of {sizes[0]} GPUs and decode engines of {sizes[1]} GPUs cannot hand KV over: one number "
            "must be a multiple of the other"
        )
    return pairs


def _can_hand_over(prefill_gpus: int, decode_gpus: int) -> bool:
    """Whether vLLM's NIXL connector links the two tensor parallel sizes: it asserts that one divides the other."""
    return max(prefill_gpus, decode_gpus) % min(prefill_gpus, decode_gpus) == 0
