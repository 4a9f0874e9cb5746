"""``tandem operators plan``: what operator-level scaling would save for a model, GPUs and a load."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from autoscale.operators.costs import Phase
from autoscale.operators.over_time import MODEL_START_S, OPERATOR_START_S
from autoscale.traces.trace import load_trace
from serve_app.checks.numbers import above_0
from serve_app.checks.yaml_checks import config_errors
from serve_app.cli.operators_plans_page import plans_page
from serve_app.cli.operators_trace_page import trace_page
from serve_app.cli.operators_trace_view import show_trace, trace_document
from serve_app.cli.operators_view import show
from serve_app.cli.sim_inputs import check_outputs, json_text
from serve_app.cli.terminal import errors
from serve_app.operators.document import plans_document
from serve_app.operators.inputs import subject
from serve_app.operators.question import Question, phases_of, planners_of
from serve_app.operators.trace import HEADROOM_FRAC, Replanning, TraceAnswer, scaled
from serve_app.output import write_file


@config_errors()
def plan(
    model: Annotated[str, Argument(help="A shipped model such as qwen2-7b, a config.json, or a folder with one.")],
    gpu: Annotated[str, Option(help="The GPU type: H100, H200, A100 or RTX-PRO-6000.")],
    requests_per_s: Annotated[float | None, Option(help="The load, requests per second.")] = None,
    input_tokens: Annotated[int | None, Option(help="Tokens of each prompt.")] = None,
    output_tokens: Annotated[int | None, Option(help="Tokens of each answer; of use in decode.")] = None,
    phase: Annotated[str, Option(help="prefill, decode or both.")] = "both",
    ttft_s: Annotated[float | None, Option(help="Objective of the mean TTFT; left out: 4 passes alone.")] = None,
    tpot_s: Annotated[float | None, Option(help="Objective of the mean TPOT; left out: 4 passes alone.")] = None,
    tp: Annotated[int, Option(min=1, max=8, help="Largest tensor parallel size of an operator.")] = 8,
    dtype: Annotated[str, Option(help="Type of the weights and of the KV cache, bf16 or fp8.")] = "bf16",
    mps: Annotated[bool, Option("--mps", help="Operators on one GPU get a share of its SMs each.")] = False,
    tables: Annotated[
        Path | None, Option(help="Folder with measured tables of the GPU; left out: the shipped ones.")
    ] = None,
    planner: Annotated[
        list[str] | None,
        Option(
            help="model, paper_greedy, greedy, search, steady or apart; repeat it. Left out: model, greedy and search."
        ),
    ] = None,
    gpus: Annotated[
        int | None, Option(min=1, help="Instead of a load: the highest rate of these GPUs is found, for one phase.")
    ] = None,
    trace: Annotated[
        Path | None, Option(help="Instead of a load and lengths: a trace (CSV or .gz), planned window by window.")
    ] = None,
    rate_scale: Annotated[float, Option(help="With --trace: multiplies the number of its requests.")] = 1.0,
    window_s: Annotated[float, Option(help="With --trace: seconds between two plans.")] = 10.0,
    headroom_frac: Annotated[
        float, Option(min=0.0, help="With --trace: share by which the rate is raised before planning.")
    ] = HEADROOM_FRAC,
    model_start_s: Annotated[float, Option(min=0.0, help="With --trace: start of a model.")] = MODEL_START_S,
    operator_start_s: Annotated[float, Option(min=0.0, help="With --trace: start of an operator.")] = OPERATOR_START_S,
    json_out: Annotated[Path | None, Option("--json", help="Write all figures to this JSON file.")] = None,
    html_out: Annotated[
        Path | None, Option("--html", help="Write a page with tables, sweeps and sensitivities to this file.")
    ] = None,
) -> None:
    """Say what scaling single operators would save against whole model instances, and how each operator is set."""
    check_outputs({"--json": json_out, "--html": html_out}, {} if trace is None else {"--trace": trace})
    slos = {Phase.PREFILL: above_0("--ttft-s", ttft_s), Phase.DECODE: above_0("--tpot-s", tpot_s)}
    question = Question(
        phases=phases_of(phase), planners=planners_of(planner), slos=slos, gpus=gpus, requests_per_s=requests_per_s
    )
    lengths = input_tokens, output_tokens
    what = partial(subject, model, gpu, dtype, tables, most_parallel=tp, has_shares=mps)
    starts = {"model_start_s": model_start_s, "operator_start_s": operator_start_s}
    replanning = Replanning(window_s=window_s, headroom_frac=headroom_frac, **starts)
    if trace is not None:
        question.check_trace(lengths)
        requests = scaled(load_trace(trace), above_0("--rate-scale", rate_scale))
        courses = question.over_time(what(), requests, replanning)
        _plan_trace(courses, replanning, json_out, html_out)
        return
    tokens = question.tokens(lengths)
    answers = question.at_one_point(what(), tokens)
    show(answers)
    write_file(json_out, json_text(plans_document(answers)), "--json")
    _write_page(html_out, lambda: plans_page(answers))


def _plan_trace(
    answers: Sequence[TraceAnswer], replanning: Replanning, json_out: Path | None, html_out: Path | None
) -> None:
    """Print and write the answers for a trace."""
    show_trace(answers, replanning)
    write_file(json_out, json_text(trace_document(answers, replanning)), "--json")
    _write_page(html_out, lambda: trace_page(answers, replanning))


def _write_page(path: Path | None, make: Callable[[], str]) -> None:
    if path is not None:
        with errors.status("planning the sweeps and drawing the figures of --html"):
            text = make()
        write_file(path, text, "--html")
