"""The model-level baseline (section 4.2.3): all operators share batch, replicas and parallelism, and no GPU (pure)."""

from dataclasses import dataclass

from autoscale.operators.demand import MemoryTooSmallError, PlanError
from autoscale.operators.evaluation import Assumptions, Choice, Evaluation, evaluate
from autoscale.operators.latency import path_s
from autoscale.operators.layout import Layout, Replica, Unit
from autoscale.operators.options import OperatorOptions, OptionTable
from autoscale.operators.plan import Plan
from autoscale.operators.queueing import fill_s
from autoscale.operators.sizing import check_slo

# Instances beyond this number are a fault of the demand, not a plan.
MOST_INSTANCES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    parallel: int
    batch: int
    choice: Choice


def plan_model_level(table: OptionTable, assumptions: Assumptions) -> Plan:
    """The fewest GPUs with which equal instances meet the objective; of equal numbers, the lowest latency.

    Each tensor parallel size and batch that all operators have is tried. An operator whose shape does not allow a size
    uses its largest one below it, as engines do with few KV heads.

    Raises:
        SloBelowServiceError: the objective is below the time of one pass that never waits.
        MemoryTooSmallError: no instance fits into its GPUs.
        PlanError: no number of instances meets the objective.
    """
    check_slo(table, table.demand.slo_s)
    shapes = _shapes(table)
    found: list[tuple[int, float, Layout, Choice, Evaluation]] = []
    fits = False
    for shape in shapes:
        if not _holds_weights(table, shape):
            continue
        fits = True
        least = _least_instances(table, shape, assumptions, found[0][0] if found else None)
        if least is not None:
            layout = instances(table, shape.choice, shape.parallel, least)
            judged = evaluate(table, shape.choice, layout, assumptions)
            found.append((layout.gpus, judged.latency_s, layout, shape.choice, judged))
            found.sort(key=lambda one: one[:2])
    if not found:
        largest = max(shape.parallel for shape in shapes)
        if not fits:
            raise MemoryTooSmallError(
                f"the model does not fit into {largest} {table.gpu.name} GPUs, its largest instance"
            )
        raise PlanError(f"no number of model instances meets {table.demand.slo_s:.4g} s")
    _, _, layout, choice, judged = found[0]
    return Plan(table=table, choice=choice, layout=layout, evaluation=judged, planner="model")


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
        for batch in batches:
            choice = [_option(one, parallel, batch) for one in table.operators]
            known = tuple(option for option in choice if option is not None)
            if len(known) == len(choice):
                shapes.append(_Shape(parallel=parallel, batch=batch, choice=known))
    return shapes


def _option(one: OperatorOptions, parallel: int, batch: int) -> int | None:
    """The option with a batch and the largest size up to ``parallel``; None: there is none."""
    options = [at for at in range(len(one.batch)) if one.batch[at] == batch and one.parallel[at] <= parallel]
    return max(options, key=lambda at: int(one.parallel[at]), default=None)


def _holds_weights(table: OptionTable, shape: _Shape) -> bool:
    """Whether the GPUs of an instance hold its weights and one batch."""
    layout = instances(table, shape.choice, shape.parallel, 1)
    unit = layout.units[0]
    needs = [0.0] * unit.gpus
    for one in unit.replicas:
        for gpu in one.gpus:
            needs[gpu] += table.operators[one.operator].gpu_bytes(shape.choice[one.operator], 0.0)
    return max(needs) <= table.memory_bytes


def _least_instances(table: OptionTable, shape: _Shape, assumptions: Assumptions, most_gpus: int | None) -> int | None:
    """The fewest instances of a shape; None: no number keeps the objective, or it takes more than ``most_gpus``.

    The latency and the memory of each instance fall with their number, so the number is found by halving.
    """
    slo_s = table.demand.slo_s

    def judged(count: int) -> Evaluation:
        return evaluate(table, shape.choice, instances(table, shape.choice, shape.parallel, count), assumptions)

    fill = fill_s(table.demand.passes_per_s or 1.0, shape.batch) if assumptions.is_fill_counted else 0.0
    times = [float(one.time_s[option]) for one, option in zip(table.operators, shape.choice, strict=True)]
    if fill + path_s(table.names, table.edges, times) > slo_s:
        return None
    most = MOST_INSTANCES if most_gpus is None else most_gpus // shape.parallel
    high = 1
    while not judged(high).meets(slo_s):
        if high >= most:
            return None
        high = min(2 * high, most)
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if judged(middle).meets(slo_s) else (middle, high)
    return high
