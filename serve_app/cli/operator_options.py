"""Options of ``tandem profile --from-operators``."""

from pathlib import Path
from typing import Annotated

from typer import Option

Model = Annotated[
    str | None,
    Option(
        help="Measure nothing: compute the profile of this model from the times of its operators. A config.json, a "
        "folder with one, or a shipped model such as llama-3.1-8b."
    ),
]
GpuType = Annotated[
    str | None,
    Option(help="With --from-operators: the GPU type, such as H100, or the device of --tables, such as cpu."),
]
TensorParallel = Annotated[int, Option(min=1, help="With --from-operators: tensor parallel size.")]
Dtype = Annotated[str, Option(help="With --from-operators: type of the weights: bf16, fp8, or fp32 on a CPU.")]
KvDtype = Annotated[
    str | None, Option(help="With --from-operators: type of the KV cache; by default that of the weights.")
]
MaxBatchTokens = Annotated[int, Option(min=1, help="With --from-operators: max_num_batched_tokens of the engine.")]
MaxRunning = Annotated[int, Option(min=1, help="With --from-operators: max_num_seqs of the engine.")]
LongestTokens = Annotated[int, Option(min=32, help="With --from-operators: longest prompt and context of the profile.")]
AsyncScheduling = Annotated[
    bool, Option(help="With --from-operators: whether the engine schedules asynchronously, as vLLM does since 0.14.")
]
Tables = Annotated[
    Path | None, Option(help="With --from-operators: folder with measured tables; by default the shipped ones.")
]
