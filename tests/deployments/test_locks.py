"""Whose the folder of claims is, and who has a lock."""

import os
from pathlib import Path

import pytest

from deployments.locks import own_folder, try_lock


def test_the_folder_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    folder = own_folder(tmp_path / "a" / "claims")
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o775)  # as an older version left it
    assert own_folder(folder).stat().st_mode & 0o777 == 0o700


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = os.getuid(), os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    with pytest.raises(PermissionError, match=f"is a folder of user {own}, and this is user {other}: have it removed"):
        own_folder(tmp_path)


def test_a_link_to_another_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "claims").symlink_to(tmp_path)
    with pytest.raises(PermissionError, match="is a link"):
        own_folder(tmp_path / "claims")


def test_a_lock_is_held_until_its_file_is_closed(tmp_path: Path) -> None:
    lock = try_lock(tmp_path / "one")
    assert lock is not None
    assert try_lock(tmp_path / "one") is None
    lock.close()
    again = try_lock(tmp_path / "one")
    assert again is not None
    again.close()
