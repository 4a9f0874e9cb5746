"""All settings that an operator may have at one demand, with time, work and memory: the table that planners search."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autoscale.operators.activity import Activity
from autoscale.operators.costs import Phase
from autoscale.operators.demand import Demand
from autoscale.operators.gpu import Gpu
from autoscale.operators.latency import path_s
from autoscale.operators.queueing import least_stable_servers

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Share of a GPU's memory that weights, activations and KV may take together: the default of vLLM
# (gpu_memory_utilization 0.9). The rest is for the runtime and for fragmentation.
MEMORY_FRAC = 0.9


def batches_up_to(most: int) -> tuple[int, ...]:
    """Batch sizes 1, 2, 3, 4, 6, 8, 12, ... up to ``most``, which is one of them.

    Algorithm 1 scans all sizes. Between two of these, time and work change by less than half, and a table of 256 sizes
    has 17 columns instead of 256.
    """
    sizes = {most} | {base << power for base in (1, 3) for power in range(most.bit_length())} - {0}
    return tuple(sorted(size for size in sizes if size <= most))


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What settings may be.

    Attributes:
        batches: batch sizes, ascending.
        most_parallel: largest tensor parallel size.
    """

    batches: tuple[int, ...]
    most_parallel: int = 8


@dataclass(frozen=True, kw_only=True, eq=False)
class OperatorOptions:
    """The options of one operator; arrays have one entry for each option.

    Attributes:
        parallel, batch, sm_share_percent: the option itself.
        time_s: T_v of one service, of all copies.
        gpu_s: GPU-seconds for each request: parallel x time_s / batch.
        weight_bytes: over all GPUs of a replica.
        transient_bytes: of a service, over all GPUs of a replica.
        kv_bytes: KV of one request; 0: the operator holds none.
        transfer_s: time for the outputs of a service, of all copies, over the link to another GPU.
        activities: how each option loads a GPU.
    """

    name: str
    parallel: Ints
    batch: Ints
    sm_share_percent: Ints
    time_s: Floats
    gpu_s: Floats
    weight_bytes: float
    transient_bytes: Floats
    kv_bytes: Floats
    transfer_s: Floats
    activities: tuple[Activity, ...]

    def gpu_bytes(self, option: int, resident: float) -> float:
        """Memory on each GPU of a replica that holds the KV of ``resident`` requests, bytes."""
        more = self.kv_bytes[option] * max(0.0, resident - float(self.batch[option]))
        return float(self.weight_bytes + self.transient_bytes[option] + more) / int(self.parallel[option])


@dataclass(frozen=True, kw_only=True, eq=False)
class OptionTable:
    """The options of all operators of a model at one demand.

    ``edges``: pairs of names, from an operator to the next; empty: a chain in the order of ``operators``.
    """

    demand: Demand
    phase: Phase
    gpu: Gpu
    operators: tuple[OperatorOptions, ...]
    edges: tuple[tuple[str, str], ...] = ()

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the operators, in the order of a pass."""
        return tuple(one.name for one in self.operators)

    @property
    def memory_bytes(self) -> float:
        """Memory of one GPU that operators may use."""
        return MEMORY_FRAC * self.gpu.memory_bytes

    @property
    def in_flight(self) -> float:
        """Requests in the model at once, at most: rate x objective (Little's law); at least one."""
        return max(1.0, self.demand.passes_per_s * self.demand.slo_s)

    @cached_property
    def bare_s(self) -> float:
        """The least latency of a pass that never waits: the sum of the least service times, seconds."""
        least = [float(one.time_s.min()) for one in self.operators]
        return path_s(self.names, self.edges, least)

    @cached_property
    def least_replicas(self) -> tuple[Ints, ...]:
        """By operator and option, the fewest replicas that are stable and whose KV fits into memory; 0: none fit."""
        return tuple(self._least(one) for one in self.operators)

    def _least(self, one: OperatorOptions) -> Ints:
        stable = least_stable_servers(self.demand.passes_per_s / one.batch, one.time_s)
        room = self.memory_bytes * one.parallel - one.weight_bytes - one.transient_bytes
        # KV of a batch is in its transients already. Room for all the rest is shared by the replicas.
        with np.errstate(divide="ignore", invalid="ignore"):
            most_resident = np.where(one.kv_bytes > 0.0, one.batch + room / one.kv_bytes, np.inf)
            for_kv = np.where(room >= 0.0, np.ceil(self.in_flight / most_resident), 0.0)
        least: Ints = np.where(room >= 0.0, np.maximum(stable, for_kv.astype(np.int64)), 0)
        return least
