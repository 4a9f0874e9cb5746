"""Replica counts over time: the need of a trace's work, the role that causes misses, the changes of counts (pure)."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autoscale.engines.capacity import decode_tokens_per_s
from autoscale.sim.scenario import Run, Scenario, run_schedule
from autoscale.types import PoolKey
from kvtransfer.topology import Role

# Replicas in every bin of time: a row for each role, in the order of ``Role``.
Counts = NDArray[np.int64]
# Assumed time per output token of each stream, as a share of the TPOT objective.
_PACE_FRAC = 0.8


def keys_of(scenario: Scenario) -> list[PoolKey]:
    """The pools of a scenario with one group, in the order of ``Role``."""
    return sorted(scenario.pools, key=lambda key: list(Role).index(key.role))


def demands(scenario: Scenario, bin_s: float, tpot_s: float) -> NDArray[np.float64]:
    """Number of engines that the work of every bin keeps busy: a row for each role."""
    bins = int(scenario.end_s // bin_s) + 1
    prefill_s, tokens, context = np.zeros((3, bins))
    prefill, decode = (scenario.profiles[key] for key in keys_of(scenario))
    for request in scenario.trace:
        index = int(request.at_s // bin_s)
        prefill_s[index] += prefill.prefill.chunk_s(0.0, request.input_tokens)
        begins_s = request.at_s
        ends_s = begins_s + request.output_tokens * tpot_s * _PACE_FRAC
        for at in range(index, min(bins - 1, int(ends_s // bin_s)) + 1):
            share = (min(ends_s, (at + 1) * bin_s) - max(begins_s, at * bin_s)) / (ends_s - begins_s)
            tokens[at] += share * request.output_tokens
            context[at] += share * request.output_tokens * (request.input_tokens + request.output_tokens / 2)
    engines = np.zeros(bins)
    for index in np.flatnonzero(tokens):
        per_engine = decode_tokens_per_s(decode, context[index] / tokens[index], tpot_s)
        engines[index] = tokens[index] / bin_s / per_engine
    return np.array([prefill_s / bin_s, engines])


def misses(run: Run) -> Iterator[tuple[Role, float]]:
    """The role that caused the miss, and the arrival (s), of each request that missed an objective."""
    for record, slo, is_met in zip(run.measured, run.slos, run.is_met, strict=True):
        if is_met:
            continue
        is_late = record.ttft_s is None or record.ttft_s > slo.ttft_s
        # The rest of the TTFT is the wait for KV on decode.
        prefill_s = 0.0 if record.prefilled_s is None else record.prefilled_s - record.sent_s
        yield Role.PREFILL if is_late and prefill_s > slo.ttft_s / 2 else Role.DECODE, record.sent_s


def filled(counts: Counts, start_bins: float, warm_up_bins: float) -> Counts:
    """Counts of one role without gaps that are shorter than a start: to stop a replica and start it anew costs more.

    The first counts stay for ``warm_up_bins``, in which no policy decides, and for one start more: no new replica is
    ready before that.
    """
    result = counts.copy()
    first = math.ceil(warm_up_bins + start_bins)
    result[:first] = result[:first].max(initial=1)
    for level in range(1, int(result.max()) + 1):
        for left, right in pairwise(np.flatnonzero(result >= level)):
            if 1 < right - left <= start_bins + 1:
                np.maximum(result[left:right], level, out=result[left:right])
    return result


def changes_of(counts: Sequence[int] | Counts, bin_s: float) -> list[tuple[float, int]]:
    """Counts per bin as (seconds, replicas), one entry for each change."""
    return [(index * bin_s, int(n)) for index, n in enumerate(counts) if not index or n != counts[index - 1]]


def run_counts(scenario: Scenario, counts: Counts, bin_s: float) -> Run:
    """The run of a scenario with these counts in each bin."""
    return run_schedule(
        scenario, {key: changes_of(row, bin_s) for key, row in zip(keys_of(scenario), counts, strict=True)}
    )
