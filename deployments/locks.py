"""Claims that end with the process that made them: exclusive locks on files."""

import fcntl
import os
import stat
from pathlib import Path
from typing import IO

# Shared by every cluster of one user on a machine, whatever its TMPDIR.
CLAIMS = Path(f"/tmp/tandem-claims-{os.getuid()}")  # noqa: S108


def own_folder(folder: Path) -> Path:
    """The folder of claims, there and this user's alone.

    Raises:
        PermissionError: it is somebody else's, who could hold every claim, or a link.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        kind = "a folder" if stat.S_ISDIR(found.st_mode) else "a link"
        raise PermissionError(
            f"{folder} is {kind} of user {found.st_uid}, and this is user {os.getuid()}: have it removed; "
            "claims are kept in a folder of one's own"
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        folder.chmod(0o700)
    return folder


def try_lock(path: Path) -> IO[str] | None:
    """The file, locked until it is closed or the process ends; ``None`` where another one holds it."""
    handle = path.open("a")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        return None
    return handle
