"""``tandem key``: it prints a key once, and the file keeps the hash of the key."""

import os
import stat
from pathlib import Path

import pytest

from deployments.endpoint.api_keys import ApiKeys
from serve_app.cli.main import main


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["tandem", "key", *arguments])
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise


def test_the_endpoint_accepts_each_printed_key(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    for name in ("a", "b"):
        run(monkeypatch, name, "--file", str(file))
    first, second = capsys.readouterr().out.split()
    keys = ApiKeys(file)
    assert (keys.name_of(f"Bearer {first}"), keys.name_of(f"Bearer {second}")) == ("a", "b")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["keys"]


@pytest.mark.parametrize(("before", "name"), [("my-secret\n", "a"), ("", "team a")])
def test_a_wrong_name_or_file_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, before: str, name: str
) -> None:
    file = tmp_path / "keys"
    file.write_text(before)
    with pytest.raises(SystemExit):
        run(monkeypatch, name, "--file", str(file))
    said = capsys.readouterr()
    assert said.err.startswith("tandem: ") and not said.out
    assert file.read_text() == before


def test_a_file_keeps_its_readers_and_a_link_stays_a_link(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file, link = tmp_path / "keys", tmp_path / "link"
    file.touch(mode=0o640)
    link.symlink_to(file)
    run(monkeypatch, "a", "--file", str(link))
    assert link.is_symlink()
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert file.read_text().startswith("a sha256:")


def test_a_file_that_is_no_text_is_refused_and_stays(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(SystemExit):
        run(monkeypatch, "a", "--file", str(file))
    assert "not a text file: give a key file" in capsys.readouterr().err
    assert file.read_bytes() == b"\xff\xfe"
    with pytest.raises(ValueError, match="it is no text"):
        ApiKeys(file)


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files to others")
def test_a_file_keeps_its_owner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.touch()
    os.chown(file, 12345, 12346)
    run(monkeypatch, "a", "--file", str(file))
    assert (file.stat().st_uid, file.stat().st_gid) == (12345, 12346)
