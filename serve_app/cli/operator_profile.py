"""``tandem profile --from-operators``: a profile from the times of operators, without an engine."""

from pathlib import Path

from autoscale.engines.profile import EngineProfile
from autoscale.operators.costs import SourceKind
from autoscale.operators.device import load_gpu
from autoscale.operators.engine_profile import engine_profile
from autoscale.operators.graph import OperatorPrecision, operator_graph
from autoscale.operators.kinds import Pass
from autoscale.operators.step_times import EngineSettings, StepTimes
from autoscale.operators.tables import load_operator_tables
from autoscale.operators.times import OperatorTimes
from serve_app.checks.yaml_checks import config_errors
from serve_app.cli.terminal import console, figures_table
from serve_app.local.shipped import shipped
from serve_app.operators.model import model_config
from serve_app.output import write_file


@config_errors()
def write_operator_profile(
    model: str,
    gpu_name: str,
    dtypes: tuple[str, str],
    settings: EngineSettings,
    tables: Path | None,
    name: str | None,
    out: Path,
) -> None:
    """Write the profile, and print what each operator takes and where its time comes from.

    ``model``: a shipped model's name, a config.json, or a folder with one. ``dtypes``: of weights and of KV.
    ``tables``: a folder with measured tables of the GPU, or of a device of its own (``device.json``); None: those
    shipped.

    Raises:
        ConfigError: the model, its config or the GPU is not known, the model does not fit, or a file cannot be written.
    """
    graph = operator_graph(model_config(model), OperatorPrecision(weights=dtypes[0], kv=dtypes[1]))
    gpu = load_gpu(gpu_name, tables)
    times = OperatorTimes(gpu, load_operator_tables(tables or shipped(f"operators/tables/{gpu.name}")))
    profile = engine_profile(name or out.stem, model, graph, times, settings)
    write_file(out, profile.model_dump_json(indent=1) + "\n", "--out")
    _show(profile, StepTimes(graph, times, settings), settings)
    console.print(
        f"{out}: {profile.name}, {profile.kv_tokens} tokens of KV, {profile.max_running} requests; computed",
        highlight=False,
        soft_wrap=True,
    )


def _show(profile: EngineProfile, steps: StepTimes, settings: EngineSettings) -> None:
    """Times of one prompt and of one decode step, by operator."""
    tokens, context = min(1024, settings.max_batch_tokens), min(2048, settings.longest_tokens)
    batch = min(32, settings.max_running)
    steps.kinds.clear()
    prompt = steps.parts(Pass(prompts=1, new_tokens=tokens))
    decode = steps.parts(Pass(decoding=batch, context_tokens=context))
    title = f"{profile.name}: ms of all layers, a prompt of {tokens} tokens, and {batch} sequences of {context} tokens"
    table = figures_table("operator", ("prompt", "share", "decode", "share", "source"), title=title)
    totals = sum(prompt.values()), sum(decode.values())
    for operator in dict.fromkeys([*prompt, *decode]):
        cells = []
        for parts, total in zip((prompt, decode), totals, strict=True):
            value_s = parts.get(operator, 0.0)
            cells += [f"{value_s * 1e3:.2f}", f"{value_s / total:.0%}"]
        table.add_row(operator, *cells, str(steps.kinds[operator]))
    table.add_row("all", f"{totals[0] * 1e3:.2f}", "", f"{totals[1] * 1e3:.2f}", "", "")
    console.print(table)
    estimated = [name for name, kind in steps.kinds.items() if kind in (SourceKind.EXTRAPOLATED, SourceKind.ROOFLINE)]
    if estimated:
        console.print(f"not measured on this GPU, estimated: {', '.join(estimated)}", highlight=False, soft_wrap=True)
