"""How far interpolated times are off at points that are left out, and what kinds of operators reach of a GPU's peaks.

``python -m tests.lab.operators.left_out DATA``; ``DATA`` as for ``derive_tables``. It compares lines in plain numbers
with lines in logarithms, and shapes between measured ones by efficiency with plain lines between times.
"""

import argparse
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from autoscale.operators.attention import Attention
from autoscale.operators.curves import Curve, between
from autoscale.operators.gemm_times import GemmTimes, gemm_work
from autoscale.operators.gpu import GPUS, Gpu
from autoscale.operators.kinds import Pass, Work
from tests.lab.operators.derive_tables import Points, aiconfigurator_tables, vllm_layer_tables

Pair = tuple[float, float]  # measured, predicted


def every_second(curves: Points, *, in_logs: bool) -> Iterator[Pair]:
    """Each second inner point of each curve, by its two neighbours."""
    for curve in curves.values():
        axis = sorted(at for at in curve if at > 0)
        for index in range(1, len(axis) - 1, 2):
            low, high = axis[index - 1], axis[index + 1]
            found = between((low, high), (curve[low], curve[high]), axis[index], in_logs=in_logs)
            yield curve[axis[index]], found


def shapes_left_out(gpu: Gpu, products: Points, dtype: str, *, by_efficiency: bool) -> Iterator[Pair]:
    """Products whose n is left out of the table, at all m, from shapes with the next smaller and larger n."""
    curves = {(int(key[1]), int(key[2])): Curve.of(points) for key, points in products.items() if key[0] == dtype}
    sizes = sorted({n for n, _ in curves})
    for index in range(1, len(sizes) - 1):
        n = sizes[index]
        others = {shape: curve for shape, curve in curves.items() if shape[0] != n}
        times = GemmTimes(gpu, {dtype: others})
        for k in sorted({k for each, k in curves if each == n})[::3]:
            ends = [(float(each), others.get((each, k))) for each in (sizes[index - 1], sizes[index + 1])]
            found = times.curve(dtype, n, k).curve
            if found is None or any(curve is None for _, curve in ends):
                continue
            for m, measured in zip(curves[n, k].axis[::3], curves[n, k].values[::3], strict=True):
                if by_efficiency:
                    # The curves are in microseconds here, so that the roofline in seconds is only a common factor.
                    yield measured, found.at(m).value
                else:
                    low, high = (curve.at(m).value for _, curve in ends if curve)
                    yield measured, between((ends[0][0], ends[1][0]), (low, high), float(n), in_logs=False)


def text(pairs: Iterator[Pair]) -> str:
    """Median and 90th percentile of the relative error, and the number of points."""
    errors = sorted(abs(predicted / measured - 1.0) for measured, predicted in pairs)
    if not errors:
        return "no points"
    mean = statistics.fmean(errors)
    p90 = errors[int(0.9 * len(errors))]
    return f"mean {mean:.1%}, median {statistics.median(errors):.1%}, p90 {p90:.1%}, {len(errors)} points"


def efficiencies(gpu: Gpu, tables: dict[str, Points]) -> Iterator[str]:
    """Shares of the peaks of arithmetic and of memory that measured points reach."""
    products = [
        (gemm_work(str(dtype), m, int(n), int(k)), time_us, str(dtype))
        for (dtype, n, k), curve in tables["gemm"].items()
        for m, time_us in curve.items()
    ]
    yield from _reached(gpu, "products", products)
    attention = []
    for (kv_dtype, heads, kv_heads, head_dim, batch), curve in tables["decode_attention"].items():
        operator = Attention(
            name="", copies=1, heads=int(heads), kv_heads=int(kv_heads), head_dim=int(head_dim), kv_dtype=str(kv_dtype)
        )
        for context, time_us in curve.items():
            work = operator.work(Pass(decoding=int(batch), context_tokens=context), 1)
            attention.append((work, time_us, "bf16"))
    yield from _reached(gpu, "decode attention", attention)
    prompts = []
    for (kv_dtype, heads, kv_heads, head_dim, batch), curve in tables.get("prompt_attention", {}).items():
        operator = Attention(
            name="", copies=1, heads=int(heads), kv_heads=int(kv_heads), head_dim=int(head_dim), kv_dtype=str(kv_dtype)
        )
        prompts += [
            (operator.work(Pass(prompts=int(batch), new_tokens=int(new)), 1), time_us, "bf16")
            for new, time_us in curve.items()
        ]
    yield from _reached(gpu, "prompt attention", prompts)


def _reached(gpu: Gpu, name: str, points: Sequence[tuple[Work, float, str]]) -> Iterator[str]:
    compute, memory, times_us = [], [], sorted(time_us for _, time_us, _ in points)
    for work, time_us, dtype in points:
        arithmetic_us = 1e6 * work.flops / gpu.peak_flops_per_s[dtype]
        traffic_us = 1e6 * work.traffic_bytes / gpu.memory_bytes_per_s
        # Longer than a few launches, and one of both clearly longer than the other one.
        if time_us > 100.0 and arithmetic_us > 2 * traffic_us:
            compute.append(arithmetic_us / time_us)
        if time_us > 100.0 and traffic_us > 2 * arithmetic_us:
            memory.append(traffic_us / time_us)
    shares = ", ".join(
        f"{kind} {statistics.median(values):.2f}"
        for kind, values in (("arithmetic", compute), ("memory", memory))
        if values
    )
    if times_us:
        yield f"{gpu.name} {name}: {shares}, smallest tenth {times_us[len(times_us) // 10]:.1f} us"


def main() -> None:
    """Print all figures."""
    parser = argparse.ArgumentParser(description="Errors of interpolation at points left out.")
    parser.add_argument("data", type=Path, help="folder with profiles/ and measured/")
    data = parser.parse_args().data
    for name, gpu in GPUS.items():
        tables = vllm_layer_tables(data) if name == "RTX-PRO-6000" else aiconfigurator_tables(data, name)
        for table, curves in tables.items():
            print(f"{name} {table}: line {text(every_second(curves, in_logs=False))}", flush=True)
            print(f"{name} {table}: line in logarithms {text(every_second(curves, in_logs=True))}", flush=True)
        if name != "RTX-PRO-6000":
            for dtype in sorted({str(key[0]) for key in tables["gemm"]}):
                for by_efficiency in (True, False):
                    pairs = shapes_left_out(gpu, tables["gemm"], dtype, by_efficiency=by_efficiency)
                    way = "by efficiency" if by_efficiency else "by lines"
                    print(f"{name} {dtype} shapes left out, {way}: {text(pairs)}", flush=True)
        for line_text in efficiencies(gpu, tables):
            print(line_text, flush=True)


if __name__ == "__main__":
    main()
