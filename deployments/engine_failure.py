"""Why an engine did not start: vLLM's engine core writes it to the log it shares with its replica, and says no more."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_TAIL_BYTES = 1 << 17
_RAISED = re.compile(r"^\((?:EngineCore|Worker)[^)]*\) ((?:\w+\.)*\w*(?:Error|Exception): .+)$", re.MULTILINE)


@contextmanager
def named_cause() -> Iterator[None]:
    """Around an engine's start: an error that only points at the log is raised again with what the log says.

    Raises:
        RuntimeError: the engine did not start.
    """
    try:
        yield
    except RuntimeError as error:
        cause = raised_in_engine(_own_log()) if "root cause" in str(error) else None
        if cause is None:
            raise
        raise RuntimeError(f"the engine did not start: {cause}") from None


def raised_in_engine(log: str) -> str | None:
    """The last exception that an engine process ended with, by the lines that vLLM prefixes with its name."""
    raised: list[str] = _RAISED.findall(log)
    return raised[-1] if raised else None


def _own_log() -> str:
    log = Path("/proc/self/fd/2").resolve()
    if not log.is_file():
        return ""
    with log.open("rb") as lines:
        lines.seek(max(0, os.fstat(lines.fileno()).st_size - _TAIL_BYTES))
        return lines.read().decode(errors="replace")
