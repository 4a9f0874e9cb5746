"""The brute-force oracle: the fewest GPUs of all options and all layouts of a small graph (section 4.2.3; pure).

It minimises GPUs after placement, as the planners do, not Eq. 8. Layouts are all ways to host each operator, at most
once on a GPU, with tensor parallel replicas on aligned groups of GPUs. Equal layouts under renumbering of GPUs are one.
A lower bound of the latency rejects options before their layouts are tried. It never rejects a feasible one.
"""

import math
from collections.abc import Iterator
from itertools import combinations_with_replacement, product

import numpy as np
from numpy.typing import NDArray

from autoscale.operators.demand import PlanError, TooFewGpusError
from autoscale.operators.evaluation import Assumptions, Choice, Evaluation, evaluate
from autoscale.operators.layout import Layout, Replica, Unit, merged
from autoscale.operators.options import OptionTable
from autoscale.operators.plan import Plan
from autoscale.operators.queueing import fill_s
from autoscale.operators.sizing import check_slo

Floats = NDArray[np.float64]

# Beyond this number of operators a search takes hours.
MOST_OPERATORS = 4
# Busy shares and multipliers at which the bound is evaluated.
_BUSY_GRID = np.concatenate([np.linspace(0.0, 0.9, 91), np.linspace(0.905, 0.995, 19)])
_MULTIPLIERS = np.geomspace(1e-3, 1e3, 25)


def plan_oracle(table: OptionTable, assumptions: Assumptions, most_gpus: int, *, is_pruned: bool = True) -> Plan:
    """The plan with the fewest GPUs; of equal numbers the one with the least weights.

    Raises:
        PlanError: the graph has too many operators, or the accounting is not ``shared``.
        SloBelowServiceError: the objective is below the time of one pass that never waits.
        TooFewGpusError: ``most_gpus`` are too few.
    """
    if len(table.operators) > MOST_OPERATORS or assumptions.accounting.counts_twins:
        raise PlanError(f"the oracle takes at most {MOST_OPERATORS} operators, and the shared accounting")
    check_slo(table, table.demand.slo_s)
    choices = list(product(*(range(len(one.batch)) for one in table.operators)))
    for gpus in range(1, most_gpus + 1):
        kept = _not_rejected(table, assumptions, choices, gpus) if is_pruned else choices
        best: tuple[float, Choice, Layout, Evaluation] | None = None
        for choice in kept:
            for layout in _layouts(table, choice, gpus):
                weights = sum(one.weight_bytes * layout.replicas(at) for at, one in enumerate(table.operators))
                if best is None or weights < best[0]:
                    judged = evaluate(table, choice, layout, assumptions)
                    if judged.meets(table.demand.slo_s):
                        best = weights, choice, layout, judged
        if best is not None:
            return Plan(table=table, choice=best[1], layout=best[2], evaluation=best[3], planner="oracle")
    raise TooFewGpusError(f"{most_gpus} GPUs do not carry {table.demand.passes_per_s:.4g} passes/s")


def lower_bounds(table: OptionTable, assumptions: Assumptions, choices: list[Choice], gpus: int) -> Floats:
    """For each choice, a latency that no layout on ``gpus`` GPUs can be below, seconds.

    With c the least share that operators take from each other (at most 1), an operator sees at least c times the load
    of a GPU. Weighted by work w_v = rate x GPU-seconds, what all operators see adds up to at least c W^2 / gpus
    (Cauchy-Schwarz), where W is the sum of w_v. The bound is the least sum of T_v and waits under this one constraint,
    with as many replicas as the GPUs have room for. A Lagrange multiplier of any size gives a valid bound.
    """
    rate = table.demand.passes_per_s
    options = np.array(choices)
    taken = assumptions.contention.taken_fracs([one for each in table.operators for one in each.activities])
    least_taken = min(1.0, float(taken.min()))
    total = np.zeros(len(choices))
    works = np.zeros((len(choices), len(table.operators)))
    batches = np.ones(len(choices))
    for place, one in enumerate(table.operators):
        works[:, place] = rate * one.gpu_s[options[:, place]]
        batches = np.maximum(batches, one.batch[options[:, place]])
        total += one.time_s[options[:, place]]
    needed = least_taken * works.sum(axis=1) ** 2 / gpus
    waits = np.full(len(choices), -np.inf)
    scale = total / np.maximum(works.sum(axis=1), 1e-12)
    tables = [_waits(one.parallel, gpus, assumptions) for one in table.operators]
    for multiplier in _MULTIPLIERS:
        price = multiplier * scale
        dual = price * needed
        for place, one in enumerate(table.operators):
            mine = options[:, place]
            # The grid's least value is above the true one by at most what the function falls within one cell.
            values = one.time_s[mine, None] * tables[place][mine] - (price * works[:, place])[:, None] * _BUSY_GRID
            dual = dual + values.min(axis=1) - price * works[:, place] * 0.01
        waits = np.maximum(waits, dual)
    fills = np.array([fill_s(rate, float(batch)) if assumptions.is_fill_counted and rate else 0.0 for batch in batches])
    bounds = fills + total + np.maximum(waits, 0.0)
    is_wide = np.any([one.parallel[options[:, place]] > gpus for place, one in enumerate(table.operators)], axis=0)
    is_overloaded = works.sum(axis=1) * least_taken >= gpus
    return np.where(is_wide | is_overloaded, np.inf, bounds)


