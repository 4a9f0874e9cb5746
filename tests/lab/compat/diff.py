"""``python -m tests.lab.compat.diff``: two thousand requests to plain vLLM and to Tandem, and how the answers differ.

The servers run one after another, with the same model and arguments. Tandem runs twice: every prompt is computed by a
prefill engine, then every prompt by the decode engine itself.
"""

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated

import typer
from pydantic import TypeAdapter
from rich.console import Console
from rich.progress import Progress

from serve_app.local.cluster import driver_environment
from serve_app.output import write_file
from tests.lab.compat.answer import Answer, record
from tests.lab.compat.report import Comparison, compared, markdown, unexplained, unused
from tests.lab.compat.servers import TANDEMS, VLLM, server
from tests.lab.compat.shape import Shape

FOLDER = Path("reports/compat")
REPORT = Path("docs/compat_report.md")
_ANSWERS = TypeAdapter(dict[str, Answer])


def all_shapes() -> list[Shape]:
    """Every shape, in the order in which it is sent."""
    from tests.lab.compat.request_models import request_models
    from tests.lab.compat.schema_shapes import schema_shapes
    from tests.lab.compat.written_shapes import written_shapes

    return [*written_shapes(), *(shape for model in request_models() for shape in schema_shapes(model))]


def answers_of(kind: str, shapes: Sequence[Shape], url: str | None, reuse: bool, console: Console) -> dict[str, Answer]:
    """The answers of a server; they are written to ``reports/compat``, also if the run is interrupted.

    Args:
        kind: ``vllm``, or a key of ``TANDEMS``.
        shapes: what is sent.
        url: of a server that runs; ``None``: start one.
        reuse: do not send again what an earlier run has sent.
        console: for the progress.
    """
    file = FOLDER / f"{kind}.json"
    answers = _ANSWERS.validate_json(file.read_bytes()) if file.exists() else {}
    wanted = unanswered(shapes, answers) if reuse else list(shapes)
    console.print(f"{kind}: {len(wanted)} of {len(shapes)} shapes are sent to {url or 'a new server'}")
    if not wanted:
        return answers
    started = nullcontext(url) if url is not None else server(kind, FOLDER / "vllm.log")
    with started as at, Progress(console=console, transient=True) as progress:
        task = progress.add_task(kind, total=len(wanted))
        began_s = time.monotonic()
        try:
            for name, answer in record(at, wanted):
                answers[name] = answer
                progress.advance(task)
        finally:
            write_file(file, _ANSWERS.dump_json(answers, indent=1).decode(), "reports")
        console.print(f"{kind}: {len(wanted)} answers in {time.monotonic() - began_s:.0f} s")
    return answers


def unanswered(shapes: Sequence[Shape], answers: Mapping[str, Answer]) -> list[Shape]:
    """The shapes without an answer; of those that need the answer to another, all or none."""
    lacking = {
        shape.name for shape in shapes if shape.name not in answers or answers[shape.name].digest != shape.digest
    }
    chained = {shape.after for shape in shapes if shape.after and {shape.name, shape.after} & lacking}
    return [shape for shape in shapes if shape.name in lacking or shape.name in chained or shape.after in chained]


def main(
    only: Annotated[str, typer.Option(help="Send only shapes whose route or name fits this pattern.")] = "*",
    prompts: Annotated[str, typer.Option(help="remote, local, or both: who computes the prompts in Tandem.")] = "both",
    reuse: Annotated[str, typer.Option(help="vllm or all: do not send again what earlier runs have sent.")] = "",
    vllm_url: Annotated[str | None, typer.Option(help="A plain vLLM that runs.")] = None,
    tandem_url: Annotated[str | None, typer.Option(help="A Tandem that runs; give --prompts too.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the report here; docs/compat_report.md if whole.")] = None,
) -> None:
    """Send the requests, compare the answers, write the report; fails if a difference has no reason."""
    driver_environment()  # before anything imports ray
    console = Console()
    kinds = [*TANDEMS] if prompts == "both" else [prompts]
    shapes = [shape for shape in all_shapes() if fnmatch(shape.route, only) or fnmatch(shape.name, only)]
    console.print(f"{len(shapes)} shapes")
    vllm = answers_of(VLLM, shapes, vllm_url, reuse in (VLLM, "all"), console)
    results: dict[str, Comparison] = {}
    for kind in kinds:
        tandem = answers_of(kind, shapes, tandem_url, reuse == "all", console)
        results[kind] = compared(shapes, vllm, tandem)
    is_whole = only == "*" and prompts == "both"
    text = markdown(results, is_whole=is_whole)
    out = out or (REPORT if is_whole else FOLDER / "report.md")
    write_file(out, text, "--out")
    write_file(FOLDER / "unexplained.md", unexplained(results), "reports")
    rows = {kind: result.unexplained_rows() for kind, result in results.items()}
    write_file(FOLDER / "unexplained.json", json.dumps(rows, indent=1), "reports")
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.print(f"the report: {out}; what differs without a reason: {FOLDER / 'unexplained.md'}")
    if any(result.is_failed() for result in results.values()) or (is_whole and unused(results)):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
