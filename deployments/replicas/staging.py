"""A copy of a model's files on a node's own disk, made once for all replicas that load them there."""

import fcntl
import hashlib
import logging
import shutil
import tempfile
import threading
from pathlib import Path

import psutil

logger = logging.getLogger(__name__)

_READ_BYTES = 4 << 20  # length of one read, bytes: the speed of a disk depends little on it from 1 MB on
# Most of the node's available memory that files may fill which are read ahead: the engine that starts needs some too.
_READ_AHEAD_FRAC = 0.5


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


def read_ahead(folder: Path) -> threading.Thread | None:
    """Begin to read a folder's files into the node's page cache, so that the disk works while the engine is built.

    Returns the thread that reads; ``None``: the files are too large for the memory that is available.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    if sum(path.stat().st_size for path in files) > _READ_AHEAD_FRAC * psutil.virtual_memory().available:
        return None
    thread = threading.Thread(target=_read, args=(files,), name="tandem-read-ahead", daemon=True)
    thread.start()
    return thread


def _read(files: list[Path]) -> None:
    buffer = bytearray(_READ_BYTES)
    try:
        for path in files:
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass
    except OSError as error:  # the engine reads the files too, and says what is wrong with them
        logger.debug("a file is not read ahead: %s", error)


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
