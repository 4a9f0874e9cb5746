"""Algorithm 2: GPUs for the replicas of Algorithm 1, as few as the objective and the memory allow (pure).

What the paper leaves open, and what stands here:

- The latency of a plan whose extra replicas are not all placed (line 15) counts each of those on GPUs of its own.
- A model instance (line 6) takes as many GPUs as it needs: its operators go, largest first, to its GPU with the least
  work, and the instance gets one more GPU until memory and objective are kept.
- Before new GPUs are taken (line 23), replicas are left out if the plan keeps the objective without them. Where one
  replica finds no GPU, its equals find none either, so the rest of them take new GPUs in one step.
- New GPUs become candidates for the operators that follow. The three with the most slack are probed.
- The weights of the slack (line 26): memory and time count alike, each as a share of what a GPU has.
- Equal replicas go to equal GPUs in one step, if all of them fit: what one by one would give.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autoscale.operators.evaluation import Assumptions, Choice, Evaluation, evaluate
from autoscale.operators.layout import Layout, Replica, Unit, merged, with_replica
from autoscale.operators.options import OptionTable
from autoscale.operators.plan import Plan
from autoscale.operators.sizing import Sizing

# GPUs with less slack than these are slower and fuller, so a replica that these refuse finds no place there.
_PROBES = 3


def place(table: OptionTable, sizing: Sizing, assumptions: Assumptions) -> Plan:
    """Algorithm 2 for one result of Algorithm 1."""
    draft = _Draft(table=table, choice=sizing.choice, replicas=sizing.replicas, assumptions=assumptions)
    base = min(sizing.replicas)
    waiting = {place: count - base for place, count in enumerate(sizing.replicas) if count > base}
    devices: tuple[Unit, ...] = (_instance(draft, waiting, base),)
    times = [float(one.time_s[option]) for one, option in zip(table.operators, sizing.choice, strict=True)]
    for operator in sorted(waiting, key=lambda place: -times[place]):
        while waiting[operator]:
            devices, settled = _settled(draft, devices, waiting, operator)
            waiting[operator] -= settled
    layout = merged(devices)
    judged = evaluate(table, sizing.choice, layout, assumptions)
    return Plan(table=table, choice=sizing.choice, layout=layout, evaluation=judged, planner="paper_greedy")


def place_apart(table: OptionTable, sizing: Sizing, assumptions: Assumptions) -> Plan:
    """The default-stream mode: replicas of one operator are on different GPUs, and no kernels run side by side.

    The k-th replicas of all operators are on the k-th GPUs, which are model instances without the operators that have
    fewer replicas. So the number of GPUs is that of the operator with the most, and what is saved is energy and memory.
    """
    draft = _Draft(table=table, choice=sizing.choice, replicas=sizing.replicas, assumptions=assumptions)
    width = max(draft.parallel(operator) for operator in range(len(sizing.choice)))
    works = draft.works()
    units = []
    for number in range(1, max(sizing.replicas) + 1):
        hosted = [operator for operator, count in enumerate(sizing.replicas) if count >= number]
        units.append(_packed(draft, draft.order(hosted), works, width, 1))
    layout = merged(units)
    judged = evaluate(table, sizing.choice, layout, assumptions)
    return Plan(table=table, choice=sizing.choice, layout=layout, evaluation=judged, planner="apart")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draft:
    """What stays the same during one placement."""

    table: OptionTable
    choice: Choice
    replicas: tuple[int, ...]
    assumptions: Assumptions

    def parallel(self, operator: int) -> int:
        return int(self.table.operators[operator].parallel[self.choice[operator]])

    def works(self) -> list[float]:
        """By operator, time of one replica for each request that comes."""
        picked = zip(self.table.operators, self.choice, self.replicas, strict=True)
        return [float(one.time_s[option]) / float(one.batch[option]) / count for one, option, count in picked]

    def order(self, operators: Iterable[int]) -> list[int]:
        """Operators by their size and then their work, the largest first."""
        works = self.works()
        return sorted(operators, key=lambda place: (-self.parallel(place), -works[place]))

    def apart(self, waiting: dict[int, int]) -> list[Unit]:
        """Replicas that are not placed yet, each on GPUs of its own."""
        return [
            Unit(gpus=size, replicas=(Replica(operator=place, gpus=tuple(range(size))),), count=count)
            for place, count in waiting.items()
            if count
            for size in (self.parallel(place),)
        ]

    def judge(self, devices: Sequence[Unit], waiting: dict[int, int]) -> Evaluation:
        layout = Layout(units=(*devices, *self.apart(waiting)))
        return evaluate(self.table, self.choice, layout, self.assumptions)

    def is_feasible(self, devices: Sequence[Unit], waiting: dict[int, int]) -> bool:
        return self.judge(devices, waiting).meets(self.table.demand.slo_s)


def _instance(draft: _Draft, waiting: dict[int, int], count: int) -> Unit:
    """``count`` model instances on the fewest GPUs that keep memory and objective."""
    operators = range(len(draft.choice))
    works = draft.works()
    order = draft.order(operators)
    low = max(draft.parallel(place) for place in operators) - 1
    high = sum(draft.parallel(place) for place in operators)
    while high - low > 1:
        middle = (low + high) // 2
        is_enough = draft.is_feasible([_packed(draft, order, works, middle, count)], waiting)
        low, high = (low, middle) if is_enough else (middle, high)
    return _packed(draft, order, works, high, count)


def _packed(draft: _Draft, order: Sequence[int], works: Sequence[float], gpus: int, count: int) -> Unit:
    """Each operator on the window of GPUs with the least work on it."""
    load = [0.0] * gpus
    replicas = []
    for place in order:
        size = draft.parallel(place)
        window = min(_windows(gpus, size), key=lambda window: max(load[gpu] for gpu in window))
        for gpu in window:
            load[gpu] += works[place]
        replicas.append(Replica(operator=place, gpus=window, is_base=True))
    return Unit(gpus=gpus, replicas=tuple(replicas), count=count)


def _windows(gpus: int, size: int) -> list[tuple[int, ...]]:
    """Groups of neighbouring GPUs of a unit that a replica of ``size`` GPUs may take."""
    return [tuple(range(first, first + size)) for first in range(0, gpus - size + 1, size)]


def _settled(
    draft: _Draft, devices: tuple[Unit, ...], waiting: dict[int, int], operator: int
) -> tuple[tuple[Unit, ...], int]:
    """Lines 9 to 29 for replicas of one operator: the devices, and the number of replicas placed or left out."""
    size, left = draft.parallel(operator), waiting[operator]
    judged = draft.judge(devices, waiting)
    found: list[tuple[float, int, tuple[int, ...]]] = []
    first = 0
    for index, unit in enumerate(devices):
        for window in _windows(unit.gpus, size):
            is_twin = any(unit.hosts(operator, gpu) for gpu in window)
            if is_twin and not draft.assumptions.accounting.counts_twins:
                continue
            memory = max(judged.gpu_bytes[first + gpu] for gpu in window) / draft.table.memory_bytes
            busy = max(judged.gpu_busy_fracs[first + gpu] for gpu in window)
            if memory < 1.0 and busy < 1.0:
                found.append(((1.0 - memory) + (1.0 - busy), index, window))
        first += unit.gpus
    for _, index, window in sorted(found, key=lambda one: (-one[0], one[1:]))[:_PROBES]:
        count = min(left, devices[index].count)
        while count:
            grown = _grown(devices, index, Replica(operator=operator, gpus=window), count)
            if draft.is_feasible(grown, {**waiting, operator: left - count}):
                return grown, count
            count //= 2
    spare = _spare(draft, devices, waiting, operator)
    replica = Replica(operator=operator, gpus=tuple(range(size)))
    return merged([*devices, Unit(gpus=size, replicas=(replica,), count=left - spare)]).units, left


def _spare(draft: _Draft, devices: tuple[Unit, ...], waiting: dict[int, int], operator: int) -> int:
    """How many of the waiting replicas of an operator the objective does not need."""
    low, high = 0, waiting[operator] + 1
    while high - low > 1:
        middle = (low + high) // 2
        is_enough = draft.is_feasible(devices, {**waiting, operator: waiting[operator] - middle})
        low, high = (middle, high) if is_enough else (low, middle)
    return low


def _grown(devices: tuple[Unit, ...], index: int, replica: Replica, count: int) -> tuple[Unit, ...]:
    """The devices after ``count`` units of those at ``index`` got one more replica each."""
    unit = devices[index]
    if count == 1:
        return with_replica(devices, index, replica)
    rest = Unit(gpus=unit.gpus, replicas=unit.replicas, count=unit.count - count)
    more = Unit(gpus=unit.gpus, replicas=(*unit.replicas, replica), count=count)
    return merged([*devices[:index], rest, more, *devices[index + 1 :]]).units
