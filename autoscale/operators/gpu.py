"""GPUs by name: memory, speed, links and power (pure)."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

_GIB = 1024.0**3

# Loop of 1.5 s against bursts, on an H100 at its limit of 700 W (power.csv and operators.csv of
# tests/lab/operators/h100_80gb): with 2,048 tokens, gate and up take 730 us against 638, down 333 against 308, O 101
# against 91. This is the mean ratio.
_H100_PRODUCTS = 1.11
# 64 sequences of 2,048 tokens: 235 us against 210 us.
_H100_DECODE_ATTENTION = 1.12


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU type, from its data sheet where no other source is named.

    Attributes:
        memory_bytes: memory of one GPU.
        peak_flops_per_s: dense tensor-core arithmetic by data type (``bf16``, ``fp8``), FLOP/s; ``peak`` reads it.
        memory_bytes_per_s: bandwidth of the memory.
        sm_count: streaming multiprocessors.
        link_bytes_per_s: bandwidth between two GPUs of a node, one direction.
        link_latency_s: fixed time of an exchange between GPUs, inside a CUDA graph.
        kernel_gap_s: time between two kernels of a CUDA graph that measured tables of this GPU lack: those of single
            kernels do, those of bursts of kernels hold it.
        idle_power_w: power with a context open and no work.
        peak_power_w: highest power that it may take.
        sustained_product_ratio: time of a product in a loop of seconds, as a multiple of its time in a burst of
            milliseconds, which measured tables hold: at its power limit a GPU lowers its clock. It holds where
            arithmetic is the bound.
        sustained_decode_attention_ratio: the same for decode attention.
        is_padding: whether engines pad batches to the size of a CUDA graph; those of a CPU do not.
    """

    name: str
    memory_bytes: float
    peak_flops_per_s: Mapping[str, float]
    memory_bytes_per_s: float
    sm_count: int
    link_bytes_per_s: float
    link_latency_s: float
    kernel_gap_s: float
    idle_power_w: float
    peak_power_w: float
    sustained_product_ratio: float = 1.0
    sustained_decode_attention_ratio: float = 1.0
    is_padding: bool = True

    def peak(self, dtype: str) -> float:
        """Arithmetic in a data type, FLOP/s.

        Raises:
            UnsupportedDataTypeError: it computes in other types only.
        """
        if dtype not in self.peak_flops_per_s:
            types = ", ".join(self.peak_flops_per_s)
            raise UnsupportedDataTypeError(f"{self.name} has no {dtype} arithmetic here: give one of {types}")
        return self.peak_flops_per_s[dtype]


class UnsupportedDataTypeError(ValueError):
    """A GPU type, as it is known here, does not compute in a data type."""


class UnknownGpuError(ValueError):
    """There is no GPU type of this name."""


GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        gpu.name: gpu
        for gpu in (
            Gpu(
                name="H100",  # SXM5 80 GB
                memory_bytes=79.6 * _GIB,  # torch.cuda.mem_get_info of an H100 SXM
                peak_flops_per_s=MappingProxyType({"bf16": 989e12, "fp8": 1979e12}),
                memory_bytes_per_s=3.35e12,
                sm_count=132,
                link_bytes_per_s=450e9,  # NVLink 4
                link_latency_s=5e-6,  # vLLM's all-reduce of small messages, aiconfigurator's tables
                kernel_gap_s=0.0,
                idle_power_w=143.0,  # measured: tests/lab/operators/h100_80gb/power.csv
                peak_power_w=700.0,
                sustained_product_ratio=_H100_PRODUCTS,
                sustained_decode_attention_ratio=_H100_DECODE_ATTENTION,
            ),
            Gpu(
                name="H200",  # SXM 141 GB
                memory_bytes=140.0 * _GIB,
                peak_flops_per_s=MappingProxyType({"bf16": 989e12, "fp8": 1979e12}),
                memory_bytes_per_s=4.8e12,
                sm_count=132,
                link_bytes_per_s=450e9,  # NVLink 4
                link_latency_s=5e-6,  # vLLM's all-reduce of small messages, aiconfigurator's tables
                kernel_gap_s=0.0,
                idle_power_w=143.0,  # not measured: that of the H100, which has the same chip
                peak_power_w=700.0,
                sustained_product_ratio=_H100_PRODUCTS,
                sustained_decode_attention_ratio=_H100_DECODE_ATTENTION,
            ),
            Gpu(
                name="A100",  # SXM4 80 GB
                memory_bytes=79.3 * _GIB,
                # It has no FP8 units: engines run FP8 weights through BF16 arithmetic.
                peak_flops_per_s=MappingProxyType({"bf16": 312e12, "fp8": 312e12}),
                memory_bytes_per_s=2.039e12,
                sm_count=108,
                link_bytes_per_s=300e9,  # NVLink 3
                link_latency_s=5e-6,  # vLLM's all-reduce of small messages, aiconfigurator's tables
                kernel_gap_s=0.0,
                idle_power_w=85.0,  # assumed: between the 50 W without a context and the 143 W of an H100 with one
                peak_power_w=400.0,
            ),
            Gpu(
                name="RTX-PRO-6000",  # Blackwell, workstation or server edition, 96 GB GDDR7
                memory_bytes=94.97 * _GIB,  # 97,250 MiB, as nvidia-smi shows it
                peak_flops_per_s=MappingProxyType({"bf16": 503.8e12, "fp8": 1007.6e12}),
                memory_bytes_per_s=1.792e12,
                sm_count=188,
                # PCIe 5.0 without direct access between GPUs: all data pass through the host's memory. Assumed; see
                # docs/operators_times.md for how much the result depends on it.
                link_bytes_per_s=18.5e9,
                link_latency_s=20e-6,  # assumed: NCCL over PCIe
                kernel_gap_s=1.0e-6,  # two kernels of a graph on an H100: links.csv of tests/lab/operators/h100_80gb
                idle_power_w=80.0,  # assumed
                peak_power_w=600.0,
            ),
        )
    }
)


def gpu_named(name: str) -> Gpu:
    """The GPU type of a name, such as H100; capitals, spaces and underscores do not matter.

    Raises:
        UnknownGpuError: no type has the name; the message lists those known.
    """
    wanted = name.upper().replace(" ", "-").replace("_", "-").removesuffix("-SXM")
    if wanted not in GPUS:
        raise UnknownGpuError(f"GPU {name!r} is not known: give one of {', '.join(GPUS)}")
    return GPUS[wanted]
