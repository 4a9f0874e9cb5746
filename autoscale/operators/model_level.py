"""The model-level baseline (section 4.2.3): all operators share batch, replicas and parallelism, and no GPU (pure)."""

from dataclasses import dataclass, replace

from autoscale.operators.accounting import ONE_QUEUE
from autoscale.operators.demand import MOST_GPUS, MemoryTooSmallError, PlanError
from autoscale.operators.evaluation import Assumptions, Choice, Evaluation, evaluate
from autoscale.operators.latency import path_s
from autoscale.operators.layout import Layout, Replica, Unit
from autoscale.operators.options import OperatorOptions, OptionTable
from autoscale.operators.plan import Plan
from autoscale.operators.queueing import fill_s
from autoscale.operators.sizing import check_slo


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    parallel: int
    batch: int
    choice: Choice


def plan_model_level(table: OptionTable, assumptions: Assumptions, most_gpus: int | None = None) -> Plan:
    """The fewest GPUs with which equal instances meet the objective; of equal numbers, the lowest latency.

    ``most_gpus``: plans with more are of no interest; None: all are.

    Each tensor parallel size and batch that all operators have is tried. An operator whose shape does not allow a size
    uses its largest one below it, as engines do with few KV heads.

    Raises:
        SloBelowServiceError: the objective is below the time of one pass that never waits.
        MemoryTooSmallError: no instance fits into its GPUs.
        PlanError: no number of instances on up to ``MOST_GPUS`` GPUs meets the objective.
    """
    check_slo(table, table.demand.slo_s)
    assumptions = of_instances(assumptions)
    shapes = _shapes(table)
    found: list[tuple[int, float, Layout, Choice, Evaluation]] = []
    fits = False
    bounds = {shape: _least_by_work(table, shape, assumptions) for shape in shapes}
    for shape in sorted(shapes, key=lambda shape: bounds[shape] * shape.parallel):
        most = found[0][0] if found else most_gpus
        if most is not None and bounds[shape] * shape.parallel > most:
            break
        if not _holds_weights(table, shape):
            continue
        fits = True
        least = _least_instances(table, shape, assumptions, most, bounds[shape])
        if least is not None:
            layout = instances(table, shape.choice, shape.parallel, least)
            judged = evaluate(table, shape.choice, layout, assumptions)
            found.append((layout.gpus, judged.latency_s, layout, shape.choice, judged))
            found.sort(key=lambda one: one[:2])
    if not found:
        largest = max(shape.parallel for shape in shapes)
        if not fits and most_gpus is None:
            raise MemoryTooSmallError(
                f"the model does not fit into {largest} {table.gpu.name} GPUs, its largest instance"
            )
        raise PlanError(
            f"no number of model instances on up to {most_gpus or MOST_GPUS:,} GPUs keeps {table.demand.slo_s:.4g} s "
            f"at {table.demand.passes_per_s:.4g} passes/s: raise the objective, or lower the rate"
        )
    _, _, layout, choice, judged = found[0]
    return Plan(table=table, choice=choice, layout=layout, evaluation=judged, planner="model")


def of_instances(assumptions: Assumptions) -> Assumptions:
    """What model instances are judged by: an instance serves one batch at a time, so it has one queue for whole passes.

    Where operators share the time of their GPUs, that is what their accounting gives already, but for contention.
    """
    return replace(assumptions, accounting=ONE_QUEUE) if assumptions.accounting.counts_twins else assumptions


def instances(table: OptionTable, choice: Choice, parallel: int, count: int) -> Layout:
    """``count`` model instances of ``parallel`` GPUs each."""
    replicas = []
    for place, (one, option) in enumerate(zip(table.operators, choice, strict=True)):
        own = int(one.parallel[option])
        # An operator with a smaller size has a copy on each part of the instance's GPUs.
        replicas += [
            Replica(operator=place, gpus=tuple(range(first, first + own)), is_base=True)
            for first in range(0, parallel - own + 1, own)
        ]
    return Layout(units=(Unit(gpus=parallel, replicas=tuple(replicas), count=count),))


def _shapes(table: OptionTable) -> list[_Shape]:
    sizes = sorted({int(size) for one in table.operators for size in one.parallel})
    batches = sorted(set.intersection(*({int(size) for size in one.batch} for one in table.operators)))
    shapes = []
    for parallel in sizes:
        options = [_options(one, parallel) for one in table.operators]
        for batch in batches:
            if all(batch in each for each in options):
                choice = tuple(each[batch] for each in options)
                shapes.append(_Shape(parallel=parallel, batch=batch, choice=choice))
    return shapes


def _options(one: OperatorOptions, parallel: int) -> dict[int, int]:
    """By batch, the option with the largest size up to ``parallel``."""
    fits = [at for at, size in enumerate(one.parallel.tolist()) if size <= parallel]
    batches = one.batch.tolist()
    return {batches[at]: at for at in sorted(fits, key=lambda at: int(one.parallel[at]))}


def _holds_weights(table: OptionTable, shape: _Shape) -> bool:
    """Whether the GPUs of an instance hold its weights and one batch."""
    layout = instances(table, shape.choice, shape.parallel, 1)
    unit = layout.units[0]
    needs = [0.0] * unit.gpus
    for one in unit.replicas:
        for gpu in one.gpus:
            needs[gpu] += table.operators[one.operator].gpu_bytes(shape.choice[one.operator], 0.0)
    return max(needs) <= table.memory_bytes


def _least_by_work(table: OptionTable, shape: _Shape, assumptions: Assumptions) -> int:
    """A number of instances below which no GPU time is left, whatever the objective; it may be too low."""
    picked = list(zip(table.operators, shape.choice, strict=True))
    work = table.demand.passes_per_s * sum(float(one.gpu_s[option]) for one, option in picked) / shape.parallel
    taken = assumptions.contention.taken_fracs([one.activities[option] for one, option in picked])
    return max(1, int(work * min(1.0, float(taken.min()))))


def _least_instances(
    table: OptionTable, shape: _Shape, assumptions: Assumptions, most_gpus: int | None, first: int
) -> int | None:
    """The fewest instances of a shape, from ``first`` on; None: no number keeps the objective within ``most_gpus``.

    The latency and the memory of each instance fall with their number, so the number is found by halving.
    """
    slo_s = table.demand.slo_s

    def judged(count: int) -> Evaluation:
        return evaluate(table, shape.choice, instances(table, shape.choice, shape.parallel, count), assumptions)

    fill = fill_s(table.demand.passes_per_s or 1.0, shape.batch) if assumptions.is_fill_counted else 0.0
    times = [float(one.time_s[option]) for one, option in zip(table.operators, shape.choice, strict=True)]
    if fill + path_s(table.names, table.edges, times) > slo_s:
        return None
    most = (MOST_GPUS if most_gpus is None else most_gpus) // shape.parallel
    low, high, step = first - 1, first, 1
    if high > most:
        return None
    while not judged(high).meets(slo_s):
        if high >= most:
            return None
        low, high, step = high, min(high + step, most), 2 * step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if judged(middle).meets(slo_s) else (middle, high)
    return high
