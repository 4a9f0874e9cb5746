"""Replica counts over time: how many engines a trace keeps busy, which role causes misses, and runs of counts (pure).

Time is divided into bins of equal length.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autoscale.engines.capacity import decode_tokens_per_s
from autoscale.sim.scenario import Run, Scenario, run_schedule
from autoscale.types import PoolKey
from kvtransfer.topology import Role

# Replicas in every bin of time: a row for each role, in the order of ``Role``. ``filled`` and ``changes_of`` take one
# row.
Counts = NDArray[np.int64]
# Assumed time per output token, as a share of the TPOT objective.
_PACE_FRAC = 0.8


def keys_of(scenario: Scenario) -> list[PoolKey]:
    """The pools of a scenario with one group, in the order of ``Role``."""
    return sorted(scenario.pools, key=lambda key: list(Role).index(key.role))


def demands(scenario: Scenario, bin_s: float, tpot_s: float) -> NDArray[np.float64]:
    """Number of engines that the work of every bin keeps busy: a row for each role, a column for each bin.

    Prompts count when they arrive. Output tokens count at an even pace from the arrival on. ``tpot_s``: the TPOT
    objective, which limits a decode engine's batch.
    """
    bins = int(scenario.end_s // bin_s) + 1
    # By bin: time of prefill, output tokens, and the sum of these tokens' contexts.
    prefill_s, tokens, context_sums = np.zeros((3, bins))
    prefill, decode = (scenario.profiles[key] for key in keys_of(scenario))
    for request in scenario.trace:
        index = int(request.at_s // bin_s)
        prefill_s[index] += prefill.prefill.chunk_s(0.0, request.input_tokens)
        begins_s = request.at_s
        ends_s = begins_s + request.output_tokens * tpot_s * _PACE_FRAC
        for at in range(index, min(bins - 1, int(ends_s // bin_s)) + 1):
            # Share of the answer that comes in this bin.
            share = (min(ends_s, (at + 1) * bin_s) - max(begins_s, at * bin_s)) / (ends_s - begins_s)
            tokens[at] += share * request.output_tokens
            mean_context = request.input_tokens + request.output_tokens / 2
            context_sums[at] += share * request.output_tokens * mean_context
    decode_engines = np.zeros(bins)
    for index in np.flatnonzero(tokens):
        tokens_per_s = decode_tokens_per_s(decode, context_sums[index] / tokens[index], tpot_s)  # of one engine
        decode_engines[index] = tokens[index] / bin_s / tokens_per_s
    return np.array([prefill_s / bin_s, decode_engines])


def misses(run: Run) -> Iterator[tuple[Role, float]]:
    """The role that caused the miss, and the arrival (s), of each measured request that missed an objective.

    The role is prefill if the first token came late and prefill alone took more than half of the TTFT objective. Else
    it is decode.
    """
    for record, slo, is_met in zip(run.measured, run.slos, run.is_met, strict=True):
        if is_met:
            continue
        is_late = record.ttft_s is None or record.ttft_s > slo.ttft_s
        # Wait and computation on prefill. The rest of the TTFT passes on decode.
        prefill_s = 0.0 if record.prefilled_s is None else record.prefilled_s - record.sent_s
        is_by_prefill = is_late and prefill_s > slo.ttft_s / 2
        yield Role.PREFILL if is_by_prefill else Role.DECODE, record.sent_s


def filled(counts: Counts, start_bins: float, warm_up_bins: float) -> Counts:
    """Counts of one role without gaps that are shorter than a start: to stop a replica and start it anew costs more.

    ``start_bins``, ``warm_up_bins``: time of a start and of the warm-up, bins. The first count stays for the warm-up,
    in which no policy decides, and for one start more: no new replica is ready before that. It becomes the highest
    count of this time.
    """
    result = counts.copy()
    first_bins = math.ceil(warm_up_bins + start_bins)
    result[:first_bins] = result[:first_bins].max(initial=1)
    # A gap of a level is ``right - left - 1`` bins with fewer replicas than the level, between two bins that have as
    # many or more.
    for level in range(1, int(result.max()) + 1):
        for left, right in pairwise(np.flatnonzero(result >= level)):
            if 1 < right - left <= start_bins + 1:
                np.maximum(result[left:right], level, out=result[left:right])
    return result


def changes_of(counts: Sequence[int] | Counts, bin_s: float) -> list[tuple[float, int]]:
    """Counts by bin as (seconds, replicas), one entry for the first bin and for each change."""
    return [(index * bin_s, int(n)) for index, n in enumerate(counts) if index == 0 or n != counts[index - 1]]


def run_counts(scenario: Scenario, counts: Counts, bin_s: float) -> Run:
    """The run of a scenario with these counts in each bin."""
    return run_schedule(
        scenario, {key: changes_of(row, bin_s) for key, row in zip(keys_of(scenario), counts, strict=True)}
    )
