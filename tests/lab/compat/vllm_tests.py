"""``python -m tests.lab.compat.vllm_tests``: vLLM's own tests of its servers, on plain vLLM and on Tandem.

The servers run one after another, with the tiny model. What plain vLLM passes, Tandem must pass.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from serve_app.local.cluster import driver_environment
from serve_app.output import write_file
from tests.lab.compat.servers import MODEL, TANDEMS, VLLM, given_flags, server
from tests.lab.compat.vllm_source import FOLDER, fetched_tests
from tests.lab.stand.fixed_counts import ROOT

REPORTS = ROOT / "reports" / "compat"
_PLUGIN = Path(__file__).with_name("pytest_plugin")
# Longest time for all tests against one server, seconds.
_TIMEOUT_S = 3600.0

_DERENDER = "tests/entrypoints/scale_out/derender/test_derender.py"
# Tests that plain vLLM passes and Tandem does not, with the reason.
EXPECTED = {
    f"{_DERENDER}::test_derender_completion_too_many_generate_responses_rejected": "Tandem refuses such a body before "
    "vLLM reads it (400), with a message of its own: it has too many parts",
    f"{_DERENDER}::test_derender_chat_oversized_logprobs_rejected": "the body is larger than "
    "`ingress.max_body_bytes`: 413, not 400",
}

Outcomes = Mapping[str, tuple[str, str]]


def outcomes_of(
    kind: str, files: Sequence[str], url: str | None, console: Console, names: Sequence[str] = ()
) -> Outcomes:
    """Outcome and reason of each test against a server.

    Args:
        kind: ``vllm``, or a key of ``TANDEMS``.
        files: the files with the tests.
        url: of a server that runs; ``None``: start one.
        console: for the progress.
        names: run these tests alone; empty: all.
    """
    console.print(f"{kind}: {'starting' if url is None else url}")
    if url is not None:
        return _run(kind, files, url, names)
    with server(kind, REPORTS / "vllm.log") as started:
        return _run(kind, files, started, names)


def _run(kind: str, files: Sequence[str], url: str, names: Sequence[str]) -> Outcomes:
    out = REPORTS / f"vllm_tests_{kind}.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)
    # The outcomes of other files stay, so that the files can be run in parts.
    others = {name: found for name, found in _read(out).items() if _path(name) not in files}
    out.write_text("".join(json.dumps([name, *found]) + "\n" for name, found in others.items()))
    wanted = REPORTS / "vllm_tests_names.json"
    wanted.write_text(json.dumps(list(names)))
    environment = {
        **os.environ,
        "COMPAT_NAMES": str(wanted),
        "PYTHONPATH": str(_PLUGIN),
        "COMPAT_URL": url,
        "COMPAT_OUTCOMES": str(out),
        "COMPAT_GIVEN": " ".join(given_flags()),
        "VLLM_ENABLE_RESPONSES_API_STORE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_PLUGINS": "",
    }
    options = ["-c", os.devnull, "--rootdir", str(FOLDER), "-p", "standing_server", "-p", "no:cacheprovider"]
    options += ["-p", "no:schemathesis", "-o", "asyncio_default_fixture_loop_scope=function", "--tb=short", "-q"]
    options += ["--continue-on-collection-errors"]
    command = [sys.executable, "-m", "pytest", *options, *files]
    with (REPORTS / f"vllm_tests_{kind}.log").open("w") as log:
        subprocess.run(command, cwd=FOLDER, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=_TIMEOUT_S)
    outcomes = _of_files(_read(out), files)
    if not outcomes:
        raise RuntimeError(f"pytest ended without outcomes: read {log.name}")
    return outcomes


def _read(file: Path) -> Outcomes:
    """The outcomes in a file; of several of one test, such as of its call and its end, the last counts."""
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {name: (outcome, text) for name, outcome, text in rows}


def _of_files(outcomes: Outcomes, files: Sequence[str]) -> Outcomes:
    return {name: found for name, found in outcomes.items() if _path(name) in files}


def _path(name: str) -> str:
    return name.partition("::")[0]


def lost(vllm: Outcomes, tandem: Outcomes) -> dict[str, str]:
    """Every test that plain vLLM passes and Tandem does not, with the last line of its failure."""
    found = {}
    for name, (outcome, _) in vllm.items():
        other, text = tandem.get(name, ("missing", ""))
        if outcome == "passed" and other != "passed":
            found[name] = f"{other}: {text.strip().splitlines()[-1] if text.strip() else ''}"
    return found


def table(outcomes: Mapping[str, Outcomes]) -> str:
    """Counts by file and server, then the tests that Tandem alone does not pass, then why tests were skipped."""
    vllm = outcomes[VLLM]
    kinds = [kind for kind in outcomes if kind != VLLM]
    lines = [f"| file | tests | vLLM passes | {' | '.join(f'Tandem passes, {kind}' for kind in kinds)} |"]
    lines.append(f"|---|---:|---:|{'---:|' * len(kinds)}")
    for file in [*sorted({_file(name) for name in vllm}), ""]:
        names = [name for name in vllm if file in ("", _file(name))]
        passed = [sum(each.get(name, ("",))[0] == "passed" for name in names) for each in outcomes.values()]
        lines.append(f"| {file or '**all**'} | {len(names)} | {' | '.join(map(str, passed))} |")
    for kind in kinds:
        found = lost(vllm, outcomes[kind])
        lines += ["", f"Passed by plain vLLM and not by Tandem, prompts {kind}: {len(found)}", ""]
        lines += [f"- `{_short(name)}`: {EXPECTED.get(name, text[:300])}" for name, text in found.items()]
    reasons = Counter(text for outcome, text in vllm.values() if outcome == "skipped")
    lines += ["", "Skipped on every server:", ""]
    lines += [f"- {count}: {reason.removeprefix('Skipped: ')}" for reason, count in reasons.most_common()]
    return "\n".join(lines) + "\n"


def _file(name: str) -> str:
    return _short(name).partition("::")[0]


def _short(name: str) -> str:
    return name.removeprefix("tests/entrypoints/")


def main(
    prompts: Annotated[str, typer.Option(help="remote, local, or both: who computes the prompts in Tandem.")] = "both",
    only: Annotated[str, typer.Option(help="Run only files whose path has this text.")] = "",
    reuse: Annotated[str, typer.Option(help="vllm or all: take the outcomes of earlier runs.")] = "",
    vllm_url: Annotated[str | None, typer.Option(help="A plain vLLM that runs.")] = None,
    tandem_url: Annotated[str | None, typer.Option(help="A Tandem that runs; give --prompts too.")] = None,
    out: Annotated[Path, typer.Option(help="Write the table here.")] = REPORTS / "vllm_tests.md",
) -> None:
    """Run vLLM's tests against the servers and print the table; fails if Tandem alone fails one without a reason."""
    driver_environment()  # before anything imports ray
    console = Console()
    files = [file for file in fetched_tests(MODEL) if only in file]
    earlier = REPORTS / f"vllm_tests_{VLLM}.jsonl"
    is_reused = reuse and earlier.exists()
    outcomes: dict[str, Outcomes] = {VLLM: _read(earlier) if is_reused else outcomes_of(VLLM, files, vllm_url, console)}
    # A test that plain vLLM fails, such as one that waits for a better model, says nothing of Tandem.
    passed = [name for name, (outcome, _) in outcomes[VLLM].items() if outcome == "passed"]
    for kind in [*TANDEMS] if prompts == "both" else [prompts]:
        outcomes[kind] = outcomes_of(kind, files, tandem_url, console, passed)
    text = table(outcomes)
    write_file(out, text, "--out")
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    if any(lost(outcomes[VLLM], each).keys() - EXPECTED.keys() for kind, each in outcomes.items() if kind != VLLM):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
