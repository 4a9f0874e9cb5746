"""Whole replicas of both roles, for a load or for the GPUs that there are (pure).

Prefill's tensor parallel size is the smallest that serves the longest prompt (``candidates``). Decode's is the one that
makes the whole cheapest under the TPOT objective. Engines and counts of both roles are searched together.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autoscale.engines.candidates import Candidate, Need, NoEngineError, fit_pairs, gpu_type, gpus_each
from autoscale.engines.optimal_ratio import OptimalRatio, optimal_ratio
from autoscale.engines.profile import EngineProfile

# Tolerance for rounding errors of replicas: 3.0000000001 is 3.
_EPSILON = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Whole replicas of both roles.

    Attributes:
        ratio: of the two engines, unrounded.
        prefill_needed: replicas that the load needs, not rounded; with a budget, those for the carried load.
        decode_needed: as ``prefill_needed``, of decode.
        carried_per_s: requests per second that the whole replicas serve at the planned share of their capacity.
        cost_per_hour: GPUs, each times its price.
    """

    prefill: EngineProfile
    decode: EngineProfile
    ratio: OptimalRatio
    prefill_replicas: int
    decode_replicas: int
    prefill_needed: float
    decode_needed: float
    carried_per_s: float
    cost_per_hour: float

    @property
    def gpus_by_type(self) -> dict[str, int]:
        """GPUs that the replicas hold; engines without a GPU count as one of type CPU."""
        return gpus_of(self.prefill, self.prefill_replicas, self.decode, self.decode_replicas)


def gpus_of(prefill: EngineProfile, prefills: int, decode: EngineProfile, decodes: int) -> dict[str, int]:
    """GPUs by type of these replicas."""
    gpus = {gpu_type(prefill): prefills * gpus_each(prefill)}
    gpus[gpu_type(decode)] = gpus.get(gpu_type(decode), 0) + decodes * gpus_each(decode)
    return gpus


def fleets_for_load(
    prefills: Sequence[Candidate],
    decodes: Sequence[Candidate],
    need: Need,
    requests_per_s: float,
    prices: Mapping[str, float],
) -> list[Fleet]:
    """For each fit pair of engines, the fewest whole replicas that carry a load; the cheapest pair first.

    ``prices``: cost of a GPU hour by type; a type that is left out costs 1, so that without prices GPUs are counted.

    Raises:
        NoEngineError: no pair is fit.
    """
    fleets = []
    for prefill, decode in fit_pairs(prefills, decodes):
        ratio = optimal_ratio(prefill, decode, need.lengths, tpot_s=need.tpot_s)
        needed = _needed(ratio, requests_per_s, need.busy_frac)
        # Each role must carry the whole load, so the fewest of each are the fewest together.
        counts = max(1, _whole(needed[0])), max(1, _whole(needed[1]))
        fleets.append(_fleet(prefill, decode, ratio, counts, needed, need, prices))
    return sorted(fleets, key=lambda fleet: (fleet.cost_per_hour, -fleet.carried_per_s))


def fleets_in_gpus(
    prefills: Sequence[Candidate],
    decodes: Sequence[Candidate],
    need: Need,
    gpus: Mapping[str, int],
    prices: Mapping[str, float],
) -> list[Fleet]:
    """For each fit pair of engines, the whole replicas that carry the highest load within the GPUs; the best first.

    Of counts that carry the same load, the cheapest are taken. ``gpus``: by type; CPU counts engines without a GPU.

    Raises:
        NoEngineError: no pair is fit, or no pair has room for a replica of each role.
    """
    fleets = []
    for prefill, decode in fit_pairs(prefills, decodes):
        ratio = optimal_ratio(prefill, decode, need.lengths, tpot_s=need.tpot_s)
        options = (
            _fleet(prefill, decode, ratio, counts, None, need, prices)
            for counts in _counts_in(prefill, decode, ratio, gpus)
        )
        if (best := min(options, key=_by_load, default=None)) is not None:
            fleets.append(best)
    if not fleets:
        room = ", ".join(f"{count} {kind}" for kind, count in gpus.items())
        raise NoEngineError(f"no prefill and decode replica fit {room}: give more GPUs, or profiles of smaller engines")
    return sorted(fleets, key=_by_load)


def _by_load(fleet: Fleet) -> tuple[float, float]:
    return -round(fleet.carried_per_s, 9), fleet.cost_per_hour


def _counts_in(
    prefill: EngineProfile, decode: EngineProfile, ratio: OptimalRatio, gpus: Mapping[str, int]
) -> Iterator[tuple[int, int]]:
    """Counts of both roles within the GPUs: each number of prefill replicas, with the decode replicas that it needs."""
    for prefills in range(1, gpus.get(gpu_type(prefill), 0) // gpus_each(prefill) + 1):
        left = gpus.get(gpu_type(decode), 0)
        left -= prefills * gpus_each(prefill) if gpu_type(prefill) == gpu_type(decode) else 0
        # Fewer carry less, and more carry nothing more.
        decodes = min(left // gpus_each(decode), max(1, _whole(prefills / ratio.prefill_per_decode)))
        if decodes < 1:
            return
        yield prefills, decodes


def fleet_of_means(fleet: Fleet, need: Need, requests_per_s: float, prices: Mapping[str, float]) -> Fleet:
    """The fleet of the same engines that the mean lengths alone ask for.

    Its ``carried_per_s`` is the load that these replicas carry of the requests as they are.
    """
    means = optimal_ratio(fleet.prefill, fleet.decode, need.lengths.means(), tpot_s=need.tpot_s)
    needed = _needed(means, requests_per_s, need.busy_frac)
    counts = max(1, _whole(needed[0])), max(1, _whole(needed[1]))
    carried = _fleet(fleet.prefill, fleet.decode, fleet.ratio, counts, needed, need, prices)
    return replace(carried, ratio=means)


def _needed(ratio: OptimalRatio, requests_per_s: float, busy_frac: float) -> tuple[float, float]:
    """Replicas of prefill and decode that a load needs, not rounded."""
    return (
        requests_per_s / (busy_frac * ratio.prefill_requests_per_s),
        requests_per_s / (busy_frac * ratio.decode_requests_per_s),
    )


def _fleet(
    prefill: EngineProfile,
    decode: EngineProfile,
    ratio: OptimalRatio,
    counts: tuple[int, int],
    needed: tuple[float, float] | None,
    need: Need,
    prices: Mapping[str, float],
) -> Fleet:
    carried = need.busy_frac * min(counts[0] * ratio.prefill_requests_per_s, counts[1] * ratio.decode_requests_per_s)
    needed = needed or _needed(ratio, carried, need.busy_frac)
    gpus = gpus_of(prefill, counts[0], decode, counts[1])
    return Fleet(
        prefill=prefill,
        decode=decode,
        ratio=ratio,
        prefill_replicas=counts[0],
        decode_replicas=counts[1],
        prefill_needed=needed[0],
        decode_needed=needed[1],
        carried_per_s=carried,
        cost_per_hour=math.fsum(prices.get(kind, 1.0) * count for kind, count in gpus.items()),
    )


def _whole(replicas: float) -> int:
    return math.ceil(replicas - _EPSILON)
