"""Runs the checks of one client inside its environment, and prints one line of JSON per check.

It imports Python's own library only: the environment of a client has nothing else of ours.
"""

import asyncio
import inspect
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

# The longest part of an error that a report shows, in characters.
_SHOWN_CHARS = 600
# The part of a client's output that explains its end, in characters.
_END_CHARS = 400
# Every line of ours on the standard output starts with it; clients print there too.
MARK = "@check "
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"

Check = Callable[[], Any]


class Skip(Exception):  # noqa: N818 - it is no error
    """Raised by a check that cannot run here; the message is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a check found.

    Attributes:
        name: name of the check.
        state: ``passed``, ``failed`` or ``skipped``.
        seconds: how long it took.
        detail: the error of a failed check, the reason of a skipped one.
    """

    name: str
    state: str
    seconds: float = 0.0
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """The server under test.

    Attributes:
        url: its URL, without ``/v1``.
        model: the model's name on the server.
        tokenizer: a folder with the model's tokenizer, for clients that need one.
        key: the API key; ``none`` if the server needs none.
        folder: a folder for the client's files.
    """

    url: str
    model: str
    tokenizer: str
    key: str
    folder: str

    @property
    def base_url(self) -> str:
        """The URL that clients of OpenAI's API take."""
        return f"{self.url}/v1"

    def environment(self) -> dict[str, str]:
        """The same, as variables of a client's process."""
        return {f"CLIENTS_{name.upper()}": value for name, value in asdict(self).items()}

    @classmethod
    def load(cls) -> "Server":
        """The server that this process's variables name."""
        return cls(**{name: os.environ[f"CLIENTS_{name.upper()}"] for name in cls.__dataclass_fields__})


class Checks:
    """The checks of a client, in the order of their definition."""

    def __init__(self) -> None:
        """No checks yet."""
        self._checks: dict[str, Check] = {}

    def add(self, check: Check) -> Check:
        """Add a function, which may be a coroutine; its name, with spaces, is the check's name."""
        self._checks[check.__name__.strip("_").replace("_", " ")] = check
        return check

    def run(self) -> None:
        """Print the names of all checks, then run each and print its outcome."""
        wanted = sys.argv[1:]
        chosen = {name: check for name, check in self._checks.items() if not wanted or name in wanted}
        _print(list(chosen))
        for name, check in chosen.items():
            _print(asdict(_outcome(name, check)))


def call(module: str, *arguments: str, timeout_s: float = 240.0) -> str:
    """Run a client's command line, ``python -m MODULE``, in the folder for its files; returns what it printed.

    Raises RuntimeError: it ended with an error.
    """
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(
        command, cwd=Server.load().folder, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    sys.stderr.write(f"$ {' '.join(command)}\n{done.stdout}\n{done.stderr}\n")
    if done.returncode:
        end = (done.stdout + done.stderr).strip()[-_END_CHARS:]
        raise RuntimeError(f"{module} ended with code {done.returncode}: {end}")
    return done.stdout


def raises(error: type[Exception], call: Callable[[], Any]) -> Any:
    """The error that a call raises; fails if it raises none, or one of another class."""
    try:
        answer = call()
    except error as raised:
        assert type(raised) is error, f"raised {type(raised).__name__}, not {error.__name__}: {raised}"
        return raised
    raise AssertionError(f"no {error.__name__}, but an answer: {answer!r}"[:_SHOWN_CHARS])


def _outcome(name: str, check: Check) -> Outcome:
    began_s = time.monotonic()
    state, detail = PASSED, ""
    try:
        result = check()
        if inspect.iscoroutine(result):
            asyncio.run(result)
    except Skip as reason:
        state, detail = SKIPPED, str(reason)
    except Exception as error:
        state, detail = FAILED, f"{type(error).__name__}: {error}{_place(error)}"[:_SHOWN_CHARS]
    return Outcome(name=name, state=state, seconds=round(time.monotonic() - began_s, 2), detail=detail)


def _place(error: Exception) -> str:
    """Where an assertion without a message failed; empty for other errors."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not isinstance(error, AssertionError) or str(error):
        return ""
    lines, first = inspect.getsourcelines(trace.tb_frame.f_code)
    return f"{lines[trace.tb_lineno - first].strip()} (line {trace.tb_lineno})"


def _print(value: object) -> None:
    print(MARK + json.dumps(value), flush=True)
