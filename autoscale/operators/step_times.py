"""The time of one step of an engine: the sum over its operators, and what the host adds (pure).

A step computes prompts and decoding sequences in one pass. Only the time of the host comes from whole engines.
"""

from dataclasses import dataclass

from autoscale.operators.costs import SourceKind
from autoscale.operators.experts import GroupedExperts
from autoscale.operators.graph import OperatorGraph
from autoscale.operators.kinds import Pass
from autoscale.operators.times import OperatorTimes


class ParallelSizeError(ValueError):
    """The model cannot be divided over this number of GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTimes:
    """Time of each step in which the GPUs wait for the host: what it does not overlap with the step before.

    ``step_s``: of any step: scheduling, inputs, sampling. ``request_s``: more for each request in the step.
    """

    step_s: float
    request_s: float = 0.0


# With vLLM's async scheduling. docs/operators_times.md says how it was chosen, and how much depends on it.
ASYNC_HOST = HostTimes(step_s=0.6e-3)
# Without it: what decode steps of Llama-70B on H100 (vLLM 0.10, sweep of Dynamo, TP 2, 4 and 8) take beyond their
# operators, at 1 request and at up to 93.
SYNC_HOST = HostTimes(step_s=1.6e-3, request_s=23e-6)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of the engine, by the names of vLLM's arguments.

    Attributes:
        max_batch_tokens: ``max_num_batched_tokens``.
        max_running: ``max_num_seqs``.
        memory_frac: ``gpu_memory_utilization``.
        longest_tokens: ``max_model_len``: the longest prompt and context of the profile.
        host: what the host adds to each step.
        expert_load: with expert parallelism, the work of the rank with the busiest experts, as a multiple of the mean.
        redundant_experts: ``num_redundant_experts``: copies of experts, which take memory of KV.
    """

    parallel: int
    max_batch_tokens: int = 2048
    max_running: int = 128
    memory_frac: float = 0.9
    longest_tokens: int = 16_384
    host: HostTimes = ASYNC_HOST
    expert_load: float = 1.0
    redundant_experts: int = 0


class StepTimes:
    """The time of one step of an engine, from its operators."""

    def __init__(self, graph: OperatorGraph, times: OperatorTimes, settings: EngineSettings) -> None:
        parallel = settings.parallel
        if parallel not in graph.parallel_sizes():
            sizes = ", ".join(map(str, graph.parallel_sizes()))
            raise ParallelSizeError(f"the model cannot be divided over {parallel} GPUs: its shape allows {sizes}")
        self._graph, self._times, self._parallel, self._host = graph, times, parallel, settings.host
        self._expert_load = settings.expert_load
        self.kinds: dict[str, SourceKind] = {}

    def seconds(self, step: Pass) -> float:
        """Seconds of a step; the least trusted source of each operator is kept in ``kinds``."""
        return sum(self.parts(step).values()) + self._host.step_s + self._host.request_s * step.sequences

    def parts(self, step: Pass) -> dict[str, float]:
        """Seconds by operator, all copies, with the gaps between kernels."""
        found = {}
        order = list(SourceKind)
        for operator in self._graph.operators:
            timed = self._times.time(operator, step, self._parallel)
            if not timed.seconds:
                continue
            load = self._expert_load if isinstance(operator, GroupedExperts) else 1.0
            found[operator.name] = operator.copies * (load * timed.seconds + self._times.gpu.kernel_gap_s)
            before = self.kinds.get(operator.name, SourceKind.MEASURED)
            self.kinds[operator.name] = max(before, timed.source.kind, key=order.index)
        return found
