"""The time of an operator without measured points: its work, divided by what the GPU reaches of its peaks (pure)."""

from dataclasses import dataclass

from autoscale.operators.gpu import Gpu
from autoscale.operators.kinds import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """What a kind of operator reaches: shares of the peaks of arithmetic and of memory, and a fixed time.

    ``launch_s``: time of a kernel without work, inside a CUDA graph.
    """

    compute_frac: float
    memory_frac: float
    launch_s: float


# Middle of the medians of four GPU types, over points of at least 100 us: for ``compute_frac`` those at which
# arithmetic takes at least twice as long as memory traffic, for ``memory_frac`` the reverse. ``launch_s`` is the time
# of the smallest kernels. `python -m tests.lab.operators.left_out` prints them (docs/operators_times.md).
GEMM = Efficiency(compute_frac=0.70, memory_frac=0.80, launch_s=3.0e-6)
ATTENTION = Efficiency(compute_frac=0.50, memory_frac=0.65, launch_s=12.0e-6)
# Our own H100: RMSNorm of 8,192 tokens, and the fused activation of one token (tests/lab/operators/h100_80gb).
POINTWISE = Efficiency(compute_frac=1.0, memory_frac=0.70, launch_s=1.5e-6)
# Of the bandwidth of a link; the fixed time is that of the GPU (``Gpu.link_latency_s``).
COLLECTIVE = Efficiency(compute_frac=1.0, memory_frac=0.75, launch_s=0.0)


def roofline_s(work: Work, peak_flops_per_s: float, bytes_per_s: float, efficiency: Efficiency) -> float:
    """Seconds: the longer of arithmetic and memory traffic, and the fixed time."""
    compute_s = work.flops / (peak_flops_per_s * efficiency.compute_frac)
    return efficiency.launch_s + max(compute_s, work.traffic_bytes / (bytes_per_s * efficiency.memory_frac))


def gpu_roofline_s(work: Work, gpu: Gpu, dtype: str, efficiency: Efficiency) -> float:
    """``roofline_s`` of work in the memory of a GPU."""
    return roofline_s(work, gpu.peak(dtype), gpu.memory_bytes_per_s, efficiency)