def _waits(parallel: NDArray[np.int64], gpus: int, assumptions: Assumptions) -> Floats:
    """By option and busy share, the wait in services with all the replicas that GPUs have room for."""
    servers = np.maximum(gpus // parallel, 1)
    return assumptions.wait(servers[:, None], _BUSY_GRID[None, :])


def _not_rejected(table: OptionTable, assumptions: Assumptions, choices: list[Choice], gpus: int) -> list[Choice]:
    if table.edges:
        return choices  # the bound adds up all operators, and a path may leave some out
    bounds = lower_bounds(table, assumptions, choices, gpus)
    return [choice for choice, bound in zip(choices, bounds, strict=True) if bound <= table.demand.slo_s]


def _layouts(table: OptionTable, choice: Choice, gpus: int) -> Iterator[Layout]:
    """All layouts on ``gpus`` GPUs that host every operator and fit into memory if each holds all its KV alone."""
    sizes = [int(one.parallel[option]) for one, option in zip(table.operators, choice, strict=True)]
    width = max(sizes)
    if width > gpus:
        return
    whole = list(_unit_types(sizes, width))
    rest = gpus % width
    tails = [()] if not rest else [(unit,) for unit in _unit_types(sizes, rest)]
    for main in combinations_with_replacement(whole, gpus // width):
        for tail in tails:
            layout = merged([*main, *tail])
            if layout.gpus == gpus and all(layout.replicas(place) for place in range(len(sizes))):
                yield layout


def _unit_types(sizes: list[int], gpus: int) -> Iterator[Unit]:
    """All ways to host operators on ``gpus`` GPUs, but none at all."""
    windows = [[tuple(range(first, first + size)) for first in range(0, gpus - size + 1, size)] for size in sizes]
    seen: set[tuple[tuple[int, ...], ...]] = set()
    hosted = [list(product((False, True), repeat=len(each))) for each in windows]
    for pattern in product(*hosted):
        replicas = tuple(
            Replica(operator=place, gpus=window)
            for place, marks in enumerate(pattern)
            for window, is_on in zip(windows[place], marks, strict=True)
            if is_on
        )
        if not replicas:
            continue
        key = _canonical(pattern, sizes, gpus)
        if key not in seen:
            seen.add(key)
            yield Unit(gpus=gpus, replicas=replicas)


def _canonical(pattern: tuple[tuple[bool, ...], ...], sizes: list[int], gpus: int) -> tuple[tuple[int, ...], ...]:
    """A key that is equal for two GPUs exchanged; only where no replica spans GPUs, else the pattern itself."""
    rows = [tuple(int(on) for on in marks) for marks in pattern]
    spanning = [row for row, size in zip(rows, sizes, strict=True) if size > 1]
    single = [row for row, size in zip(rows, sizes, strict=True) if size == 1]
    if not single or any(sum(row) and len(row) > 1 for row in spanning):
        return tuple(rows)
    columns = sorted(tuple(row[gpu] for row in single) for gpu in range(gpus))
    return (*columns, *spanning)


def gap_frac(plan: Plan, oracle: Plan) -> float:
    """By which share a plan takes more GPUs than the oracle's."""
    return math.inf if not plan.evaluation.meets(plan.table.demand.slo_s) else plan.gpus / oracle.gpus - 1.0
