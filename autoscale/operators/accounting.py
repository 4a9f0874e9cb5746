"""Two ways to account for operators that share a GPU: how long a batch is served, and how long it waits (pure).

- ``shared``: a GPU has one second of time in a second, so a batch waits for all the work on the GPUs of its operator.
  The wait is that of Erlang C at the busy share of the GPUs, over as many servers as the operator has replicas that get
  batches. This gives the right answer at both ends: a replica alone on its GPU is M/M/R, and R GPUs that all host the
  same operators are M/M/R of the whole pass, which is what a model instance is.
- ``paper``: the accounting of section 4.2 as printed. A replica has a queue of its own (Eq. 1), with services that are
  longer by the interference I(d, v) of other instances on its GPU. Operators of one base instance do not disturb each
  other, although different batches run through them at the same time. So waits are too short on GPUs with much load.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from autoscale.operators.loads import Loads, Spread, balanced_loads, even_loads
from autoscale.operators.queueing import WaitRule

Floats = NDArray[np.float64]
_IDLE = 1e-9  # a busy share below this is a rounding error of water-filling


@dataclass(frozen=True, slots=True, kw_only=True)
class Delays:
    """By operator: the factor on its service time, and its wait as a multiple of the bare service time."""

    stretch: Floats
    wait_multiples: Floats


# From loads, shares that operators take from each other, work by operator, and the rule of the wait.
Rule = Callable[[Loads, Floats, Floats, WaitRule], Delays]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounting:
    """How batches spread over replicas, how they delay each other, and whether twins on one GPU count.

    ``counts_twins``: a second replica of an operator on the same GPU counts as another server. It does in the paper's
    accounting; in truth it shares the same time.
    """

    name: str
    spread: Spread
    delays: Rule
    counts_twins: bool


def shared_delays(loads: Loads, taken: Floats, works: Floats, rule: WaitRule) -> Delays:
    """Waits at the busy share of the GPUs; infinite for all if a GPU has no time left."""
    own = taken.copy()
    np.fill_diagonal(own, 1.0)
    seen = loads.busy @ own.T  # by slot and operator v: share of the GPU's time that v cannot use
    operators = len(works)
    if np.any((seen >= 1.0) & (loads.busy > _IDLE)):
        return _no_time(operators)
    servers, weighted = np.zeros(operators, dtype=np.int64), np.zeros(operators)
    rows = seen.tolist()
    for place, busy in zip(loads.places, loads.busy_fracs.tolist(), strict=True):
        if busy > _IDLE:
            servers[place.operator] += place.count
            highest = max(rows[slot][place.operator] for slot in place.slots)
            weighted[place.operator] += place.count * busy * highest
    is_used = works > _IDLE
    mean = np.where(is_used, weighted / np.where(is_used, works, 1.0), 0.0)
    return Delays(stretch=np.ones(operators), wait_multiples=rule(np.maximum(servers, 1), mean))


def paper_delays(loads: Loads, taken: Floats, works: Floats, rule: WaitRule) -> Delays:
    """Waits of the operators' own queues; infinite if a GPU has no time left, which the paper does not check."""
    if np.any(loads.busy.sum(axis=1) >= 1.0):
        return _no_time(len(works))
    return own_queue_delays(loads, taken, works, rule)


def one_queue_delays(loads: Loads, taken: Floats, works: Floats, rule: WaitRule) -> Delays:
    """M/M/R of whole passes: GPUs that host the same operators and serve one batch at a time, as model instances do."""
    return shared_delays(loads, np.ones_like(taken), works, rule)


def own_queue_delays(loads: Loads, taken: Floats, works: Floats, rule: WaitRule) -> Delays:
    """Waits of the operators' own queues, with services longer by I(d, v). A GPU may be planned beyond its time."""
    operators = len(works)
    base = np.zeros_like(loads.busy)
    for place, busy in zip(loads.places, loads.busy_fracs, strict=True):
        if place.is_base:
            base[list(place.slots), place.operator] += busy
    servers, stretched = np.zeros(operators, dtype=np.int64), np.zeros(operators)
    for place, busy in zip(loads.places, loads.busy_fracs, strict=True):
        factors = []
        for slot in place.slots:
            others = loads.busy[slot] - (base[slot] if place.is_base else 0.0)
            if not place.is_base:
                others = others.copy()
                others[place.operator] -= busy
            lost = float(taken[place.operator] @ others)
            factors.append(np.inf if lost >= 1.0 else 1.0 / (1.0 - lost))
        servers[place.operator] += place.count
        stretched[place.operator] += place.count * max(factors)
    if not np.isfinite(stretched).all():
        return _no_time(operators)
    stretch = stretched / np.maximum(servers, 1)
    busy_frac = works * stretch / np.maximum(servers, 1)
    return Delays(stretch=stretch, wait_multiples=stretch * rule(np.maximum(servers, 1), busy_frac))


def _no_time(operators: int) -> Delays:
    return Delays(stretch=np.ones(operators), wait_multiples=np.full(operators, np.inf))


# The paper gives no limit to the busy share of the operators on one GPU, so a GPU may do the work of several.
AS_PRINTED = Accounting(name="as printed", spread=even_loads, delays=own_queue_delays, counts_twins=True)
# What a model instance is judged by where operators have queues of their own.
ONE_QUEUE = Accounting(name="one queue", spread=balanced_loads, delays=one_queue_delays, counts_twins=False)

ACCOUNTINGS: Mapping[str, Accounting] = MappingProxyType(
    {
        one.name: one
        for one in (
            Accounting(name="shared", spread=balanced_loads, delays=shared_delays, counts_twins=False),
            Accounting(name="paper", spread=even_loads, delays=paper_delays, counts_twins=True),
        )
    }
)
