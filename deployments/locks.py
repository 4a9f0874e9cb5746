"""Claims that end with the process that made them: exclusive locks on files."""

import fcntl
import os
from pathlib import Path
from typing import IO

# Shared by every cluster of one user on a machine, whatever its TMPDIR.
CLAIMS = Path(f"/tmp/tandem-claims-{os.getuid()}")  # noqa: S108


def try_lock(path: Path) -> IO[str] | None:
    """The file, locked until it is closed or the process ends; ``None`` where another one holds it."""
    handle = path.open("a")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        return None
    return handle
