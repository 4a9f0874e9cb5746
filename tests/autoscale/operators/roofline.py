"""Operator costs from a plain roofline and from hand-written tables, for tests and for the planner's laboratory."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from autoscale.operators.costs import Phase, SourceKind, TimeSource
from autoscale.operators.gpu import Gpu, gpu_named
from autoscale.operators.model_shape import ModelShape

# Shares of the peaks that large kernels reach, and the time of one launch inside a CUDA graph. Round numbers near
# those of tests/lab/operators/h100_80gb: 0.79 of the FLOP/s of a large product, 0.8 of the bandwidth, 1 to 2 us.
_FLOPS_FRAC, _BANDWIDTH_FRAC, _LAUNCH_S = 0.75, 0.8, 2e-6


QWEN2_7B = ModelShape(
    architecture="Qwen2ForCausalLM",
    layers=28,
    hidden=3584,
    heads=28,
    kv_heads=4,
    head_dim=128,
    intermediate=18944,
    vocab=152064,
)
LLAMA_70B = ModelShape(
    architecture="LlamaForCausalLM",
    layers=80,
    hidden=8192,
    heads=64,
    kv_heads=8,
    head_dim=128,
    intermediate=28672,
    vocab=128256,
)


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """``OperatorCosts`` of a dense decoder in bf16: the longer of arithmetic and memory traffic, and a launch."""

    shape: ModelShape
    phase: Phase
    gpu: Gpu = field(default_factory=lambda: gpu_named("A100"))

    @property
    def names(self) -> tuple[str, ...]:
        """As ``OperatorCosts`` says."""
        return (
            "embedding", "input_norm", "qkv", "rotary", "attention", "o", "o_all_reduce", "post_norm", "gate_up",
            "activation", "down", "down_all_reduce", "final_norm", "lm_head",
        )  # fmt: skip

    def parallel_sizes(self, name: str) -> tuple[int, ...]:
        """As ``OperatorCosts`` says."""
        return tuple(size for size in (1, 2, 4, 8) if not self.shape.heads % size)

    def _tokens(self, length_tokens: int, batch: int) -> int:
        return batch * length_tokens if self.phase is Phase.PREFILL else batch

    def _product(self, name: str) -> tuple[int, int]:
        """Inputs and outputs of a product."""
        one = self.shape
        query, kv = one.heads * one.head_dim, one.kv_heads * one.head_dim
        return {
            "qkv": (one.hidden, query + 2 * kv),
            "o": (query, one.hidden),
            "gate_up": (one.hidden, 2 * one.intermediate),
            "down": (one.intermediate, one.hidden),
            "lm_head": (one.hidden, one.vocab),
        }.get(name, (0, 0))

    def copies(self, name: str) -> int:
        """As ``OperatorCosts`` says."""
        return 1 if name in ("embedding", "final_norm", "lm_head") else self.shape.layers

    def weight_bytes(self, name: str) -> float:
        """As ``OperatorCosts`` says."""
        rows, columns = self._product(name)
        more = self.shape.vocab * self.shape.hidden if name == "embedding" else 0
        return 2.0 * self.copies(name) * (rows * columns + more + (self.shape.hidden if "norm" in name else 0))

    def time_s(self, name: str, *, parallel: int, length_tokens: int, batch: int) -> float:
        """As ``OperatorCosts`` says."""
        one, tokens = self.shape, self._tokens(length_tokens, batch)
        rows = batch if name == "lm_head" else tokens
        inputs, outputs = self._product(name)
        if name.endswith("all_reduce"):
            if parallel == 1:
                return 0.0
            moved = 2.0 * (parallel - 1) / parallel * 2.0 * tokens * one.hidden
            return self.copies(name) * (moved / (0.7 * self.gpu.link_bytes_per_s) + 8e-6)
        if inputs:
            flops = 2.0 * rows * inputs * outputs / parallel
            moved = 2.0 * (inputs * outputs / parallel + rows * (inputs + outputs / parallel))
        elif name == "attention":
            pairs = batch * length_tokens**2 / 2 if self.phase is Phase.PREFILL else batch * length_tokens
            flops = 4.0 * pairs * one.heads * one.head_dim / parallel
            kv = 4.0 * batch * length_tokens * one.kv_heads * one.head_dim / min(parallel, one.kv_heads)
            moved = kv + 4.0 * tokens * one.heads * one.head_dim / parallel
        else:
            width = 3 * one.intermediate / parallel if name == "activation" else 2 * one.hidden
            flops, moved = 0.0, 2.0 * tokens * width
        compute_s = flops / (_FLOPS_FRAC * self.gpu.peak_flops_per_s["bf16"])
        traffic_s = moved / (_BANDWIDTH_FRAC * self.gpu.memory_bytes_per_s)
        return self.copies(name) * (max(compute_s, traffic_s) + _LAUNCH_S)

    def transient_bytes(self, name: str, *, parallel: int, length_tokens: int, batch: int) -> float:
        """As ``OperatorCosts`` says."""
        one, tokens = self.shape, self._tokens(length_tokens, batch)
        inputs, outputs = self._product(name)
        rows = batch if name == "lm_head" else tokens
        kv = 4.0 * one.layers * batch * length_tokens * one.kv_heads * one.head_dim if name == "attention" else 0.0
        return 2.0 * rows * ((inputs + outputs) or 2 * one.hidden) + kv

    def output_bytes(self, name: str, *, length_tokens: int, batch: int) -> float:
        """As ``OperatorCosts`` says."""
        rows = batch if name == "lm_head" else self._tokens(length_tokens, batch)
        return 2.0 * rows * (self._product(name)[1] or self.shape.hidden)

    def source(self, name: str, *, parallel: int, length_tokens: int, batch: int) -> TimeSource:
        """As ``OperatorCosts`` says."""
        return TimeSource(kind=SourceKind.ROOFLINE, text="the roofline of tests")


@dataclass(frozen=True, kw_only=True)
class HandCosts:
    """``OperatorCosts`` of a few operators: a fixed time, and a time for each request of the batch.

    Attributes:
        fixed_s, each_s: by name; T_v = (fixed_s + batch x each_s) / parallel**scaling.
        scalings: by name, where it is not ``scaling``.
        weights: bytes by name; 0 if left out. kv_bytes: KV of one request in an operator named attention.
        output: bytes of one request's output.
    """

    fixed_s: Mapping[str, float]
    each_s: Mapping[str, float]
    sizes: tuple[int, ...] = (1,)
    scaling: float = 1.0
    scalings: Mapping[str, float] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    kv_bytes: float = 0.0
    output: float = 0.0

    @property
    def names(self) -> tuple[str, ...]:
        """As ``OperatorCosts`` says."""
        return tuple(self.fixed_s)

    def parallel_sizes(self, name: str) -> tuple[int, ...]:
        """As ``OperatorCosts`` says."""
        return self.sizes

    def time_s(self, name: str, *, parallel: int, length_tokens: int, batch: int) -> float:
        """As ``OperatorCosts`` says."""
        speed = float(parallel ** self.scalings.get(name, self.scaling))
        return (self.fixed_s[name] + batch * self.each_s[name]) / speed

    def weight_bytes(self, name: str) -> float:
        """As ``OperatorCosts`` says."""
        return self.weights.get(name, 0.0)

    def transient_bytes(self, name: str, *, parallel: int, length_tokens: int, batch: int) -> float:
        """As ``OperatorCosts`` says."""
        return batch * self.kv_bytes if name == "attention" else 0.0

    def output_bytes(self, name: str, *, length_tokens: int, batch: int) -> float:
        """As ``OperatorCosts`` says."""
        return batch * self.output

    def copies(self, name: str) -> int:
        """As ``OperatorCosts`` says."""
        return 1

    def source(self, name: str, *, parallel: int, length_tokens: int, batch: int) -> TimeSource:
        """As ``OperatorCosts`` says."""
        return TimeSource(kind=SourceKind.MEASURED, text="written by hand")
