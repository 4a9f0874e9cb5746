"""A model's files are copied to a node's own disk once, and only a whole copy counts."""

import ctypes
import logging
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from deployments.replicas import staging
from deployments.replicas.staging import read_ahead, staged


@pytest.fixture(name="model")
def _model(tmp_path: Path) -> Path:
    folder = tmp_path / "shared" / "llama"
    (folder / "sub").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "sub" / "weights.safetensors").write_bytes(b"w" * 1000)
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_copy_is_made_once_and_found_again(model: Path, tmp_path: Path) -> None:
    copy = staged(model, tmp_path / "disk")
    assert copy.parent == tmp_path / "disk" and files(copy) == files(model)
    made_s = copy.stat().st_mtime_ns
    assert staged(model, tmp_path / "disk") == copy
    assert copy.stat().st_mtime_ns == made_s


def test_files_are_read_ahead_into_the_page_cache(model: Path) -> None:
    weights = model / "sub" / "weights.safetensors"
    weights.write_bytes(os.urandom(16 << 20))
    with weights.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert cached_frac(weights) < 0.5
    thread = read_ahead(model)
    assert thread is not None
    thread.join()
    assert cached_frac(weights) == 1.0


def test_files_larger_than_half_of_the_memory_are_not_read_ahead(model: Path) -> None:
    with (model / "huge.safetensors").open("wb") as file:
        file.truncate(psutil.virtual_memory().total)  # a hole, which takes no room on the disk
    assert read_ahead(model) is None


def test_files_that_vanish_are_no_error_of_the_thread(model: Path) -> None:
    staging._read([model / "gone", model / "config.json"])


def cached_frac(path: Path) -> float:
    """Share of a file's pages that are in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = path.stat().st_size
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as pages:
        states = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        at = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        assert libc.mincore(ctypes.c_void_p(at), ctypes.c_size_t(size), states) == 0
        return sum(state & 1 for state in states) / len(states)


def test_changed_files_make_another_copy(model: Path, tmp_path: Path) -> None:
    before = staged(model, tmp_path / "disk")
    (model / "sub" / "weights.safetensors").write_bytes(b"v" * 1000)
    os.utime(model / "sub" / "weights.safetensors", (1.0, 1.0))
    after = staged(model, tmp_path / "disk")
    assert after != before and files(after) == files(model)


def test_a_process_that_comes_while_another_copies_waits_for_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[Path] = []
    copy = staging._copy

    def counted(source: Path, target: Path) -> None:
        copied.append(target)
        copy(source, target)

    monkeypatch.setattr(staging, "_copy", counted)
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: staged(model, tmp_path / "disk"), range(8)))
    assert len(found) == 1 and len(copied) == 1


def test_half_a_copy_is_not_used(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(source: Path, partial: Path, **_: object) -> None:
        (partial / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(staging.shutil, "copytree", breaks)
        assert staged(model, tmp_path / "disk") == model
    assert not [path for path in (tmp_path / "disk").iterdir() if path.is_dir()]
    assert files(staged(model, tmp_path / "disk")) == files(model)


def test_a_model_that_cannot_be_staged_is_loaded_from_its_own_folder(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        assert staged(model, tmp_path / "file" / "below") == model
        assert staged(tmp_path / "nowhere", tmp_path / "disk") == tmp_path / "nowhere"
    assert caplog.text.count("it is loaded from its own folder") == 2
