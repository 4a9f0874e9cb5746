"""How much of a live engine's step its operators explain, on a CPU: ``make operators-truth-cpu``.

The operators of a few layers of a shipped model are measured as ``tandem operators profile`` does. Then a vLLM engine
with random weights of the same layers computes prompts alone and decode steps. Both use the same number of threads,
and of both only the time counts in which they had a core.
"""

import asyncio
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import psutil
import torch
import typer
from rich.console import Console
from rich.table import Table
from typer import Option

from autoscale.engines.repeats import least_time
from autoscale.operators.device import load_gpu
from autoscale.operators.graph import OperatorPrecision, operator_graph
from autoscale.operators.kinds import Pass
from autoscale.operators.step_times import EngineSettings, HostTimes, StepTimes
from autoscale.operators.tables import load_operator_tables
from autoscale.operators.times import OperatorTimes
from deployments.operator_profiler.measure import POINTS_FILE
from deployments.operator_profiler.pace import HostPace
from deployments.operator_profiler.profile import profile_operators
from deployments.operator_profiler.series import Sizes
from deployments.profiler.pace import UNDISTURBED_QUANTILE
from serve_app.operators.model import model_config

_SIZES = Sizes(max_batch_tokens=512, max_running=16, longest_tokens=1024)
_PROMPTS = (16, 32, 64, 128, 256, 512)
# With all 151,936 entries the head would be most of a step of a few layers.
_VOCABULARY = 32_768
_BATCHES = (1, 4, 16)
_CONTEXT_TOKENS = 256
_ROUNDS = 3
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
_SEED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTime:
    """Seconds of one step by the wall, and those in which the engine's worker had a core, at the undisturbed pace."""

    wall_s: float
    busy_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One step: what the engine takes, and its operators together."""

    name: str
    engine: EngineTime
    parts_s: dict[str, float]

    @property
    def operators_s(self) -> float:
        """Seconds of all operators."""
        return sum(self.parts_s.values())

    @property
    def explained_frac(self) -> float:
        """Share of the engine's step that the operators explain."""
        return self.operators_s / self.engine.busy_s


def passes() -> dict[str, Pass]:
    """The steps that are compared, by name."""
    prompts = {f"prompt of {tokens}": Pass(prompts=1, new_tokens=tokens) for tokens in _PROMPTS}
    steps = {
        f"decode {batch} x {_CONTEXT_TOKENS}": Pass(decoding=batch, context_tokens=_CONTEXT_TOKENS)
        for batch in _BATCHES
    }
    return prompts | steps


