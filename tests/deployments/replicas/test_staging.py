"""A model's files are copied to a node's own disk once, and only a whole copy counts."""

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deployments.replicas import staging
from deployments.replicas.staging import staged


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
