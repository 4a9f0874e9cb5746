"""What a choice of options and a layout give: latency, memory, GPUs; this one function judges all planners (pure)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoscale.operators.accounting import ACCOUNTINGS, Accounting
from autoscale.operators.contention import Contention
from autoscale.operators.latency import path_s
from autoscale.operators.layout import Layout
from autoscale.operators.loads import Loads
from autoscale.operators.options import OptionTable
from autoscale.operators.queueing import WAITS, WaitRule, fill_s
from autoscale.operators.settings import OperatorSetting

Floats = NDArray[np.float64]
Choice = tuple[int, ...]  # by operator, the number of its option


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """What plans are judged by; the same for all planners of a comparison.

    Attributes:
        contention: what operators on one GPU take from each other.
        accounting: how operators share the time of a GPU.
        wait: the wait of a queue; the paper's is that of exponential services.
        is_fill_counted: whether requests wait until a batch is full; the paper leaves that out.
    """

    contention: Contention
    accounting: Accounting = ACCOUNTINGS["shared"]
    wait: WaitRule = WAITS["exponential"]
    is_fill_counted: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Eq. 1-3 and 7 for one plan; arrays are by operator.

    Attributes:
        latency_s: T_total; infinite if a queue or a GPU is not stable.
        service_s: T_v with the interference on its GPUs.
        wait_s: W_v. transfer_s: C_v. fill_s: the wait for a full batch, once in a pass.
        replica_busy_fracs: share of time that a replica keeps each of its GPUs busy, mean over its replicas.
        gpu_busy_fracs: share of time that each distinct GPU is busy, with the number of such GPUs in ``gpu_counts``.
        gpu_bytes: memory that each distinct GPU needs.
        is_within_memory: no GPU needs more than it has (Eq. 7).
    """

    latency_s: float
    service_s: Floats
    wait_s: Floats
    transfer_s: Floats
    fill_s: float
    replica_busy_fracs: Floats
    gpu_busy_fracs: Floats
    gpu_counts: NDArray[np.int64]
    gpu_bytes: Floats
    is_within_memory: bool

    def meets(self, slo_s: float) -> bool:
        """Whether the plan keeps the objective and fits into memory."""
        return self.is_within_memory and self.latency_s <= slo_s


def evaluate(table: OptionTable, choice: Choice, layout: Layout, assumptions: Assumptions) -> Evaluation:
    """Judge a plan: ``choice`` names an option of each operator, ``layout`` the GPUs of all replicas."""
    picked = list(zip(table.operators, choice, strict=True))
    rate = table.demand.passes_per_s
    times = np.array([float(one.time_s[option]) for one, option in picked])
    batches = np.array([float(one.batch[option]) for one, option in picked])
    works = rate * times / batches
    activities = [one.activities[option] for one, option in picked]
    taken = assumptions.contention.taken_fracs(activities)
    loads = assumptions.accounting.spread(layout, works)
    delays = assumptions.accounting.delays(loads, taken, works, assumptions.wait)
    moves = np.array([float(one.transfer_s[option]) for one, option in picked]) * crossing_fracs(loads, works)
    waits = np.where(times > 0.0, times * np.where(times > 0.0, delays.wait_multiples, 0.0), 0.0)
    fill = fill_s(rate, float(batches.max())) if assumptions.is_fill_counted and rate else 0.0
    service = times * delays.stretch
    replicas = np.zeros(len(picked))
    for place in loads.places:
        replicas[place.operator] += place.count
    gpu_bytes = memory_bytes(table, choice, loads, replicas)
    return Evaluation(
        latency_s=fill + path_s(table.names, table.edges, tuple((service + waits + moves).tolist())),
        service_s=service,
        wait_s=waits,
        transfer_s=moves,
        fill_s=fill,
        replica_busy_fracs=works / np.maximum(replicas, 1.0),
        gpu_busy_fracs=loads.busy.sum(axis=1),
        gpu_counts=loads.slot_counts,
        gpu_bytes=gpu_bytes,
        is_within_memory=bool(np.all(gpu_bytes <= table.memory_bytes)),
    )


def crossing_fracs(loads: Loads, works: Floats) -> Floats:
    """By operator, the share of its outputs that must go to another GPU; 0 for the last one.

    A router keeps a pass on its GPU where it can. So the share that stays is the sum over GPUs of the smaller of the
    two operators' shares of traffic there.
    """
    totals = (loads.busy * loads.slot_counts[:, None]).sum(axis=0)
    traffic = loads.busy / np.where(totals > 0.0, totals, 1.0)
    stays = (np.minimum(traffic[:, :-1], traffic[:, 1:]) * loads.slot_counts[:, None]).sum(axis=0)
    is_used = (works[:-1] > 0.0) & (works[1:] > 0.0)
    return np.append(np.where(is_used, np.clip(1.0 - stays, 0.0, 1.0), 0.0), 0.0)


def memory_bytes(table: OptionTable, choice: Choice, loads: Loads, replicas: Sequence[float] | Floats) -> Floats:
    """Memory that each distinct GPU needs: weights and transients of the replicas that it hosts (left side of Eq. 7).

    The KV of all requests in the model is divided evenly over the replicas of the operator that holds it.
    """
    needs = np.zeros(len(loads.slot_counts))
    each = [
        one.gpu_bytes(option, table.in_flight / max(float(replicas[place]), 1.0))
        for place, (one, option) in enumerate(zip(table.operators, choice, strict=True))
    ]
    for place in loads.places:
        for slot in place.slots:
            needs[slot] += each[place.operator]
    return needs


def settings_of(table: OptionTable, choice: Choice, layout: Layout) -> dict[str, OperatorSetting]:
    """The decisions of a plan by the names of the operators."""
    return {
        one.name: OperatorSetting(
            replicas=layout.replicas(place),
            batch=int(one.batch[option]),
            parallel=int(one.parallel[option]),
            sm_share_percent=int(one.sm_share_percent[option]),
        )
        for place, (one, option) in enumerate(zip(table.operators, choice, strict=True))
    }
