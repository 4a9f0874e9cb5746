"""Searches tensor parallel sizes and replica counts of both roles by predicted effects (pure).

The search begins at the counts of ``tandem ratio``, which are for the mean load. Replicas are then added where they
help most for their GPUs, until enough requests keep their objectives, and removed where none misses them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from autoscale.engines.candidates import Candidate, Need, decode_candidates, prefill_candidates
from autoscale.engines.profile import EngineProfile
from autoscale.engines.replica_counts import Fleet, fleets_for_load, fleets_in_gpus
from autoscale.operators.pair_load import PairLoad
from autoscale.operators.pair_prediction import predict
from autoscale.operators.pool_pair import Effect, LengthRule, Objectives, PoolPair

# Most pairs of engines whose counts are searched, those on the fewest GPUs first.
_MOST_PAIRS = 6
# Most replicas that are added to the first counts of a pair.
_MOST_STEPS = 64

Predictor = Callable[[PoolPair], Effect]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """A pair of pools and its predicted effect; ``is_enough``: enough requests keep their objectives."""

    pair: PoolPair
    effect: Effect
    is_enough: bool


def size_pair(
    prefills: Sequence[EngineProfile],
    decodes: Sequence[EngineProfile],
    load: PairLoad,
    rule: LengthRule,
    objectives: Objectives,
    gpus: int | None = None,
) -> Sized:
    """The pair of engines and counts on the fewest GPUs that serves the load; with ``gpus``, the best within them.

    Raises:
        NoEngineError: no engine of a role serves the requests, or the GPUs are too few for any pair.
    """
    need = Need(
        lengths=load.lengths,
        longest_input_tokens=load.input_quantile(objectives.attained_frac),
        ttft_s=objectives.ttft_s,
        tpot_s=objectives.tpot_s,
    )
    fit_prefills = _fit(prefills, prefill_candidates, need, load)
    fit_decodes = _fit(decodes, decode_candidates, need, load)
    seen: dict[tuple[int, int, int, int], Effect] = {}

    def effect(pair: PoolPair) -> Effect:
        # Profiles are large, and live as long as the search: their identity is enough.
        key = (id(pair.prefill), id(pair.decode), pair.prefill_replicas, pair.decode_replicas)
        if key not in seen:
            seen[key] = predict(pair, load, rule, objectives)
        return seen[key]

    found = [
        _sized(_first(fleet), effect, objectives, gpus)
        for fleet in _fleets(fit_prefills, fit_decodes, need, load, gpus)[:_MOST_PAIRS]
    ]
    return min(found, key=lambda sized: (not sized.is_enough, *_badness(sized, gpus)))


def _badness(sized: Sized, gpus: int | None) -> tuple[float, float]:
    """Fewer GPUs first where enough is reached or GPUs are free; else the higher share."""
    if sized.is_enough or gpus is None:
        return float(sized.effect.gpus), -sized.effect.attained_frac
    return -sized.effect.attained_frac, float(sized.effect.gpus)


def _fit(
    profiles: Sequence[EngineProfile],
    judge: Callable[[Sequence[EngineProfile], Need], list[Candidate]],
    need: Need,
    load: PairLoad,
) -> list[Candidate]:
    """Each engine judged alone: the prediction, not the number of its GPUs, chooses among those that are fit."""
    longest = load.lengths.longest_input_tokens + load.lengths.longest_output_tokens
    judged = []
    for profile in profiles:
        (candidate,) = judge([profile], need)
        if candidate.refusal is None and profile.kv_tokens < longest:
            refusal = f"the longest request, {longest:.0f} tokens, does not fit its KV of {profile.kv_tokens} tokens"
            candidate = replace(candidate, refusal=refusal)
        judged.append(candidate)
    return judged


def _fleets(
    prefills: Sequence[Candidate], decodes: Sequence[Candidate], need: Need, load: PairLoad, gpus: int | None
) -> list[Fleet]:
    if gpus is None:
        return fleets_for_load(prefills, decodes, need, load.requests_per_s, {})
    kinds = {each.profile.gpu or "CPU" for each in (*prefills, *decodes)}
    room: Mapping[str, int] = dict.fromkeys(kinds, gpus)
    loaded = [
        fleet for fleet in fleets_for_load(prefills, decodes, need, load.requests_per_s, {}) if _gpus(fleet) <= gpus
    ]
    # The counts for the load, where they fit; and those that carry most within the GPUs.
    return loaded or fleets_in_gpus(prefills, decodes, need, room, {})


def _gpus(fleet: Fleet) -> int:
    return sum(fleet.gpus_by_type.values())


def _first(fleet: Fleet) -> PoolPair:
    return PoolPair(
        prefill=fleet.prefill,
        decode=fleet.decode,
        prefill_replicas=fleet.prefill_replicas,
        decode_replicas=fleet.decode_replicas,
    )


def _sized(pair: PoolPair, effect: Predictor, objectives: Objectives, gpus: int | None) -> Sized:
    def is_enough(each: PoolPair) -> bool:
        return effect(each).attained_frac >= objectives.attained_frac

    for _ in range(_MOST_STEPS):
        if is_enough(pair):
            break
        grown = [each for each in neighbours(pair, 1) if gpus is None or each.gpus <= gpus]
        if not grown:
            break
        before = effect(pair)

        def gain(each: PoolPair, before: Effect = before) -> float:
            now = effect(each)
            # Where no count is enough yet, both shares may be equal: then the shorter waits decide.
            shorter_s = max(0.0, before.ttft_p90_s - now.ttft_p90_s) + max(0.0, before.tpot_p90_s - now.tpot_p90_s)
            return (now.attained_frac - before.attained_frac + 1e-3 * shorter_s) / (now.gpus - before.gpus)

        pair = max(grown, key=gain)
    while smaller := [each for each in neighbours(pair, -1) if is_enough(each)]:
        pair = min(smaller, key=lambda each: (each.gpus, -effect(each).attained_frac))
    return Sized(pair=pair, effect=effect(pair), is_enough=is_enough(pair))


def neighbours(pair: PoolPair, change: int) -> list[PoolPair]:
    """The pairs with ``change`` replicas more of one role; each role keeps one."""
    changed = [
        replace(pair, prefill_replicas=pair.prefill_replicas + change),
        replace(pair, decode_replicas=pair.decode_replicas + change),
    ]
    return [each for each in changed if min(each.prefill_replicas, each.decode_replicas) >= 1]
