"""A copy of a model's files on a node's own disk, made once for all replicas that load them there (pure)."""

import fcntl
import hashlib
import logging
import shutil
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)


def staged(source: Path, into: Path) -> Path:
    """The copy of a model's folder below ``into``; makes it if it is absent, and blocks while another process copies.

    A copy is whole or absent. It belongs to one state of the files: names, sizes and times. If no copy can be made,
    this returns the original, which only loads more slowly.
    """
    try:
        target = into / f"{source.name}-{_digest(source)}"
        if target.is_dir():
            return target
        into.mkdir(parents=True, exist_ok=True)
        with (into / f".{target.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.is_dir():
                _copy(source, target)
        return target
    except OSError as error:
        logger.warning("%s cannot be staged in %s, so it is loaded from its own folder: %s", source, into, error)
        return source


def _copy(source: Path, target: Path) -> None:
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        shutil.copytree(source, partial, dirs_exist_ok=True)
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _digest(source: Path) -> str:
    files = sorted(path for path in source.rglob("*") if path.is_file())
    if not files:
        raise FileNotFoundError(f"{source} has no files")
    digest = hashlib.sha256()
    for path in files:
        stat = path.stat()
        digest.update(f"{path.relative_to(source)}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:12]
