"""``tandem operators profile``: times the operators of a model on this machine, and writes tables of them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from autoscale.operators.graph import OperatorPrecision, operator_graph
from autoscale.operators.kinds import wide_dtype
from serve_app.checks.yaml_checks import ConfigError, config_errors
from serve_app.cli.terminal import console, errors, figures_table
from serve_app.operators.model import model_config

if TYPE_CHECKING:
    from deployments.operator_profiler.profile import Outcome

_CPU = "cpu"


@config_errors()
def profile(
    model: Annotated[str, Argument(help="A config.json, a folder with one, or a shipped model such as qwen2-0.5b.")],
    out: Annotated[Path, Option(help="Folder of the tables. A folder of an interrupted run goes on.")],
    device: Annotated[str, Option(help="cpu or cuda.")] = _CPU,
    dtype: Annotated[
        str | None, Option(help="Type of the weights: bf16, fp8 or fp32; by default fp32 on a CPU, bf16 on a GPU.")
    ] = None,
    tp: Annotated[str, Option(help="Tensor parallel sizes whose shapes are measured, such as 1,2,4.")] = "1",
    budget_s: Annotated[float, Option(min=1.0, help="Time for the measurements of this run, seconds.")] = 240.0,
    max_batch_tokens: Annotated[int, Option(min=1, help="Most tokens of a step.")] = 2048,
    max_running: Annotated[int, Option(min=1, help="Most requests that decode together.")] = 128,
    longest_tokens: Annotated[int, Option(min=32, help="Longest context.")] = 16_384,
    kernels: Annotated[
        str, Option(help="torch, vllm, or auto: vLLM's kernels on a CPU where vLLM is installed, else torch's.")
    ] = "auto",
) -> None:
    """Time the operators of a model on this machine, with random weights, and write tables of them."""
    parallels = _sizes(tp)
    from deployments.operator_profiler.device import check_device, default_dtype
    from deployments.operator_profiler.profile import profile_operators
    from deployments.operator_profiler.series import Sizes

    chosen = dtype or default_dtype(device)
    config = model_config(model)
    graph = operator_graph(config, OperatorPrecision(weights=chosen, kv=wide_dtype(chosen)))
    check_device(device, chosen)
    with errors.status("starting") as line:
        outcome = profile_operators(
            graph,
            model,
            device,
            parallels,
            Sizes(max_batch_tokens=max_batch_tokens, max_running=max_running, longest_tokens=longest_tokens),
            budget_s,
            out,
            line.update,
            kernels,
        )
    _show(outcome, model, device, chosen, out)


def _sizes(text: str) -> tuple[int, ...]:
    """Tensor parallel sizes, ascending."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) >= 1 for part in parts):
        raise ConfigError(f"--tp {text!r}: give whole numbers of at least 1 with commas between them, such as 1,2,4")
    return tuple(sorted({int(part) for part in parts}))


def _show(outcome: "Outcome", model: str, device: str, dtype: str, out: Path) -> None:
    """The tables, what is missing, and the next command."""
    facts = outcome.facts
    table = figures_table("table", ("rows",), title=f"{model} on {facts.name}, {dtype}")
    for name, rows in outcome.rows.items():
        table.add_row(name, str(rows))
    console.print(table)
    lines = [
        f"{outcome.measured} measurements, {outcome.reused} of earlier runs",
        "fastest product "
        + ", ".join(f"{value / 1e12:.3g} TFLOP/s ({name})" for name, value in facts.reached_flops_per_s.items())
        + f"; fastest copy {facts.reached_bytes_per_s / 1e9:.3g} GB/s",
    ]
    if outcome.other_operators:
        lines.append(f"not measured, rooflines: {', '.join(outcome.other_operators)}")
    if outcome.left_out:
        lines.append(f"{len(outcome.left_out)} points were left out; {out / 'metadata.json'} says why")
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    if not outcome.is_complete:
        errors.print(
            f"note: the budget was over; {outcome.unrepeated} points were measured once. Run the same command again: "
            "it goes on",
            style="yellow",
            highlight=False,
            soft_wrap=True,
        )
    name = facts.name if device != _CPU else _CPU
    console.print(
        f"next: tandem profile --from-operators {model} --gpu '{name}' --tables {out} --dtype {dtype} --out my.json",
        highlight=False,
        soft_wrap=True,
    )
