"""Algorithm 1: replicas, batch and parallelism of each operator by greedy steps at the bottleneck (pure).

Where the printed algorithm and the text differ, or a line cannot be used as printed:

- Line 8 adds T_v / b_v. A request waits for its whole batch, so this is T_v + W_v, as the text of 4.2.1 has it.
- Line 4 takes the ceiling of lambda / mu. Where that quotient is whole, the queue would not be stable: one more.
- Line 24 takes the move with the largest fall of T. With tensor parallelism that is always the largest size. The text
  prefers "the smallest change that most effectively reduces T_total": here that is the largest fall for each added GPU,
  and the cheapest move as soon as one meets the objective.
- COST, line 16, is the sum of P R as in Eq. 8. Operators share GPUs, so of equal sums the one with less GPU time is
  cheaper, and a move may keep R and save GPU time.
- Lines 18 and 26 end at the first bottleneck without a useful move. Here the next operators by sojourn time are tried.
- A step changes R by one up to 16 replicas, and by a sixteenth of them beyond, so thousands of replicas take no longer.
- The wait for a full batch depends on the largest batch of all operators. Where no move of one operator helps, all
  start again with smaller batches.

It ends always. While T is above the objective, each move lowers T by at least a hundredth of what is missing, and the
waits that replicas can still save are bounded. Once T is within the objective, each move lowers the sum of P R,
or keeps it and lowers the GPU time by a hundredth, and keeps T within the objective.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autoscale.operators.demand import PlanError, SloBelowServiceError
from autoscale.operators.evaluation import Assumptions, Choice
from autoscale.operators.latency import path_s
from autoscale.operators.options import OperatorOptions, OptionTable
from autoscale.operators.queueing import fill_s
from autoscale.operators.sojourns import Queues, Seed, by_sojourn, sojourn_s

Floats = NDArray[np.float64]

# A move must lower T by this share of what is missing to the objective: a smaller fall is not worth a GPU.
_LEAST_FALL_FRAC = 0.01
_STEP_REPLICAS = 16
# Longer than any path, and short enough to keep its digits when it is subtracted again.
_LONG_S = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """The result of Algorithm 1: by operator, its option and its replicas.

    ``latency_s``: T_total if each replica has GPUs of its own. ``steps``: accepted moves.
    """

    choice: Choice
    replicas: tuple[int, ...]
    latency_s: float
    steps: int


@dataclass(slots=True)
class _State:
    choice: list[int]
    replicas: list[int]
    most_batch: int
    most_parallel: int
    queues: Queues
    seed: Seed


def size(
    table: OptionTable,
    assumptions: Assumptions,
    slo_s: float | None = None,
    *,
    most_parallel: int = 1 << 30,
    queues: Queues | None = None,
    seed: Seed = by_sojourn,
) -> Sizing:
    """Algorithm 1 for the demand of a table.

    ``slo_s`` replaces its objective, to leave room for interference. ``most_parallel`` bounds the tensor parallel size.
    ``queues``: those of the same table and assumptions, if more than one sizing is made. ``seed``: what the first
    options are chosen by; the paper's is the sojourn time.

    Raises:
        SloBelowServiceError: the objective is below the time of one pass that never waits; the message has both.
        PlanError: no move leads to the objective.
    """
    objective_s = table.demand.slo_s if slo_s is None else slo_s
    check_slo(table, objective_s)
    caps = sorted({int(size) for one in table.operators for size in one.batch}, reverse=True)
    queues = queues or Queues(table=table, assumptions=assumptions)
    for cap in caps:
        state = _State([], [], cap, most_parallel, queues, seed)
        sizing = _sized(table, assumptions, objective_s, state)
        if sizing is not None and sizing.latency_s <= objective_s:
            return sizing
    raise PlanError(
        f"Algorithm 1 finds no plan within {objective_s:.4g} s, although one pass that never waits takes "
        f"{table.bare_s:.4g} s: raise the objective"
    )


def _sized(table: OptionTable, assumptions: Assumptions, objective_s: float, state: _State) -> Sizing | None:
    """The algorithm within the bounds of an empty state; None: an operator has no such option that fits."""
    for place in range(len(table.operators)):
        first = _first(table, place, assumptions, state)
        if first is None:
            return None
        state.choice.append(first[0])
        state.replicas.append(first[1])
    steps = 0
    while True:
        latency_s, sojourns = _latency(table, state, assumptions)
        move = _move(table, state, assumptions, objective_s, latency_s, sojourns)
        if move is None:
            break
        place, state.choice[place], state.replicas[place] = move
        steps += 1
    return Sizing(choice=tuple(state.choice), replicas=tuple(state.replicas), latency_s=latency_s, steps=steps)


def check_slo(table: OptionTable, slo_s: float) -> None:
    """Raise a SloBelowServiceError if no plan can meet an objective."""
    if slo_s < table.bare_s:
        raise SloBelowServiceError(
            f"the objective is {slo_s:.4g} s, and one pass that never waits takes {table.bare_s:.4g} s at "
            f"{table.demand.length_tokens} tokens: raise the objective, or use faster GPUs"
        )


def _first(table: OptionTable, place: int, assumptions: Assumptions, state: _State) -> tuple[int, int] | None:
    """Lines 2 to 6: at the smallest parallelism, the batch that the seed prefers, with the fewest replicas."""
    one, least = table.operators[place], table.least_replicas[place]
    usable = (least > 0) & (one.batch <= state.most_batch) & (one.parallel <= state.most_parallel)
    if not usable.any():
        return None
    smallest = int(one.parallel[usable].min())
    sojourns = sojourn_s(table, one, np.maximum(least, 1), assumptions)
    best = int(np.where(usable & (one.parallel == smallest), state.seed(one, sojourns), np.inf).argmin())
    return best, int(least[best])


def _latency(table: OptionTable, state: _State, assumptions: Assumptions) -> tuple[float, list[float]]:
    """T_total, and the sojourn time with transfer of each operator."""
    picked = list(zip(table.operators, state.choice, strict=True))
    most_batch = max(int(one.batch[option]) for one, option in picked)
    alone = np.array(
        [
            state.queues.sojourns_s(place, count)[option]
            for place, (count, option) in enumerate(zip(state.replicas, state.choice, strict=True))
        ]
    )
    moves = np.array([one.transfer_s[option] for one, option in picked])
    sojourns = (alone + moves * _crossing(state.replicas)).tolist()
    fill = _fill(table, float(most_batch), assumptions)
    return fill + path_s(table.names, table.edges, sojourns), sojourns


def _crossing(replicas: list[int]) -> Floats:
    """Share of the outputs that go to another GPU: replicas beyond those that both operators have are elsewhere."""
    counts = np.array(replicas, dtype=np.float64)
    return np.append(1.0 - np.minimum(counts[:-1], counts[1:]) / np.maximum(counts[:-1], counts[1:]), 0.0)


def _fill(table: OptionTable, batch: float, assumptions: Assumptions) -> float:
    rate = table.demand.passes_per_s
    return fill_s(rate, batch) if assumptions.is_fill_counted and rate else 0.0


def _move(
    table: OptionTable,
    state: _State,
    assumptions: Assumptions,
    objective_s: float,
    latency_s: float,
    sojourns: list[float],
) -> tuple[int, int, int] | None:
    """The next move: operator, its new option and replicas; None: there is none."""
    is_up = latency_s > objective_s
    for place in sorted(range(len(sojourns)), key=lambda place: -sojourns[place]):
        replicas = state.replicas[place]
        stride = max(1, replicas // _STEP_REPLICAS)
        for step in dict.fromkeys((stride, 1) if is_up else (stride, 1, 0)):
            count = replicas + step if is_up else replicas - step
            if count < 1:
                continue
            moved = _moved_s(table, state, assumptions, place, count)
            best = _best(table.operators[place], state, place, count, moved, objective_s, latency_s)
            if best is not None:
                return place, best, count
    return None


def _moved_s(table: OptionTable, state: _State, assumptions: Assumptions, place: int, count: int) -> Floats:
    """T_total for each option of one operator if it had ``count`` replicas; infinite where that is not possible.

    The critical path as a function of the operator's own time s is the longer of the longest path without the operator
    and the longest one through it, so two sums give it for all options.
    """
    one, least = table.operators[place], table.least_replicas[place]
    own = replace(state, choice=list(state.choice), replicas=list(state.replicas))
    own.replicas[place] = count
    _, sojourns = _latency(table, own, assumptions)
    sojourns[place] = 0.0
    without = path_s(table.names, table.edges, sojourns)
    sojourns[place] = _LONG_S
    through = path_s(table.names, table.edges, sojourns) - _LONG_S
    usable = (least > 0) & (least <= count)
    usable &= (one.batch <= state.most_batch) & (one.parallel <= state.most_parallel)
    seconds = state.queues.sojourns_s(place, count) + one.transfer_s * _crossing(own.replicas)[place]
    others = max(
        (int(other.batch[state.choice[index]]) for index, other in enumerate(table.operators) if index != place),
        default=1,
    )
    fills = np.array([_fill(table, float(max(others, batch)), assumptions) for batch in one.batch])
    return np.where(usable, fills + np.maximum(without, through + seconds), np.inf)


def _best(
    one: OperatorOptions,
    state: _State,
    place: int,
    count: int,
    moved_s: Floats,
    objective_s: float,
    latency_s: float,
) -> int | None:
    """Lines 13 to 16 and 22 to 24: the option of the best move of one operator; None: no move is useful."""
    current = state.choice[place]
    added = one.parallel * count - int(one.parallel[current]) * state.replicas[place]
    keeps = moved_s <= objective_s
    is_up = latency_s > objective_s
    if not is_up:
        saves_time = one.gpu_s < (1.0 - _LEAST_FALL_FRAC) * one.gpu_s[current]
        keeps &= ((added < 0) | ((added == 0) & saves_time)) & (one.batch >= one.batch[current])
    if keeps.any():
        # The cheapest; of those the one with the least GPU time, then the fastest.
        return int(np.lexsort((moved_s, one.gpu_s, np.where(keeps, added, np.iinfo(np.int64).max)))[0])
    falls = np.where(np.isfinite(moved_s), latency_s - moved_s, -np.inf) if is_up else np.full(len(moved_s), -np.inf)
    if falls.max() < _LEAST_FALL_FRAC * (latency_s - objective_s):
        return None
    return int((falls / np.maximum(added, 0.5)).argmax())
