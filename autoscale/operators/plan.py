"""A plan: the options of all operators, the layout of their replicas, and what they give (pure)."""

from dataclasses import dataclass
from functools import cached_property

from autoscale.operators.evaluation import Choice, Evaluation, settings_of
from autoscale.operators.layout import Layout
from autoscale.operators.options import OptionTable
from autoscale.operators.settings import OperatorSetting


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one planner decided for one demand.

    ``planner``: its name, such as model, greedy or search.
    """

    table: OptionTable
    choice: Choice
    layout: Layout
    evaluation: Evaluation
    planner: str

    @property
    def gpus(self) -> int:
        """GPUs that the plan takes: devices after placement, on which operators may share time."""
        return self.layout.gpus

    @cached_property
    def settings(self) -> dict[str, OperatorSetting]:
        """Replicas, batch, parallelism and share of SMs by the names of the operators."""
        return settings_of(self.table, self.choice, self.layout)

    @cached_property
    def weight_bytes(self) -> float:
        """Weights of all replicas, bytes: the memory that a plan saves if it replicates few operators."""
        return sum(one.weight_bytes * self.layout.replicas(place) for place, one in enumerate(self.table.operators))

    @cached_property
    def memory_bytes(self) -> float:
        """Weights, activations and KV of all replicas, bytes."""
        return float((self.evaluation.gpu_bytes * self.evaluation.gpu_counts).sum())

    @cached_property
    def busy_gpus(self) -> float:
        """GPUs that are busy on average: the sum of the busy shares."""
        return float((self.evaluation.gpu_busy_fracs * self.evaluation.gpu_counts).sum())

    @cached_property
    def bottleneck(self) -> str:
        """The operator with the longest sojourn time, T_v + W_v + C_v."""
        judged = self.evaluation
        return self.table.names[int((judged.service_s + judged.wait_s + judged.transfer_s).argmax())]
