"""Runs the checks of one client in its environment, and reads what they print."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.lab.clients.checks import FAILED, MARK, PASSED, SKIPPED, Outcome, Server
from tests.lab.clients.environments import Client

ROOT = Path(__file__).parents[3]
# No client asks a model hub, a price list or a tracing service; there is none to reach.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "LANG": "C.UTF-8",
    "NO_COLOR": "1",
    "COLUMNS": "200",
    "PYTHONUNBUFFERED": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What the checks of a client found.

    Attributes:
        client: its name.
        version: its version.
        outcomes: one for each check.
        seconds: how long all checks took.
        reason: why none of them ran; empty if they ran.
    """

    client: str
    version: str
    outcomes: tuple[Outcome, ...] = ()
    seconds: float = 0.0
    reason: str = ""

    def count(self, state: str) -> int:
        """Number of checks that ended in this state."""
        return sum(outcome.state == state for outcome in self.outcomes)

    @property
    def has_failed(self) -> bool:
        """Whether a check failed."""
        return self.count(FAILED) > 0


def run_checks(client: Client, python: Path, server: Server, logs: Path) -> Row:
    """Run all checks of a client; those that did not end in time, or were not reached, have failed.

    ``logs``: folder for what the client prints.
    """
    environment = {
        **_ENVIRONMENT,
        **server.environment(),
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "HOME": server.folder,
    }
    out, began_s = logs / f"{client.name}.out", time.monotonic()
    with out.open("w") as stdout, (logs / f"{client.name}.log").open("w") as stderr:
        process = subprocess.Popen(
            [str(python), "-m", client.module],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        end = _wait(process, client.limit_s)
    outcomes = read_outcomes(out.read_text(errors="replace").splitlines(), end)
    seconds = time.monotonic() - began_s
    return Row(client=client.name, version=client.version, outcomes=outcomes, seconds=seconds)


def read_outcomes(lines: Iterable[str], end: str) -> tuple[Outcome, ...]:
    """The outcomes that a client's process printed.

    ``end``: how the process ended, if not as it should; checks without an outcome have failed for this reason.
    """
    values = [json.loads(line.removeprefix(MARK)) for line in lines if line.startswith(MARK)]
    names = values[0] if values else ["start"]
    outcomes = [Outcome(**value) for value in values[1:]]
    missing = names[len(outcomes) :]
    reason = end or "the process ended before it"
    return (*outcomes, *(Outcome(name=name, state=FAILED, detail=reason) for name in missing))


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> str:
    """Wait for the end, and end what is left of the client; returns what was wrong with the end, or nothing."""
    end = ""
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        end = f"over the time limit of {limit_s:g} s for the client"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return end or (f"the process ended with code {process.returncode}" if process.returncode else "")


__all__ = ["FAILED", "PASSED", "ROOT", "SKIPPED", "Row", "read_outcomes", "run_checks"]
