"""What ``tandem operators plan`` plans with: a model, a GPU type, measured times, contention and power."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from autoscale.operators.contention import load_pairs
from autoscale.operators.costs import Phase
from autoscale.operators.demand import Demand, PlanError
from autoscale.operators.energy import PowerModel, data_sheet_power, load_power
from autoscale.operators.evaluation import Assumptions
from autoscale.operators.gpu import Gpu, gpu_named
from autoscale.operators.graph import OperatorGraph, OperatorPrecision, operator_graph
from autoscale.operators.measured_costs import ModelCosts
from autoscale.operators.objective import DEFAULT_FACTOR, Objective, default_objective
from autoscale.operators.options import Limits, batches_up_to
from autoscale.operators.planners import PLANNERS, Planner
from autoscale.operators.sm_shares import SmBandwidthContention, SmShares, load_shares
from autoscale.operators.tables import load_operator_tables
from autoscale.operators.times import OperatorTimes
from serve_app.local.shipped import shipped
from serve_app.operators.model import longest_tokens, model_config

# Largest batches that plans try. A prefill engine computes few prompts at once; 256 sequences is max_num_seqs of vLLM.
MOST_BATCH = {Phase.PREFILL: 16, Phase.DECODE: 256}
# Names of the objectives, as options and reports have them.
OBJECTIVES = {Phase.PREFILL: "ttft_s", Phase.DECODE: "tpot_s"}
UNITS = {Phase.PREFILL: "prompts/s", Phase.DECODE: "output tokens/s"}


def rate_text(passes_per_s: float) -> str:
    """A rate with three digits or more, and no exponent."""
    return f"{passes_per_s:,.0f}" if passes_per_s >= 1000.0 else f"{passes_per_s:.4g}"


@dataclass(frozen=True, kw_only=True)
class Platform:
    """A GPU type with the times of its operators, and how they share a GPU.

    ``shares``: None: operators on one GPU take turns or overlap in streams, without a share of the SMs each.
    """

    gpu: Gpu
    times: OperatorTimes
    assumptions: Assumptions
    power: PowerModel
    power_text: str
    shares: SmShares | None
    most_parallel: int

    @property
    def sharing_text(self) -> str:
        """How operators share a GPU, and where their contention comes from."""
        if self.shares is None:
            return "streams, with contention measured on an H100"
        return "shares of the SMs (MPS), with a model of contention from SM shares measured on an H100"


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model on a platform; its costs are kept, with all times that planners have read.

    ``longest_tokens``: the longest sequence that the model takes; None: its config does not say.
    """

    name: str
    dtype: str
    longest_tokens: int | None
    graph: OperatorGraph
    platform: Platform
    _costs: dict[Phase, ModelCosts] = field(default_factory=dict, repr=False)

    def costs(self, phase: Phase) -> ModelCosts:
        """Times, memory and traffic of the operators in a phase."""
        if phase not in self._costs:
            self._costs[phase] = ModelCosts(self.graph, self.platform.times, phase)
        return self._costs[phase]

    def objective(self, phase: Phase, length_tokens: int, slo_s: float | None) -> Objective:
        """The objective that was given, or the default one."""
        if slo_s is not None:
            return Objective(slo_s=slo_s)
        return default_objective(self.costs(phase), self.platform.gpu, length_tokens)

    def planner(self, name: str, phase: Phase, slo_s: float) -> Planner:
        """A planner of this model by its name."""
        return Planner(
            costs=self.costs(phase),
            phase=phase,
            gpu=self.platform.gpu,
            limits=Limits(batches=batches_up_to(MOST_BATCH[phase]), most_parallel=self.platform.most_parallel),
            assumptions=self.platform.assumptions,
            slo_s=slo_s,
            plan=PLANNERS[name],
            shares=self.platform.shares,
        )

    def with_model(self, name: str) -> "Subject":
        """Another model on the same platform."""
        config = model_config(name)
        graph = operator_graph(config, self.graph.precision)
        return replace(self, name=name, graph=graph, longest_tokens=longest_tokens(config), _costs={})


def subject(
    model: str, gpu_name: str, dtype: str, tables: Path | None, *, most_parallel: int, has_shares: bool
) -> Subject:
    """A model on a GPU type.

    ``tables``: a folder with measured tables; None: those shipped. ``has_shares``: operators get shares of the SMs.

    Raises:
        ValueError: the model, its config, the GPU or the data type is not known, or a table is wrong.
    """
    gpu = gpu_named(gpu_name)
    config = model_config(model)
    graph = operator_graph(config, OperatorPrecision(weights=dtype, kv=dtype))
    times = OperatorTimes(gpu, load_operator_tables(tables or shipped(f"operators/tables/{gpu.name}")))
    pairs = load_pairs(shipped("operators/contention/h100_80gb_pairs.csv"))
    shares = load_shares(shipped("operators/contention/h100_80gb_sm_shares.csv")) if has_shares else None
    contention = pairs if shares is None else SmBandwidthContention(shares=shares)
    power, power_text = _power(gpu)
    platform = Platform(
        gpu=gpu,
        times=times,
        assumptions=Assumptions(contention=contention),
        power=power,
        power_text=power_text,
        shares=shares,
        most_parallel=most_parallel,
    )
    return Subject(name=model, dtype=dtype, graph=graph, platform=platform, longest_tokens=longest_tokens(config))


def _power(gpu: Gpu) -> tuple[PowerModel, str]:
    if gpu.name == "H100":
        return load_power(shipped("operators/contention/h100_80gb_power.csv")), "measured on an H100"
    return data_sheet_power(gpu), f"from the data sheet of the {gpu.name}"


def demand_of(phase: Phase, requests_per_s: float, tokens: tuple[int, int | None], slo_s: float) -> Demand:
    """What requests ask of a phase. ``tokens``: of a prompt and of an answer.

    Prefill computes each prompt once. Decode computes each output token once, with the prompt and half of the answer
    as its context.
    """
    passes_per_s = requests_per_s
    if phase is Phase.DECODE:
        if tokens[1] is None:
            raise PlanError("decode needs the length of answers: add --output-tokens, or --phase prefill")
        passes_per_s *= tokens[1]
    return Demand(passes_per_s=passes_per_s, length_tokens=length_of(phase, tokens), slo_s=slo_s)


def length_of(phase: Phase, tokens: tuple[int, int | None]) -> int:
    """Tokens of a prompt (prefill), or of context in the mean over an answer (decode)."""
    return tokens[0] if phase is Phase.PREFILL else tokens[0] + (tokens[1] or 0) // 2


def objective_text(phase: Phase, objective: Objective, length_tokens: int) -> str:
    """An objective in words, with the rule of a default one."""
    name = {Phase.PREFILL: "TTFT", Phase.DECODE: "TPOT"}[phase]
    if objective.parallel is None:
        return f"{name} {objective.slo_s * 1e3:.4g} ms in the mean"
    gpus = "one GPU" if objective.parallel == 1 else f"{objective.parallel} GPUs"
    what = f"a prompt of {length_tokens} tokens" if phase is Phase.PREFILL else f"a token at {length_tokens} of context"
    return (
        f"{name} {objective.slo_s * 1e3:.4g} ms in the mean, by default {DEFAULT_FACTOR:g} times {what} that never "
        f"waits on {gpus}, the smallest group that holds the model"
    )