async def engine_times(folder: Path, dtype: str, rounds: int, pace_s: float) -> dict[str, EngineTime]:
    """Times of each step on a vLLM engine with random weights; of several rounds as for operators.

    ``pace_s``: the undisturbed pace while operators were measured.
    """
    from vllm import AsyncLLMEngine
    from vllm.engine.arg_utils import AsyncEngineArgs

    from deployments.profiler.engines import DECODE_STEPS, prefill_s, step_s

    arguments = AsyncEngineArgs(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=_DTYPES[dtype],
        max_model_len=_SIZES.longest_tokens,
        max_num_batched_tokens=_SIZES.max_batch_tokens,
        max_num_seqs=_SIZES.max_running,
        kv_cache_memory_bytes=2**28,
        enable_prefix_caching=False,
        enforce_eager=True,
        block_size=32,
    )
    client = AsyncLLMEngine.from_engine_args(arguments)
    rng, pace, core = random.Random(_SEED), HostPace(), worker_core()

    def prompt(tokens: int) -> list[int]:
        return rng.choices(range(1000), k=tokens)

    try:
        await prefill_s(client, prompt(64))
        wall: dict[str, list[float]] = {}
        busy: dict[str, list[float]] = {}
        for _ in range(rounds):
            for name, step in passes().items():
                before_s, at_core_s, at_wall_s = pace.seconds(), core(), time.perf_counter()
                if step.prompts:
                    seconds = await prefill_s(client, prompt(step.new_tokens))
                else:
                    lengths = [_CONTEXT_TOKENS - DECODE_STEPS // 2] * step.decoding
                    seconds = await step_s(client, [prompt(each) for each in lengths])
                had_core_frac = min(1.0, (core() - at_core_s) / (time.perf_counter() - at_wall_s))
                wall.setdefault(name, []).append(seconds)
                pace_frac = pace_s / statistics.fmean((before_s, pace.seconds()))
                busy.setdefault(name, []).append(seconds * had_core_frac * pace_frac)
    finally:
        client.shutdown()
    return {name: EngineTime(wall_s=least_time(wall[name]), busy_s=least_time(busy[name])) for name in wall}


def worker_core() -> Callable[[], float]:
    """Reads the seconds for which the engine's worker, a process below this one, has had a core."""
    below = psutil.Process().children(recursive=True)
    path = next(Path(f"/proc/{each.pid}/schedstat") for each in below if "Worker" in "".join(each.cmdline()))
    return lambda: int(path.read_text().split()[0]) / 1e9


def undisturbed_pace_s(tables: Path) -> float:
    """The pace that counts as undisturbed for the operators: a low quantile of all of them."""
    lines = (tables / POINTS_FILE).read_text(encoding="utf-8").splitlines()[1:]
    return float(np.quantile([json.loads(line)["pace_s"] for line in lines], UNDISTURBED_QUANTILE))


def compared(config: dict[str, Any], tables: Path, dtype: str, engine: dict[str, EngineTime]) -> list[Compared]:
    """Each step of the engine beside its operators, without a host."""
    graph = operator_graph(config, OperatorPrecision(weights=dtype, kv=dtype))
    times = OperatorTimes(load_gpu("cpu", tables), load_operator_tables(tables))
    settings = EngineSettings(parallel=1, host=HostTimes(step_s=0.0), longest_tokens=_SIZES.longest_tokens)
    steps = StepTimes(graph, times, settings)
    return [Compared(name=name, engine=engine[name], parts_s=steps.parts(step)) for name, step in passes().items()]


def show(rows: Sequence[Compared], title: str) -> Table:
    """The table: both times, the share, and the largest operators."""
    table = Table(title=title)
    for head in ("step", "engine, ms", "on a core, ms", "operators, ms", "explained", "largest operators"):
        table.add_column(head)
    for row in rows:
        largest = sorted(row.parts_s.items(), key=lambda each: -each[1])[:3]
        table.add_row(
            row.name,
            f"{row.engine.wall_s * 1e3:.1f}",
            f"{row.engine.busy_s * 1e3:.1f}",
            f"{row.operators_s * 1e3:.1f}",
            f"{row.explained_frac:.0%}",
            ", ".join(f"{name} {seconds * 1e3:.1f}" for name, seconds in largest),
        )
    return table


def main(
    model: Annotated[str, Option(help="A shipped model.")] = "qwen2-0.5b",
    layers: Annotated[int, Option(min=1, help="Layers of it.")] = 6,
    threads: Annotated[int, Option(min=1, help="Threads of the operators, and of the engine.")] = 1,
    dtype: Annotated[str, Option(help="fp32 or bf16.")] = "fp32",
    budget_s: Annotated[float, Option(help="Time for the operators, seconds.")] = 150.0,
    rounds: Annotated[int, Option(min=1, help="Rounds on the engine.")] = _ROUNDS,
    kernels: Annotated[str, Option(help="auto, torch or vllm, as of tandem operators profile.")] = "auto",
    out: Annotated[Path | None, Option(help="Keep the tables in this folder.")] = None,
) -> None:
    """Measure the operators, then the engine, and print both."""
    config = model_config(model) | {"num_hidden_layers": layers, "max_position_embeddings": _SIZES.longest_tokens}
    config["vocab_size"] = _VOCABULARY
    config |= {"model_type": "qwen2", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu"}
    torch.set_num_threads(threads)
    os.environ |= {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    console = Console(width=120)
    with TemporaryDirectory() as name:
        folder = Path(name)
        tables = out or folder / "tables"
        graph = operator_graph(config, OperatorPrecision(weights=dtype, kv=dtype))
        with console.status("starting") as line:
            outcome = profile_operators(graph, model, "cpu", (1,), _SIZES, budget_s, tables, line.update, kernels)
        console.print(
            f"operators: {outcome.measured} measurements, complete: {outcome.is_complete}, left out: {outcome.left_out}"
        )
        (folder / "config.json").write_text(json.dumps(config))
        engine = asyncio.run(engine_times(folder, dtype, rounds, undisturbed_pace_s(tables)))
        title = f"{layers} layers of {model}, {dtype}, {threads} thread(s), {outcome.facts.name}"
        console.print(show(compared(config, tables, dtype, engine), title))


if __name__ == "__main__":
    typer.run(main)
