"""``tandem operators plan``: what operator-level scaling would save for a model, GPUs and a load."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from autoscale.operators.costs import Phase
from autoscale.operators.planners import PLANNERS
from serve_app.checks.yaml_checks import config_errors
from serve_app.cli.numbers import above_0
from serve_app.cli.operators_answer import PhaseAnswer, answer_for_load
from serve_app.cli.operators_inputs import Subject, subject
from serve_app.cli.operators_json import plans_document
from serve_app.cli.operators_view import show
from serve_app.cli.sim_inputs import check_outputs, json_text
from serve_app.output import write_file

_DEFAULT_PLANNERS = ("model", "greedy", "search")
_PHASES = {**{str(phase): (phase,) for phase in Phase}, "both": tuple(Phase)}


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
        list[str] | None, Option(help="model, greedy, search or apart; repeat it. Left out: the first three.")
    ] = None,
    json_out: Annotated[Path | None, Option("--json", help="Write all figures to this JSON file.")] = None,
) -> None:
    """Say what scaling single operators would save against whole model instances, and how each operator is set."""
    check_outputs({"--json": json_out}, {})
    phases, planners = _phases(phase), _planners(planner)
    slos = {Phase.PREFILL: above_0("--ttft-s", ttft_s), Phase.DECODE: above_0("--tpot-s", tpot_s)}
    tokens = _tokens(input_tokens, output_tokens, phases)
    rate = _rate(requests_per_s)
    what = subject(model, gpu, dtype, tables, most_parallel=tp, has_shares=mps)
    answers = [_answer(what, one, planners, rate, tokens, slos[one]) for one in phases]
    show(answers)
    write_file(json_out, json_text(plans_document(answers)), "--json")


def _answer(
    what: Subject,
    phase: Phase,
    planners: Sequence[str],
    rate: float,
    tokens: tuple[int, int | None],
    slo_s: float | None,
) -> PhaseAnswer:
    with config_errors(f"{phase}: "):
        return answer_for_load(what, phase, planners, requests_per_s=rate, tokens=tokens, slo_s=slo_s)


def _phases(name: str) -> tuple[Phase, ...]:
    if name not in _PHASES:
        raise ValueError(f"--phase {name}: give one of {', '.join(_PHASES)}")
    return _PHASES[name]


def _planners(names: Sequence[str] | None) -> tuple[str, ...]:
    """The planners of an option, each once."""
    for name in names or ():
        if name not in PLANNERS:
            raise ValueError(f"--planner {name}: give one of {', '.join(PLANNERS)}")
    return tuple(dict.fromkeys(names or _DEFAULT_PLANNERS))


def _rate(requests_per_s: float | None) -> float:
    if requests_per_s is None:
        raise ValueError("no load is given: add --requests-per-s, --gpus or --trace")
    if not 0.0 <= requests_per_s < math.inf:
        raise ValueError(f"--requests-per-s {requests_per_s:g}: give a number from 0")
    return requests_per_s


def _tokens(input_tokens: int | None, output_tokens: int | None, phases: Sequence[Phase]) -> tuple[int, int | None]:
    """Lengths of a prompt and of an answer."""
    if input_tokens is None:
        raise ValueError("the length of prompts is not given: add --input-tokens, or --trace")
    if output_tokens is None and Phase.DECODE in phases:
        raise ValueError("decode needs the length of answers: add --output-tokens, or --phase prefill")
    for option, tokens in (("--input-tokens", input_tokens), ("--output-tokens", output_tokens)):
        if tokens is not None and tokens < 1:
            raise ValueError(f"{option} {tokens}: give a number of tokens, 1 or more")
    return input_tokens, output_tokens
